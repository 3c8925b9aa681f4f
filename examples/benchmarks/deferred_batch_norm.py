"""What deferred batch norm costs a step of ResNet-18.

    python examples/benchmarks/deferred_batch_norm.py

Two stages on the CPU, 1F1B. The statistics take some passes over each batch norm's input, which is
little beside a convolution's work.
"""

import argparse
import copy
import statistics

from measure import interleaved, machine, table  # before torch: it sets OMP_NUM_THREADS

import torch
import torch.nn.functional as F
import torchvision

import blockpipe as bp


def main() -> None:
    """Check the gradients, then time both sides in turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4, help="images a micro-batch")
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10)
    bp.begin_blocks(model, {"layer2.1": 1})
    x = torch.randn(options.chunks * options.rows, 3, options.size, options.size)
    y = torch.randint(10, (len(x),))
    models = {"each micro-batch": copy.deepcopy(model), "deferred": model}
    pipes = {
        name: bp.Pipeline(
            model,
            devices=["cpu"] * 2,
            chunks=options.chunks,
            deferred_batch_norm=name == "deferred",
        )
        for name, model in models.items()
    }
    steps = {
        name: lambda pipe=pipe: pipe.forward_backward(x, target=y, loss_fn=F.cross_entropy).loss
        for name, pipe in pipes.items()
    }
    assert torch.equal(*(step() for step in steps.values())), "losses differ"
    for p, q in zip(*(model.parameters() for model in models.values()), strict=True):
        assert torch.equal(p.grad, q.grad), "gradients differ"
    times = interleaved(steps, repeats=options.repeats, warmup=1)
    print(machine())
    print(table(times, "each micro-batch"))
    ratios = [b / a for a, b in zip(*times.values(), strict=True)]
    print(f"cost, median of the pairs: {100 * (statistics.median(ratios) - 1):.1f} %")


if __name__ == "__main__":
    main()
