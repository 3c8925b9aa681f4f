"""What the benchmarks share: runs interleaved in one process, medians with their spread."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads: one thread a stage

import platform
import random
import statistics
import time
from collections.abc import Callable

import torch


class Seconds(float):
    """What a candidate's run returns if it has taken its time itself."""


def interleaved(
    candidates: dict[str, Callable[[], object]], repeats: int, warmup: int = 3, untimed: int = 0
) -> dict[str, list[float]]:
    """Seconds of each candidate's runs, taken in turn so that a noisy moment hits all alike.

    Each turn has another order, drawn from a fixed seed: who ran before leaves caches and cores in
    some state. With one order for all turns, a version beside itself differed by 3 % in a run of
    20 ms. ``untimed`` runs go before each timed one for the same reason: a tenth of such a run was
    measured, and of a longer one it is a smaller part.
    """
    order = list(candidates)
    draws = random.Random(0)
    for run in candidates.values():
        for _ in range(warmup):
            run()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        draws.shuffle(order)
        for name in order:
            run = candidates[name]
            for _ in range(untimed):
                run()
            begun = time.perf_counter()
            result = run()
            seconds = time.perf_counter() - begun
            times[name].append(result if isinstance(result, Seconds) else seconds)
    return times


def table(times: dict[str, list[float]], baseline: str, notes: dict[str, str] | None = None) -> str:
    """A line for each candidate: median, least and most in ms, ratio to the baseline, its note."""
    base = statistics.median(times[baseline])
    width = max(map(len, times))
    lines = [f"{'':<{width}}  median ms     min     max   ratio"]
    for name, values in times.items():
        median = statistics.median(values)
        lines.append(
            f"{name:<{width}}  {1e3 * median:9.2f} {1e3 * min(values):7.2f} "
            f"{1e3 * max(values):7.2f}  {median / base:6.3f}{f'  {notes[name]}' if notes else ''}"
        )
    return "\n".join(lines)


def machine() -> str:
    """What the figures were taken on."""
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"{os.cpu_count()} CPUs ({platform.machine()}), {torch.get_num_threads()} thread(s)"
    )
