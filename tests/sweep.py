"""The model sweep: every model of the zoo, pipelined beside the plain loop.

    python -m tests.sweep                      # everything, a table for each family
    python -m tests.sweep --family timm --only convnext
    python -m tests.sweep --family smp --into docs/explanation/sweep --resume

Each model is cut into 2 and into 4 stages, at its blocks' boundaries and at random inner modules,
and takes one step under the stage sanitizer, 1F1B's or another schedule's. The gradients, the loss
and the buffers are compared with those of the plain loop over the same micro-batches, on one
thread; with --random, with those of the same pipeline under "sequential", without recomputation.
"""

import argparse
import datetime
import gc
import importlib.metadata
import os
import platform
import random
import time
import traceback
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import blockpipe as bp
from blockpipe.errors import PlanError
from blockpipe.preparation import prepared
from blockpipe.preparation.options import CHECKPOINTS
from blockpipe.schedules.builders import SCHEDULES

from .parity import block_marks, compare, random_marks, without_randomness
from .zoo import FAMILIES, LIBRARIES, Entry

CUTS = ("blocks 2", "blocks 4", "random 2", "random 4")
NOT_RUN = "–"


def check(
    entry: Entry,
    cuts: tuple[str, ...] = CUTS,
    seed: int = 0,
    schedule: str = "1f1b",
    checkpoint: str = "never",
    random_too: bool = False,
) -> dict[str, str]:
    """What each cut of one model came to: "exact", a relative difference, or an error."""
    torch.manual_seed(seed)
    model = entry.build() if random_too else without_randomness(entry.build())
    args, kwargs = entry.batch()
    recording = bp.record(model, args, kwargs, fake=False)  # several times faster on small tensors
    rng = random.Random(zlib.crc32(entry.name.encode()) + seed)
    found = {}
    for cut in cuts:
        how, stages = cut.split()
        marks: dict[str, int] = {}
        try:
            if how == "blocks":
                marks = block_marks(model, recording, int(stages))
            else:
                marks = _random_cut(model, args, kwargs, recording, int(stages), rng)
            result, _ = compare(
                model,
                args,
                kwargs,
                marks,
                schedule=schedule,
                checkpoint=checkpoint,
                random=random_too,
                **entry.options,
            )
            worst = max(result.gradients, result.loss, result.buffers)
            found[cut] = "exact" if result.exact else f"{worst:.0e}"
        except Exception as error:
            if os.environ.get("SWEEP_TRACE"):
                traceback.print_exc()
                print(marks)
            found[cut] = f"{type(error).__name__}: {error}"
    return found


def _random_cut(
    model: torch.nn.Module,
    args: Any,
    kwargs: Any,
    recording: bp.Recording,
    stages: int,
    rng: random.Random,
) -> dict[str, int]:
    """Random marks with something on every stage: two marks may have nothing between them."""
    while True:
        marks = random_marks(recording, stages, rng)
        bp.begin_blocks(model, marks)
        try:
            bp.record(model, args, kwargs, fake=False).check()
            return marks
        except PlanError:
            continue
        finally:
            bp.remove_blocks(model)


def main() -> None:
    """Print the tables, or write each into a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=list(FAMILIES), action="append")
    parser.add_argument("--only", help="a part of the names to run")
    parser.add_argument("--cut", choices=CUTS, action="append", help="default: all four")
    parser.add_argument("--into", type=Path, help="a folder for a file of each family's table")
    parser.add_argument(
        "--resume", action="store_true", help="keep the rows that are there and good"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, default="never")
    parser.add_argument("--random", action="store_true", help="leave dropout and the like on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    prepared.SMALL_OPERATION = prepared.SMALL_HOP = 0.0  # on lanes, however small the models
    warnings.simplefilter("ignore")
    for family in options.family or FAMILIES:
        path = options.into and options.into / f"{family}.md"
        earlier = read_rows(path, CUTS) if options.resume and path and path.exists() else {}
        for lines in _tables(family, options, earlier):
            print(lines[-1], flush=True)
            if path:  # after each row: a sweep that is stopped can be resumed
                path.write_text("\n".join(lines) + "\n")
        print()


def _tables(
    family: str, options: argparse.Namespace, earlier: dict[str, dict[str, str]]
) -> Iterator[list[str]]:
    """The lines of a family's table after each of its rows, and at last with what it comes to."""
    lines = [f"| {family} | {' | '.join(CUTS)} | s |", "|---|" + "---|" * (len(CUTS) + 1)]
    outcomes: list[str] = []
    every = FAMILIES[family]()
    entries = [e for e in every if (options.only or "") in e.name or e.name in earlier]
    for entry in entries:
        cells = earlier.get(entry.name) or _cells(entry, options)
        outcomes += [cells[cut] for cut in CUTS if cells[cut] != NOT_RUN]
        lines.append(f"| {entry.name} | {' | '.join(cells.values())} |")
        yield lines
    good = sum(map(is_equal, outcomes))
    summary = (
        f"{good} of {len(outcomes)} cuts of {len(entries)} models equal the plain run "
        f"({versions_of(family)})."
    )
    if kept := sum(entry.name in earlier for entry in entries):
        summary += f" {kept} rows are from an earlier sweep."
    yield [*lines, "", summary]


def _cells(entry: Entry, options: argparse.Namespace) -> dict[str, str]:
    """One row: what each cut came to, and the seconds."""
    cuts = tuple(options.cut or CUTS)
    begun = time.perf_counter()
    try:
        found = check(
            entry,
            cuts,
            seed=options.seed,
            schedule=options.schedule,
            checkpoint=options.checkpoint,
            random_too=options.random,
        )
    except Exception as error:
        if os.environ.get("SWEEP_TRACE"):
            traceback.print_exc()
        found = dict.fromkeys(cuts, f"{type(error).__name__}: {error}")
    gc.collect()  # a model that failed is held by its error's traceback
    cells = {cut: in_cell(found.get(cut, NOT_RUN)) for cut in CUTS}
    return {**cells, "s": f"{time.perf_counter() - begun:.0f}"}


def read_rows(path: Path, columns: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """The rows of a table that an earlier sweep wrote, but for those that failed."""
    lines = [line.strip("| ").split(" | ") for line in path.read_text().splitlines()]
    rows = {
        line[0]: dict(zip((*columns, "s"), line[1:], strict=True)) for line in lines[2:] if line[1:]
    }
    return {
        name: cells
        for name, cells in rows.items()
        if all(cells[column] == NOT_RUN or is_equal(cells[column]) for column in columns)
    }


def in_cell(text: str) -> str:
    """A text as it fits into a table."""
    return " ".join(text.replace("|", "/").split())[:300]


def versions_of(family: str) -> str:
    """What a family's table was made with, and when."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES[family])
    return f"Python {platform.python_version()}, {versions}, {datetime.date.today()}"


def is_equal(value: str) -> bool:
    """Whether a cell says that two runs were the same, to rounding."""
    try:
        return value in ("exact", "equal") or float(value) <= 1e-5
    except ValueError:
        return False


if __name__ == "__main__":
    main()
