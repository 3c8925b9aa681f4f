"""Two CPU stages: Blockpipe beside the plain loop, a pipeline by hand and other libraries.

    python examples/benchmarks/peers.py

For each workload and number of micro-batches: everybody's loss and gradients are compared with the
plain loop's, then all are timed in turn, in one run. Who is not installed is left out:

    pip install -r examples/benchmarks/requirements-peers.txt
"""

import argparse
import importlib.util
import statistics
from collections.abc import Sequence
from contextlib import ExitStack

from measure import interleaved, machine, table  # before torch: it sets OMP_NUM_THREADS

import torch
from torch import Tensor

from candidates import (
    Blockpipe,
    BlockpipeGpipe,
    ByHand,
    ByHandPinned,
    Candidate,
    Plain,
    PlainTwoThreads,
    Task,
    TwoThreads,
    can_pin,
)
from rivals import Fairscale, FairscalePatched, Torchgpipe, TorchgpipePatched
from two_processes import (
    BlockpipeProcesses,
    Processes,
    ProcessesFailedError,
    TorchPipelining,
    TorchTracer,
)
from workloads import WORKLOADS, stage_seconds

BASELINE = "plain-loop"
CANDIDATES: dict[str, type[Candidate]] = {
    BASELINE: Plain,
    "plain-loop-2-threads": PlainTwoThreads,
    "independent-threads": TwoThreads,
    "by-hand": ByHand,
    "by-hand-pinned": ByHandPinned,
    "blockpipe": Blockpipe,
    "blockpipe-gpipe": BlockpipeGpipe,
    "torchgpipe": Torchgpipe,
    "torchgpipe-patched": TorchgpipePatched,
    "fairscale": Fairscale,
    "fairscale-patched": FairscalePatched,
    "torch-pipelining": TorchPipelining,
    "torch-tracer": TorchTracer,
    "blockpipe-processes": BlockpipeProcesses,
}
TO_THE_BIT = {"blockpipe", "blockpipe-gpipe"}  # what Blockpipe promises on the CPU
RECOMPUTES = ("blockpipe", "torchgpipe", "fairscale")
TOLERANCE = 1e-4  # of the gradient's norm: a whole batch's loss is rounded differently
SHORT = 0.1  # seconds of a step: below, what ran before it shows in its time


def main() -> None:
    """One table for each workload and number of micro-batches."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--chunks", type=int, nargs="+", default=[4, 8, 16], help="even numbers")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--only", nargs="+", choices=CANDIDATES, metavar="NAME")
    parser.add_argument(
        "--gpipe", action="store_true", help="also Blockpipe in GPipe's order, with 1F1B"
    )
    parser.add_argument(
        "--checkpoint",
        choices=["never", "except_last", "always"],
        default="never",
        help="recomputation, of those who have it: the others are left out",
    )
    options = parser.parse_args()
    if any(chunks < 2 or chunks % 2 for chunks in options.chunks):
        parser.error("--chunks: even numbers, since the independent threads take half each")
    names = [name for name in CANDIDATES if name in (options.only or CANDIDATES)]
    if not options.gpipe and options.only is None:
        names.remove("blockpipe-gpipe")
    if options.checkpoint != "never":
        names = [name for name in names if name.startswith(RECOMPUTES)]
    print(machine())
    names = runnable(names)
    for workload in options.workload:
        seconds = stage_seconds(WORKLOADS[workload])
        stages = " and ".join(f"{1e3 * s:.2f}" for s in seconds)
        print(f"\n{workload}: stages of {stages} ms a micro-batch, forward and backward")
        for chunks in options.chunks:
            print(f"\n{workload}, {chunks} micro-batches", flush=True)
            untimed = 1 if chunks * sum(seconds) < SHORT else 0
            lines = measure(
                workload,
                chunks,
                names,
                repeats=options.repeats,
                untimed=untimed,
                checkpoint=options.checkpoint,
            )
            print(lines, flush=True)


def runnable(names: Sequence[str]) -> list[str]:
    """The baseline and those that can run here; says which cannot, and why."""
    found = []
    for name in dict.fromkeys([BASELINE, *names]):
        lacks = lacking(name)
        if lacks is None:
            found.append(name)
        else:
            print(f"{name} is left out: {lacks}")
    return found


def lacking(name: str) -> str | None:
    """What a candidate needs and this machine has not."""
    package = name.removesuffix("-patched")
    if package in ("torchgpipe", "fairscale") and not importlib.util.find_spec(package):
        return f"{package} is missing; pip install -r examples/benchmarks/requirements-peers.txt"
    if name == "by-hand-pinned" and not can_pin():
        return "the system gives no two cores to keep threads to"
    return None


def measure(
    workload: str,
    chunks: int,
    names: Sequence[str],
    *,
    repeats: int,
    untimed: int,
    checkpoint: str,
) -> str:
    """Check the gradients, then time all in turn."""
    sample = WORKLOADS[workload].sample(chunks)
    task = Task(WORKLOADS[workload], workload, chunks, *sample, checkpoint)
    with ExitStack() as stack:
        candidates: dict[str, Candidate] = {}
        notes: dict[str, str] = {}
        for name in names:
            candidates[name] = candidate = CANDIDATES[name](task)
            stack.callback(candidate.close)
            try:
                result = candidate.step()
                found = candidate.gradients()
            except ProcessesFailedError as error:
                print(f"{name} is left out: {error}", flush=True)
                del candidates[name]
                continue
            loss = candidate.loss if isinstance(candidate, Processes) else float(result)
            if name == BASELINE:
                expected, expected_loss = found, loss
            assert abs(loss - expected_loss) < TOLERANCE * abs(expected_loss), name
            notes[name] = compare(name, found, expected)
        times = timed(candidates, repeats, untimed)
        for name, candidate in candidates.items():
            if isinstance(candidate, Processes):
                seconds = statistics.median(candidate.processor[-repeats:])
                notes[name] += f"; {1e3 * seconds:.1f} ms of the processors"
        return table(times, BASELINE, notes)


def timed(candidates: dict[str, Candidate], repeats: int, untimed: int) -> dict[str, list[float]]:
    """Time all in turn; anew without those whose processes fail meanwhile."""
    while True:
        try:
            runs = {name: candidate.step for name, candidate in candidates.items()}
            return interleaved(runs, repeats, untimed=untimed)
        except ProcessesFailedError as error:
            name = next(n for n, c in candidates.items() if c is error.candidate)
            print(f"{name} is left out: {error}", flush=True)
            del candidates[name]


def compare(name: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """How near the gradients are to the plain loop's.

    Raises:
        AssertionError: not near enough.
    """
    pairs = list(zip(found, expected, strict=True))
    if all(torch.equal(g, e) for g, e in pairs):
        return "to the bit"
    error = torch.stack([(g - e).norm() for g, e in pairs]).norm()
    error /= torch.stack([e.norm() for _, e in pairs]).norm()
    if name in TO_THE_BIT or not error < TOLERANCE:
        raise AssertionError(f"{name}: gradients differ by {error:.1e} of their norm")
    return f"to {error:.0e}"


if __name__ == "__main__":
    main()
