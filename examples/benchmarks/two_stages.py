"""What two CPU stages gain over the plain one-thread loop, beside what two threads can gain.

    python examples/benchmarks/two_stages.py

Two independent threads that do half of the micro-batches each, on copies of the model, are what the
machine can give. A pipeline also has a bubble, 1 / (chunks + 1) for two stages.
"""

import argparse
import copy
import statistics
import threading

from measure import interleaved, machine, table  # before torch: it sets OMP_NUM_THREADS

import torch
from torch import Tensor, nn

import blockpipe as bp


def net(width: int, layers: int) -> nn.Sequential:
    """Wide layers in two halves of equal work."""
    half = layers // 2
    return nn.Sequential(
        *(
            nn.Sequential(*(m for _ in range(half) for m in (nn.Linear(width, width), nn.Tanh())))
            for _ in range(2)
        )
    )


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error."""
    return nn.functional.mse_loss(output, target)


def plain_loop(model: nn.Module, x: Tensor, y: Tensor, chunks: int, share: float) -> None:
    """The plain micro-batch loop."""
    for xs, ys in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
        (loss_of(model(xs), ys) * share).backward()


def main() -> None:
    """Check the gradients, then time all three in turn, for several chunk counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    print(machine())
    for chunks in options.chunks:
        measure(chunks, options.repeats)


def measure(chunks: int, repeats: int) -> None:
    """One table."""
    torch.manual_seed(0)
    rows, width = 128, 512
    plain = net(width, 8)
    twins = [copy.deepcopy(plain) for _ in range(2)]
    piped = copy.deepcopy(plain)
    piped[1] = bp.BeginBlock(piped[1], stage=1)
    pipe = bp.Pipeline(piped, devices=["cpu"] * 2, chunks=chunks)
    x, y = torch.randn(2, chunks * rows, width).unbind()

    def run_plain() -> None:
        plain_loop(plain, x, y, chunks, 1 / chunks)

    def run_twins() -> None:
        halves = zip(twins, x.chunk(2), y.chunk(2), strict=True)
        threads = [
            threading.Thread(target=plain_loop, args=(twin, xs, ys, chunks // 2, 1 / chunks))
            for twin, xs, ys in halves
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def run_pipe() -> None:
        pipe.forward_backward(x, target=y, loss_fn=loss_of)

    run_plain(), run_pipe()
    for p, q in zip(plain.parameters(), piped.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), "gradients differ"
    times = interleaved(
        {"plain loop": run_plain, "two threads": run_twins, "two stages": run_pipe}, repeats
    )
    a, b, c = (statistics.median(values) for values in times.values())
    print(f"\n{chunks} chunks, {1e3 * a / chunks / 4:.1f} ms an action")
    print(table(times, "plain loop"))
    print(
        f"time saved: {100 * (a - c) / (a - b):.0f} % of what two threads save; "
        f"speed-up: {a / c:.2f} beside {a / b:.2f}, {100 * (a / c - 1) / (a / b - 1):.0f} % of its "
        f"gain; the bubble alone would leave {100 * (2 * chunks / (chunks + 1) - 1):.0f} %"
    )


if __name__ == "__main__":
    main()
