"""The model sweep in the form for several processes: stages of the zoo's models beside the plain loop.

    python -m tests.distributed.sweep                                   # stages, one after the other
    python -m tests.distributed.sweep --family timm --only convnext
    python -m tests.distributed.sweep --into docs/explanation/sweep --resume --processes 4

Each model is cut into 2 and into 4 stages, at its blocks' boundaries and where ``balance`` cuts it.
The stages are built from the first of two micro-batches, and run one after the other in this process
on both, with nothing but the boundary's tensors between them: that finds what cannot be built, and
what was taken for a constant, without a launch. With ``--processes``, models whose stages are right take
a step in 2 and in 4 processes, or in as many as it names, over gloo, as well. Loss, gradients and buffers are compared with
those of the plain loop.
"""

import argparse
import copy
import gc
import os
import re
import sysconfig
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import blockpipe as bp
from blockpipe._common.nested import tensors
from blockpipe.batches.batch_dims import BatchDims
from blockpipe.batches.microbatch import Microbatch, split, weights_of
from blockpipe.distributed import DistributedPipeline
from blockpipe.distributed.build import CutForward

from ..parity import any_loss, block_marks, difference, plain_step, without_randomness
from ..sweep import NOT_RUN, in_cell, is_equal, read_rows, versions_of
from ..zoo import FAMILIES, Entry, find
from .chains import run_chain
from .ranks import run_cases

CUTS = ("blocks 2", "blocks 4", "balance 4")
PROCESSES = {"2 processes": 2, "4 processes": 4}
COLUMNS = (*CUTS, *PROCESSES)
_TOGETHER = 12  # models in one launch: a start costs seconds


def stages_of(entry: Entry, cuts: tuple[str, ...]) -> dict[str, str]:
    """What each cut of one model came to: "exact", a relative difference, or an error."""
    model, args, kwargs = _made(entry)
    found = {}
    for cut in cuts:
        try:
            found[cut] = _chain(entry, model, args, kwargs, cut)
        except Exception as error:
            if os.environ.get("SWEEP_TRACE"):
                traceback.print_exc()
            found[cut] = f"{type(error).__name__}: {error}"
    return found


