"""Two versions of Blockpipe side by side in one run: is a step slower than it was?

    git worktree add ../earlier <commit>
    python examples/benchmarks/versions.py --other ../earlier

The workloads of ``peers.py``, the single stage of ``one_stage.py`` and the sizes of
``small_operations.py`` (on lanes), with the plain loop beside them: one of its runs, one of each
version's, and again, so that a noisy moment hits all alike. Last comes a recording of a handwritten
model, beside one plain forward. The other version is loaded under
another name into the same process. The ratios are medians over the pairs; the last one is of the
processor's time of all threads, which other programs on the machine hardly disturb.
"""

import argparse
import copy
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from measure import interleaved, machine  # before torch: it sets OMP_NUM_THREADS

import torch
from torch import nn

import one_stage
import small_operations
from candidates import Blockpipe, Candidate, Plain, Task
from workloads import WORKLOADS

import blockpipe

NAME = "blockpipe_other"
KINDS = ("peers", "one_stage", "small", "recording")
Runs = dict[str, Callable[[], object]]


def main() -> None:
    """A line for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--other", type=Path, required=True, help="a checkout of another version")
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument(
        "--only", nargs="+", choices=KINDS, default=KINDS, help="some kinds of cases"
    )
    options = parser.parse_args()
    other = load(options.other)
    print(machine())
    columns = "plain, ms   other / plain   this / plain   this / other   by the processor's clock"
    print(f"{'':<28} {columns}")
    for workload in WORKLOADS if "peers" in options.only else ():
        tell(f"{workload}, 8 micro-batches", peers(workload, 8, other), options.repeats)
    if "one_stage" in options.only:
        tell("one stage", single(other), 10 * options.repeats)
    for width, rows, layers in small_operations.CASES if "small" in options.only else ():
        runs = small(width, rows, layers, other)
        tell(f"small: {width} x {rows}, {layers}", runs, options.repeats)
    if "recording" in options.only:
        tell("recording, 24 layers", recording(24, other), max(3, options.repeats // 4))


def load(checkout: Path) -> ModuleType:
    """Another checkout's package, which imports its own modules relatively."""
    package = checkout / "blockpipe"
    spec = importlib.util.spec_from_file_location(
        NAME, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    if spec is None or spec.loader is None or not package.is_dir():
        raise SystemExit(f"expected a checkout with a folder blockpipe, got {checkout}")
    module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tell(case: str, runs: Runs, repeats: int) -> None:
    """Time them in turn; print medians and the pairs' ratios."""
    clocks: dict[str, list[float]] = {name: [] for name in runs}
    times = interleaved(
        {name: clocked(run, clocks[name]) for name, run in runs.items()}, repeats, untimed=1
    )
    plain, other, this = times["plain"], times["other"], times["this"]
    ratios = [
        statistics.median(a / b for a, b in zip(one, two, strict=True))
        for one, two in ((other, plain), (this, plain), (this, other))
    ]
    pairs = zip(clocks["this"][3:], clocks["other"][3:], strict=True)  # behind the warm-up
    lower, middle, upper = statistics.quantiles((a / b for a, b in pairs), n=4)
    print(
        f"{case:<28} {1e3 * statistics.median(plain):9.2f} {ratios[0]:15.3f} {ratios[1]:14.3f} "
        f"{ratios[2]:14.3f}   {middle:.3f} (quartiles {lower:.3f} and {upper:.3f})",
        flush=True,
    )


def clocked(run: Callable[[], object], into: list[float]) -> Callable[[], object]:
    """Return a run that notes the processor's seconds."""

    def call() -> object:
        begun = time.process_time()
        result = run()
        into.append(time.process_time() - begun)
        return result

    return call


def peers(workload: str, chunks: int, other: ModuleType) -> Runs:
    """A workload on two stages."""
    task = Task(WORKLOADS[workload], workload, chunks, *WORKLOADS[workload].sample(chunks))

    class Other(Blockpipe):
        package = other

    candidates: dict[str, Candidate] = {
        "plain": Plain(task),
        "other": Other(task),
        "this": Blockpipe(task),
    }
    return {name: candidate.step for name, candidate in candidates.items()}


def single(other: ModuleType) -> Runs:
    """One stage of about 1 ms a micro-batch."""
    chunks, rows = 8, 40
    x, y = torch.randn(2, chunks * rows, 192).unbind()
    return _beside_plain(
        one_stage.net(192), x, y, chunks, other, lambda package, net: (net, ["cpu"])
    )


def small(width: int, rows: int, layers: int, other: ModuleType) -> Runs:
    """Two lanes, however small the operations are."""
    for package in (blockpipe, other):
        prepared = next(
            module
            for name, module in sys.modules.items()
            if name.startswith(f"{package.__name__}.") and name.endswith(".prepared")
        )
        prepared.SMALL_OPERATION = prepared.SMALL_HOP = 0.0  # type: ignore[attr-defined]
    x, y = torch.randn(2, small_operations.CHUNKS * rows, width).unbind()
    return _beside_plain(
        small_operations.net(width, layers),
        x,
        y,
        small_operations.CHUNKS,
        other,
        lambda package, net: (package.begin_blocks(net, {"1": 1}), ["cpu"] * 2),
    )


class Attention(nn.Module):
    """A layer that its user wrote: a recording looks at such code."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        self.queries, self.keys, self.values = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to all places, and add that."""
        h = self.norm(x)
        scores = self.queries(h) @ self.keys(h).mT
        return x + self.out(scores.softmax(-1) @ self.values(h))


def recording(layers: int, other: ModuleType) -> Runs:
    """Recordings of handwritten layers on two stages, beside a plain forward."""
    net, x = nn.Sequential(*[Attention(32) for _ in range(layers)]), torch.randn(4, 8, 32)

    def record_by(package: ModuleType) -> Callable[[], object]:
        model = package.begin_blocks(copy.deepcopy(net), {str(layers // 2): 1})
        return lambda: package.record(model, x)

    return {"plain": lambda: net(x), "other": record_by(other), "this": record_by(blockpipe)}


def _beside_plain(
    net: nn.Sequential,
    x: torch.Tensor,
    y: torch.Tensor,
    chunks: int,
    other: ModuleType,
    marked: Callable[[ModuleType, nn.Sequential], tuple[nn.Module, list[str]]],
) -> Runs:
    """The plain loop, and each version's step on a copy of the model that it has marked."""

    def plain() -> None:
        for xs, ys in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
            (one_stage.loss_of(net(xs), ys) / chunks).backward()

    def step_of(package: ModuleType) -> Callable[[], object]:
        model, devices = marked(package, copy.deepcopy(net))
        pipe = package.Pipeline(model, devices=devices, chunks=chunks)
        return lambda: pipe.forward_backward(x, target=y, loss_fn=one_stage.loss_of)

    return {"plain": plain, "other": step_of(other), "this": step_of(blockpipe)}


if __name__ == "__main__":
    main()
