"""What a profile costs: steps with and without one, side by side.

    python examples/benchmarks/profiling.py
    python examples/benchmarks/profiling.py --other PATH   # beside another checkout's steps

With ``--other``, steps that nobody observes are timed beside those of another version of Blockpipe
(one from before there were observers, say), in processes that take turns.
"""

import argparse
import copy
import os
import statistics
import subprocess
import sys
from pathlib import Path

from measure import interleaved, machine, table  # before torch: it sets OMP_NUM_THREADS

import torch
from torch import Tensor, nn

import blockpipe as bp

CHUNKS, ROWS = 8, 128


def net(width: int, layers: int) -> nn.Sequential:
    """Two stages of equal layers."""
    half = (m for _ in range(layers) for m in (nn.Linear(width, width), nn.Tanh()))
    stages = nn.Sequential(nn.Sequential(*half), nn.Sequential())
    stages[1] = copy.deepcopy(stages[0])
    return bp.begin_blocks(stages, {"1": 1})


def loss_of(output: Tensor) -> Tensor:
    """Mean square."""
    return output.square().mean()


def made(width: int, layers: int, schedule: str) -> tuple[bp.Pipeline, Tensor]:
    """A pipeline that has run, and a batch."""
    torch.manual_seed(0)
    pipe = bp.Pipeline(net(width, layers), devices=["cpu"] * 2, chunks=CHUNKS, schedule=schedule)
    x = torch.randn(CHUNKS * ROWS, width)
    for _ in range(3):
        pipe.forward_backward(x, loss_fn=loss_of)
    return pipe, x


def measure(width: int, layers: int, schedule: str, repeats: int) -> None:
    """One table."""
    pipe, x = made(width, layers, schedule)

    def run() -> None:
        pipe.forward_backward(x, loss_fn=loss_of)

    def profiled() -> bp.Timeline:
        with pipe.profile() as timeline:
            run()
        return timeline

    def gradients() -> list[Tensor]:
        return [p.grad.clone() for p in pipe.parameters()]

    pipe.zero_grad()
    run()
    expected = gradients()
    pipe.zero_grad()
    events = len(profiled().events)
    for a, b in zip(expected, gradients(), strict=True):
        assert torch.equal(a, b), "gradients differ"
    times = interleaved({"without": run, "again": run, "profiled": profiled}, repeats)
    print(f"\nwidth {width}, {layers} layers a stage, {schedule}: {events} events a step")
    print(table(times, "without"))


def unobserved(repeats: int) -> None:
    """Milliseconds of steps without a profile, for whoever compares versions: the least, for a
    process is disturbed as a whole."""
    for width, layers, schedule in CASES:
        pipe, x = made(width, layers, schedule)
        (times,) = interleaved(
            {"": lambda p=pipe, x=x: p.forward_backward(x, loss_fn=loss_of)}, repeats
        ).values()
        print(1e3 * min(times))


CASES = [(512, 4, "1f1b"), (192, 12, "1f1b"), (64, 16, "sequential")]


def compare(other: str, repeats: int) -> None:
    """Steps of this version beside those of another, by processes that take turns."""
    here = str(Path(bp.__file__).parents[1])
    ratios: list[list[float]] = [[] for _ in CASES]
    for _ in range(5):
        found = []
        for path in (here, other):
            program = [sys.executable, __file__, "--unobserved", "--repeats", str(repeats)]
            environment = {**os.environ, "PYTHONPATH": path}
            done = subprocess.run(
                program, env=environment, check=True, capture_output=True, text=True
            )
            found.append([float(line) for line in done.stdout.split()])
        for ratio, a, b in zip(ratios, *found, strict=True):
            ratio.append(a / b)
    for case, ratio in zip(CASES, ratios, strict=True):
        low, high = min(ratio), max(ratio)
        print(f"{case}: {statistics.median(ratio):.3f} ({low:.3f} to {high:.3f})")


def main() -> None:
    """Check the gradients, then time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--other", help="a checkout to compare unobserved steps with")
    parser.add_argument("--unobserved", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.unobserved:
        unobserved(options.repeats)
        return
    print(machine())
    if options.other:
        compare(options.other, options.repeats)
        return
    for width, layers, schedule in CASES:
        measure(width, layers, schedule, options.repeats)


if __name__ == "__main__":
    main()
