"""The model sweep: every model of the zoo, pipelined beside the plain loop.

    python -m tests.sweep                      # everything, a table on standard output
    python -m tests.sweep --family timm --only convnext

Each model is cut into 2 and into 4 stages, at its blocks' boundaries and at random inner modules,
and takes one step under the stage sanitizer, 1F1B's or another schedule's. The gradients, the loss
and the buffers are compared with those of the plain loop over the same micro-batches, on one
thread; with --random, with those of the same pipeline under "sequential", without recomputation.
"""

import argparse
import os
import random
import time
import traceback
import warnings
import zlib
from typing import Any

import torch

import blockpipe as bp
from blockpipe import prepared
from blockpipe.errors import PlanError
from blockpipe.options import CHECKPOINTS
from blockpipe.scheduler import SCHEDULES

from .parity import block_marks, compare, random_marks, without_randomness
from .zoo import FAMILIES, Entry

CUTS = ("blocks 2", "blocks 4", "random 2", "random 4")


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
    recording = bp.record(model, args, kwargs)
    rng = random.Random(zlib.crc32(entry.name.encode()) + seed)
    found = {}
    for cut in cuts:
        how, stages = cut.split()
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
            bp.record(model, args, kwargs).check()
            return marks
        except PlanError:
            continue
        finally:
            bp.remove_blocks(model)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=list(FAMILIES), action="append")
    parser.add_argument("--only", help="a part of the names to run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, default="never")
    parser.add_argument("--random", action="store_true", help="leave dropout and the like on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    prepared.SMALL_OPERATION = prepared.SMALL_HOP = 0.0  # on lanes, however small the models
    warnings.simplefilter("ignore")
    good = total = 0
    for family in options.family or FAMILIES:
        print(f"| {family} | {' | '.join(CUTS)} | s |\n|---|{'---|' * (len(CUTS) + 1)}")
        for entry in FAMILIES[family]():
            if options.only and options.only not in entry.name:
                continue
            begun = time.perf_counter()
            try:
                found = check(
                    entry,
                    seed=options.seed,
                    schedule=options.schedule,
                    checkpoint=options.checkpoint,
                    random_too=options.random,
                )
            except Exception as error:
                if os.environ.get("SWEEP_TRACE"):
                    traceback.print_exc()
                found = dict.fromkeys(CUTS, f"{type(error).__name__}: {error}")
            row = " | ".join(found[cut].replace("\n", " ")[:300] for cut in CUTS)
            print(f"| {entry.name} | {row} | {time.perf_counter() - begun:.0f} |", flush=True)
            total += len(CUTS)
            good += sum(value == "exact" or _small(value) for value in found.values())
        print()
    print(f"{good} of {total} cuts equal the plain run")


def _small(value: str) -> bool:
    try:
        return float(value) <= 1e-5
    except ValueError:
        return False


if __name__ == "__main__":
    main()
