"""How small operations may be for two CPU stages to pay: lanes beside the plain loop.

    python examples/benchmarks/small_operations.py

Blockpipe runs small models on the CPU in one thread (``blockpipe.preparation.prepared``:
``SMALL_OPERATION``, ``SMALL_HOP``). Here the lanes are forced, so that one can see where they begin
to gain.
"""

import copy
import statistics

from measure import interleaved, machine  # before torch: it sets OMP_NUM_THREADS

import torch
from torch import nn

import blockpipe as bp
from blockpipe.preparation import prepared

CHUNKS = 8
CASES = [  # width, rows of a micro-batch, layers
    (16, 16, 100),
    (64, 64, 16),
    (64, 64, 50),
    (96, 64, 50),
    (128, 64, 8),
    (128, 64, 24),
    (192, 128, 4),
    (192, 128, 12),
    (256, 128, 4),
    (256, 128, 12),
    (512, 128, 2),
    (512, 128, 8),
]


def main() -> None:
    """A line for each size."""
    by_default = prepared.SMALL_OPERATION, prepared.SMALL_HOP
    prepared.SMALL_OPERATION = prepared.SMALL_HOP = 0.0
    print(machine())
    print(
        "width x rows, layers   est. a hop   est. an operation   plain, ms   lanes / plain  default"
    )
    for width, rows, layers in CASES:
        seconds, operation, plain, ratio = measure(width, rows, layers)
        lanes = operation >= by_default[0] and seconds >= by_default[1]
        case = f"{width} x {rows}, {layers}"
        print(
            f"{case:<21}  {1e3 * seconds:7.2f} ms   {1e6 * operation:14.1f} us"
            f"  {1e3 * plain:10.2f}   {ratio:13.3f}  {'lanes' if lanes else 'one thread'}",
            flush=True,
        )


def net(width: int, layers: int) -> nn.Sequential:
    """Two equal halves."""
    half = [m for _ in range(layers // 2) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Sequential(*half), nn.Sequential(*copy.deepcopy(half)))


def measure(width: int, rows: int, layers: int) -> tuple[float, float, float, float]:
    """The recording's estimates of a hop and of an operation, the plain time of a micro-batch, and
    the lanes' time over it."""
    torch.manual_seed(0)
    plain = net(width, layers)
    piped = copy.deepcopy(plain)
    pipe = bp.Pipeline(bp.begin_blocks(piped, {"1": 1}), devices=["cpu"] * 2, chunks=CHUNKS)
    x, y = torch.randn(2, CHUNKS * rows, width).unbind()

    def run_plain() -> None:
        for xs, ys in zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True):
            (nn.functional.mse_loss(plain(xs), ys) / CHUNKS).backward()

    def run_lanes() -> None:
        pipe.forward_backward(x, target=y, loss_fn=nn.functional.mse_loss)

    times = interleaved({"plain": run_plain, "lanes": run_lanes}, repeats=21, warmup=5)
    assert pipe.recording is not None
    hops = pipe.recording.hops
    seconds = sum(map(prepared.roofline, hops))
    base = statistics.median(times["plain"])
    return (
        seconds / len(hops),
        seconds / sum(hop.kernels for hop in hops),
        base / CHUNKS,
        statistics.median(times["lanes"]) / base,
    )


if __name__ == "__main__":
    main()
