"""How much of what could overlap does: steps on the simulated accelerator beside their simulation.

    python examples/benchmarks/overlap.py
    python examples/benchmarks/overlap.py --other PATH    # beside another checkout's steps

The devices are those of the tests: streams whose operations take a time that is set here, copies
too. The simulation plays the same schedule out with the times of the actions as they were
measured, and copies that wait for nothing but what they copy. What a step takes longer is what the
engine makes devices wait for, and the host's own time. With ``--other``, steps of another version
are taken in turn.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

from measure import machine  # before torch: it sets OMP_NUM_THREADS

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[2]))  # for the simulated accelerator

from tests import simulated

import blockpipe as bp
from blockpipe.schedules.simulation import simulate

CHUNKS, LAYERS = 8, 6
OPERATION, COPY = 3000, 1000  # microseconds


class Chain(nn.Module):
    """Equal stages; with ``skips``, what the first one makes is read by the last one too."""

    def __init__(self, hops: int, *, skips: bool) -> None:
        super().__init__()
        self.skips = skips
        self.parts = nn.ModuleList(
            nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(LAYERS)))
            for _ in range(hops)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Each part on a stage of its own."""
        first = x
        for stage, part in enumerate(self.parts):
            with bp.Block(stage=stage):
                if self.skips and stage == len(self.parts) - 1:
                    x = x + first
                x = part(x)
                first = x if stage == 0 else first
        return x


CASES = {
    "gpipe, 2 devices": ("gpipe", [0, 1], False),
    "1f1b, 2 devices": ("1f1b", [0, 1], False),
    "zb-h1, 2 devices": ("zb-h1", [0, 1], False),
    "interleaved, 2 × 2": ("interleaved", [0, 1] * 2, False),
    "zb-v, 2 × 2": ("zb-v", [0, 1, 1, 0], False),
    "gpipe, 4 devices": ("gpipe", [0, 1, 2, 3], False),
    "1f1b, 4 devices": ("1f1b", [0, 1, 2, 3], False),
    "zb-h1, 4 devices": ("zb-h1", [0, 1, 2, 3], False),
    "interleaved, 4 × 2": ("interleaved", [0, 1, 2, 3] * 2, False),
    "gpipe, 4 devices, a skip": ("gpipe", [0, 1, 2, 3], True),
    "1f1b, 4 devices, a skip": ("1f1b", [0, 1, 2, 3], True),
    "zb-h1, 4 devices, a skip": ("zb-h1", [0, 1, 2, 3], True),
}


def mean_square(output: Tensor) -> Tensor:
    """A loss of two operations."""
    return output.square().mean()


def steps(name: str, repeats: int) -> tuple[float, float, int]:
    """Milliseconds: the median of some steps, and what their simulation takes; the races seen."""
    schedule, places, skips = CASES[name]
    simulated.set_delay(OPERATION, OPERATION, 1.0, 0, COPY, COPY)
    torch.manual_seed(0)
    pipe = bp.Pipeline(
        Chain(len(places), skips=skips),
        devices=[f"simulated:{place}" for place in places],
        chunks=CHUNKS,
        schedule=schedule,
    )
    x = torch.randn(2 * CHUNKS, 8)

    def step() -> float:
        begun = time.perf_counter()
        pipe.forward_backward(x, loss_fn=mean_square)
        simulated.settle()
        return 1e3 * (time.perf_counter() - begun)

    for _ in range(2):
        step()
    took = statistics.median(step() for _ in range(repeats))
    with pipe.profile() as timeline:
        step()
    (info,) = timeline.steps
    played = 1e3 * simulate(info.schedule, timeline.costs()).makespan
    races = len(simulated.races())
    simulated.reset()
    return took, played, races


def main() -> None:
    """A line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--other", help="a checkout to compare with")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.case:
        print(*steps(options.case, options.repeats))
        return
    print(machine())
    print(f"{'':<26}  step ms  simulated  ratio" + ("  other ms" if options.other else ""))
    paths = [str(Path(bp.__file__).parents[1]), *([options.other] if options.other else [])]
    for case in CASES:
        found = []
        for path in paths:
            program = [sys.executable, __file__, "--case", case, "--repeats", str(options.repeats)]
            environment = {**os.environ, "PYTHONPATH": path}
            done = subprocess.run(
                program, env=environment, check=True, capture_output=True, text=True
            )
            found.append([float(word) for word in done.stdout.split()])
        took, played, races = found[0]
        assert not races, f"{case}: {races:.0f} races"
        other = f"  {found[1][0]:8.0f}" if options.other else ""
        other += f"  ({found[1][2]:.0f} races)" if options.other and found[1][2] else ""
        print(f"{case:<26}  {took:7.0f}  {played:9.0f}  {took / played:5.3f}{other}", flush=True)


if __name__ == "__main__":
    main()