def _made(entry: Entry) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The same model and batch in every process. The model has been called once: some build
    modules then."""
    torch.manual_seed(0)
    model, (args, kwargs) = without_randomness(entry.build()), entry.batch()
    with torch.no_grad():
        model(*args, **kwargs)
    return model, args, kwargs


def _split(entry: Entry) -> tuple[int, BatchDims]:
    """How many micro-batches, and the dims that they are cut at."""
    return entry.options.get("chunks") or 2, entry.options.get("batch_dims")


def _chain(
    entry: Entry, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], cut: str
) -> str:
    plain, marked = copy.deepcopy(model), copy.deepcopy(model)
    chunks, dims = _split(entry)
    parts = split(args, kwargs, None, chunks, dims)
    how, _, count = cut.partition(" ")
    plan = _stages(marked, parts[0], int(count), at_blocks=how == "blocks")
    forward = CutForward(marked, parts[0].args, parts[0].kwargs, plan)
    stages = [forward.module(index) for index in range(len(forward.stages))]
    loss = torch.zeros(())
    for part, weight in zip(parts, weights_of(parts, "mean"), strict=True):
        loss += run_chain(stages, part.args, part.kwargs, lambda o, w=weight: any_loss(o) * w)
    expected = plain_step(plain, args, kwargs, None, any_loss, chunks, batch_dims=dims)
    return _compared(marked, plain, loss, expected)


def _stages(
    model: nn.Module, part: Microbatch, count: int, *, at_blocks: bool
) -> bp.StagePlan | None:
    """Mark the model at its blocks; or return a plan, where they are too few."""
    sample = (model, part.args, part.kwargs)
    if at_blocks:
        recording = bp.record(*sample, fake=False)  # several times faster on small tensors
        bp.begin_blocks(model, block_marks(model, recording, count))
        if len(bp.record(*sample, fake=False).route) == count:
            return None
        bp.remove_blocks(model)
    return bp.balance(model, part.args, count, kwargs=part.kwargs, by="flops", measure=False)


def _compared(mine: nn.Module, plain: nn.Module, loss: Any, expected: Any) -> str:
    """How far the two are apart. What nothing leads to has gradients of zero, or none."""
    for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
        if a.grad is not None and b.grad is None and not a.grad.any():
            a.grad = None
    found = difference(mine, plain, loss, expected)
    return "exact" if found.exact else f"{max(found.gradients, found.loss, found.buffers):.0e}"


# --- in processes


def __getattr__(name: str) -> Callable[[int, int], None]:
    """What each process of a launch runs for a model, by ``family:name``."""
    family, colon, entry = name.partition(":")
    if not colon:
        raise AttributeError(name)
    return lambda rank, ranks: _in_processes(find(family, entry), ranks)


def _has_batch_norm(model: nn.Module) -> bool:
    """Whether a micro-batch of one sample may be too small."""
    kinds = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
    return any(isinstance(module, kinds) for module in model.modules())


def _in_processes(entry: Entry, ranks: int) -> None:
    """A step of 1F1B, beside the plain loop: raises where this process's part differs from it.

    If the batch is too small for as many micro-batches as there are processes, it is one of GPipe.
    """
    warnings.simplefilter("ignore")
    model, args, kwargs = _made(entry)
    plain = copy.deepcopy(model)
    chunks, dims = _split(entry)
    size = next(tensors((args, kwargs))).shape[0]
    if size >= ranks > chunks and not (size < 2 * ranks and _has_batch_norm(model)):
        chunks = ranks
    plan = _stages(model, split(args, kwargs, None, chunks, dims)[0], ranks, at_blocks=True)
    pipe = DistributedPipeline(
        model,
        sample=(args, kwargs),
        plan=plan,
        chunks=chunks,
        batch_dims=dims,
        schedule="1f1b" if chunks >= ranks else "gpipe",
    )
    own = "labels" in kwargs
    loss = pipe.forward_backward(*args, loss_fn=None if own else any_loss, **kwargs).loss
    expected = plain_step(plain, args, kwargs, None, any_loss, chunks, batch_dims=dims)
    torch.testing.assert_close(float(loss), float(expected), rtol=1e-5, atol=1e-6)
    wanted = dict(plain.named_parameters())
    norm = torch.stack([p.grad.norm() for p in wanted.values() if p.grad is not None]).norm()
    for name, parameter in pipe.named_parameters():
        zero = torch.zeros_like(parameter)
        mine, theirs = (zero if p.grad is None else p.grad for p in (parameter, wanted[name]))
        assert (mine - theirs).norm() <= 1e-5 * norm, f"another gradient of {name}"
    dist.barrier()


def in_processes(family: str, names: list[str], ranks: int) -> dict[str, str]:
    """What a step of each of some models came to in several processes, by name."""
    found = {}
    while names:
        now, names = names[:_TOGETHER], names[_TOGETHER:]
        reports = run_cases(
            __name__, [f"{family}:{name}" for name in now], ranks, seconds=1200, patience=180
        )
        for at, name in enumerate(now):
            texts = [*reports[f"{family}:{name}"].values()]
            found[name] = "equal" if not texts else _most_telling(texts)
            if texts and at + 1 < len(now):  # what comes after a failure is not to blame for it
                names = now[at + 1 :] + names
                break
    return found


def _most_telling(texts: list[str]) -> str:
    """The error of the process that failed by itself."""
    own = [text for text in texts if "RankError" not in text]
    return (own or texts)[0].strip().splitlines()[-1]


# --- tables


def main() -> None:
    """Print the tables, or write each into a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=list(FAMILIES), action="append")
    parser.add_argument("--only", help="a part of the names to run")
    parser.add_argument("--cut", choices=CUTS, action="append", help="default: all three")
    parser.add_argument("--into", type=Path, help="a folder for a file of each family's table")
    parser.add_argument("--resume", action="store_true", help="keep the cells that are good")
    parser.add_argument(
        "--processes",
        type=int,
        nargs="*",
        choices=(2, 4),
        help="take steps in so many processes, too; default: 2 and 4",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for family in options.family or FAMILIES:
        path = options.into and options.into / f"distributed-{family}.md"
        _sweep(family, path, options)


def _sweep(family: str, path: Path | None, options: argparse.Namespace) -> None:
    every = {entry.name: entry for entry in FAMILIES[family]()}
    rows: dict[str, dict[str, str]] = {}
    if options.resume and path and path.exists():
        rows = read_rows(path, COLUMNS)
    chosen = [name for name in every if (options.only or "") in name]
    for name in chosen:
        cells = rows.setdefault(name, dict.fromkeys((*COLUMNS, "s"), NOT_RUN))
        if cuts := [cut for cut in options.cut or CUTS if cells[cut] == NOT_RUN]:
            cells.update(_cells(every[name], tuple(cuts)))
            print(f"| {name} | {' | '.join(cells.values())} |", flush=True)
            _write(family, path, every, rows)
    for column, ranks in PROCESSES.items():
        if options.processes is not None and ranks in (options.processes or PROCESSES.values()):
            wanted = [n for n in chosen if rows[n][column] == NOT_RUN and _is_good(rows[n], ranks)]
            for at in range(0, len(wanted), _TOGETHER):
                for name, cell in in_processes(family, wanted[at : at + _TOGETHER], ranks).items():
                    rows[name][column] = _in_cell(cell)
                    print(f"{name}, {column}: {cell}", flush=True)
                _write(family, path, every, rows)
    print("\n".join(_table(family, every, rows)[-1:]))


def _cells(entry: Entry, cuts: tuple[str, ...]) -> dict[str, str]:
    """What some cuts came to, and the seconds."""
    begun = time.perf_counter()
    try:
        found = stages_of(entry, cuts)
    except Exception as error:
        found = dict.fromkeys(cuts, f"{type(error).__name__}: {error}")
    gc.collect()  # a model that failed is held by its error's traceback
    cells = {cut: _in_cell(cell) for cut, cell in found.items()}
    return {**cells, "s": f"{time.perf_counter() - begun:.0f}"}


def _in_cell(text: str) -> str:
    """A text as it fits into a table, with paths as they are in a repository."""
    for folder in (sysconfig.get_path("purelib"), Path.cwd()):
        text = text.replace(f"{folder}/", "")
    return in_cell(text)


def _is_good(row: dict[str, str], stages: int) -> bool:
    return is_equal(row[f"blocks {stages}"])


def _write(
    family: str, path: Path | None, every: dict[str, Entry], rows: dict[str, dict[str, str]]
) -> None:
    if path:  # after each row: a sweep that is stopped can be resumed
        path.write_text("\n".join(_table(family, every, rows)) + "\n")
        _write_totals(path.parent)


def _write_totals(folder: Path) -> None:
    """Write what the tables of all families come to, for the pages that say so."""
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---|" + "---|" * len(COLUMNS)]
    for family in FAMILIES:
        table = folder / f"distributed-{family}.md"
        if table.exists():
            last = table.read_text().splitlines()[-1]
            counts = {cut: count for count, cut in re.findall(r"(\d+ of \d+) \((.*?)\)", last)}
            lines.append(f"| {family} | {' | '.join(counts.get(c, NOT_RUN) for c in COLUMNS)} |")
    (folder / "distributed-totals.md").write_text("\n".join(lines) + "\n")


def _table(family: str, every: dict[str, Entry], rows: dict[str, dict[str, str]]) -> list[str]:
    lines = [f"| {family} | {' | '.join(COLUMNS)} | s |", "|---|" + "---|" * (len(COLUMNS) + 1)]
    rows = {name: rows[name] for name in every if name in rows}
    lines += [f"| {name} | {' | '.join(cells.values())} |" for name, cells in rows.items()]
    counts = []
    for column in COLUMNS:
        cells = [row[column] for row in rows.values() if row[column] != NOT_RUN]
        if cells:
            counts.append(f"{sum(map(is_equal, cells))} of {len(cells)} ({column})")
    return [*lines, "", f"Equal to the plain run: {', '.join(counts)} ({versions_of(family)})."]


if __name__ == "__main__":
    main()
