"""Models that are larger than any device: recorded and planned on the meta device, timed.

    python examples/benchmarks/large_models.py
    python examples/benchmarks/large_models.py --convolutions 48 --base 160 --stages 8

The model is torchgpipe's U-Net (24, 160), which it trains on four devices with recomputation;
(48, 160) is its model for eight. Nothing here has memory: a stage's would come from a checkpoint,
see docs/how-to/large-models.md.
"""

import argparse
import resource
import sys
import time
from itertools import pairwise

from measure import machine  # before torch: it sets OMP_NUM_THREADS

import torch

from models import Chain, unet

import blockpipe as bp


def mark_by_parameters(chain: Chain, stages: int) -> None:
    """Begin stages at blocks, with about the same number of parameters in each."""
    sizes = [sum(p.numel() for p in block.parameters()) for block in chain]
    share, before, begins = sum(sizes) / stages, 0, {}
    for number, size in enumerate(sizes):
        stage = int((before + size / 2) / share)
        if stage > len(begins):
            begins[str(number)] = stage
        before += size
    bp.begin_blocks(chain, begins)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--convolutions", type=int, default=24, help="a level")
    parser.add_argument("--base", type=int, default=160, help="channels of the first level")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--size", type=int, default=192, help="of an image, in pixels")
    options = parser.parse_args()

    times = [time.perf_counter()]
    with torch.device("meta"):
        net = unet(options.convolutions, options.base)
    times.append(time.perf_counter())
    mark_by_parameters(net, options.stages)
    recording = bp.record(net, torch.zeros(1, 3, options.size, options.size))
    times.append(time.perf_counter())
    recording.check(options.stages)
    plan = recording.plan
    plan.to_json()
    times.append(time.perf_counter())

    parameters = sum(p.numel() for p in net.parameters())
    print(machine())
    print(f"U-Net ({options.convolutions}, {options.base}): {parameters / 1e9:.2f} B parameters")
    for stage in range(recording.num_stages):
        held = [p for p in recording.parameters if p.stage == stage]
        print(f"  stage {stage}: {sum(p.elements for p in held) / 1e9:.2f} B")
    built, recorded, planned = (after - before for before, after in pairwise(times))
    print(f"built {built:.2f} s, recorded {recorded:.2f} s, planned {planned:.2f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"largest resident set: {peak / 2 ** (20 if sys.platform == 'linux' else 30):.2f} GiB")
    print(f"seconds in all: {times[-1] - times[0]:.1f}")


if __name__ == "__main__":
    main()
