"""What a pipeline of one stage costs over the plain micro-batch loop.

    python examples/benchmarks/one_stage.py

Everything runs inline in the caller's thread; what is left is Blockpipe's own Python. The work is
about 1 ms a micro-batch, so that it shows.
"""

import copy
import statistics

from measure import interleaved, machine, table  # before torch: it sets OMP_NUM_THREADS

import torch
from torch import Tensor, nn

import blockpipe as bp


def net(width: int) -> nn.Sequential:
    """Eight wide layers."""
    return nn.Sequential(
        *(layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU()))
    )


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error."""
    return nn.functional.mse_loss(output, target)


def main() -> None:
    """Check the gradients, then time both sides in turn."""
    torch.manual_seed(0)
    chunks, rows = 8, 40
    plain = net(192)
    piped = copy.deepcopy(plain)
    pipe = bp.Pipeline(piped, devices=["cpu"], chunks=chunks)
    x, y = torch.randn(2, chunks * rows, 192).unbind()

    def run_plain() -> Tensor:
        total = torch.zeros(())
        for xs, ys in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
            loss = loss_of(plain(xs), ys)
            (loss * (1 / chunks)).backward()
            total = total + loss.detach() * (1 / chunks)
        return total

    def run_pipe() -> Tensor:
        return pipe.forward_backward(x, target=y, loss_fn=loss_of).loss

    run_plain(), run_pipe()
    for p, q in zip(plain.parameters(), piped.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), "gradients differ"
    times = interleaved({"plain loop": run_plain, "one stage": run_pipe}, repeats=300, warmup=20)
    print(machine())
    each = 1e3 * statistics.median(times["plain loop"]) / chunks
    print(f"{chunks} micro-batches, {each:.2f} ms each")
    print(table(times, "plain loop"))
    ratios = [b / a for a, b in zip(*times.values(), strict=True)]
    print(f"overhead, median of the pairs: {100 * (statistics.median(ratios) - 1):.1f} %")


if __name__ == "__main__":
    main()
