"""What other libraries' doors add to a step, beside ``Pipeline`` with the same options.

    python examples/benchmarks/doors.py

Both sides of a pair do the same work: the same layers, stages, chunks and recomputation, and the
same results. They take turns, so a noisy moment hits both, and medians of the pairs' ratios are
printed. A door adds nothing but Python's own work, which the processor's clock counts whatever else
runs on the machine: so its ratio is there beside the wall clock's.
"""

import argparse
import copy
import random
import statistics
import time
from collections.abc import Callable, Iterator

from measure import machine  # before torch: it sets OMP_NUM_THREADS

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockpipe as bp
from blockpipe.compat import poptorch
from blockpipe.compat.torchgpipe import GPipe
from blockpipe.compat.torchgpipe.skip import pop, skippable, stash

CHUNKS = 8
Pair = tuple[Callable[[], object], Callable[[], object], nn.Module, nn.Module]
"""The step through the door, the step without it, and the model of each."""


def main() -> None:
    """Check the gradients, then time each door beside the pipeline, for every width."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="*", default=[128, 512], help="of the layers")
    parser.add_argument("--devices", type=int, nargs="*", default=[1, 2], help="of two stages")
    parser.add_argument("--repeats", type=int, default=101)
    options = parser.parse_args()
    print(machine())
    print(f"{'door':<24} {'width':>5} {'devices':>7}  step, ms  ratio  by the processor's clock")
    for width in options.widths:
        for count in options.devices:
            devices = [f"cpu:{stage % count}" for stage in range(2)]
            for name, pair in pairs(width, devices):
                report(f"{name:<24} {width:>5} {count:>7}", pair, options.repeats)


def pairs(width: int, devices: list[str]) -> Iterator[tuple[str, Pair]]:
    """Each door, beside a pipeline that does the same."""
    x, y = torch.randn(2, CHUNKS * 32, width).unbind()
    yield "GPipe, never", gpipe(width, devices, x, y, "never")
    yield "GPipe, except_last", gpipe(width, devices, x, y, "except_last")
    yield "GPipe, forward_backward", gpipe_forward_backward(width, devices, x, y)
    yield "GPipe, a skip", skip(width, devices, x, y)
    yield "trainingModel", training_model(width, devices, x, y)
    yield "inferenceModel", inference_model(width, devices, x)


def layers(width: int) -> nn.Sequential:
    """Two halves of four layers each."""
    halves = (
        nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(width, width), nn.Tanh())))
        for _ in range(2)
    )
    return nn.Sequential(*halves)


def gpipe(width: int, devices: list[str], x: Tensor, y: Tensor, checkpoint: str) -> Pair:
    """torchgpipe's training loop, with the loss outside of the pipeline."""
    net = layers(width)
    twin = bp.mark_sequential(copy.deepcopy(net), [1, 1])
    model = GPipe(net, [1, 1], devices=devices, chunks=CHUNKS, checkpoint=checkpoint)
    pipe = bp.Pipeline(twin, devices=devices, chunks=CHUNKS, checkpoint=checkpoint)
    return (
        lambda: F.mse_loss(model(x), y).backward(),
        lambda: F.mse_loss(pipe(x), y).backward(),
        net,
        twin,
    )


def gpipe_forward_backward(width: int, devices: list[str], x: Tensor, y: Tensor) -> Pair:
    """The method that torchgpipe has not."""
    net = layers(width)
    twin = bp.mark_sequential(copy.deepcopy(net), [1, 1])
    model = GPipe(net, [1, 1], devices=devices, chunks=CHUNKS, checkpoint="never")
    pipe = bp.Pipeline(twin, devices=devices, chunks=CHUNKS)
    return (
        lambda: model.forward_backward(x, target=y, loss_fn=F.mse_loss),
        lambda: pipe.forward_backward(x, target=y, loss_fn=F.mse_loss),
        net,
        twin,
    )


@skippable(stash=["skip"])
class Stashes(nn.Module):
    """Half of the layers, whose input is for the other half's output."""

    def __init__(self, half: nn.Sequential) -> None:
        super().__init__()
        self.layers = half

    def forward(self, x: Tensor) -> Iterator[object]:
        yield stash("skip", x)
        return self.layers(x)


@skippable(pop=["skip"])
class Pops(nn.Module):
    """The other half."""

    def __init__(self, half: nn.Sequential) -> None:
        super().__init__()
        self.layers = half

    def forward(self, x: Tensor) -> Iterator[object]:
        skip = yield pop("skip")
        return self.layers(x) + skip


class Half(nn.Module):
    """Half of the layers, as a layer of the user's."""

    def __init__(self, half: nn.Sequential) -> None:
        super().__init__()
        self.layers = half

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Skips(nn.Module):
    """The same without names."""

    def __init__(self, halves: nn.Sequential) -> None:
        super().__init__()
        self.first, self.last = Half(halves[0]), Half(halves[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)) + x


def skip(width: int, devices: list[str], x: Tensor, y: Tensor) -> Pair:
    """A skip from the first stage to the last, by name and as a variable."""
    net = layers(width)
    twin = Skips(copy.deepcopy(net))
    bp.begin_blocks(twin, {"last": 1})
    named = nn.Sequential(Stashes(net[0]), Pops(net[1]))
    model = GPipe(named, [1, 1], devices=devices, chunks=CHUNKS, checkpoint="never")
    pipe = bp.Pipeline(twin, devices=devices, chunks=CHUNKS)
    return (
        lambda: F.mse_loss(model(x), y).backward(),
        lambda: F.mse_loss(pipe(x), y).backward(),
        net,
        twin,
    )


class WithLoss(nn.Module):
    """A model that computes its loss, as PopTorch has it."""

    def __init__(self, halves: nn.Sequential) -> None:
        super().__init__()
        self.halves = halves

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        output = self.halves(x)
        return output, F.mse_loss(output, y)


def training_model(width: int, devices: list[str], x: Tensor, y: Tensor) -> Pair:
    """PopTorch's training call, and the four lines that it stands for."""
    net = WithLoss(layers(width))
    twin = copy.deepcopy(net)
    poptorch.BeginBlock(net.halves[1], ipu_id=1)
    bp.begin_blocks(twin, {"halves.1": 1})
    options = poptorch.Options()
    options.Training.gradientAccumulation(CHUNKS)
    model = poptorch.trainingModel(
        net, options, torch.optim.SGD(net.parameters(), lr=0.0), devices=devices
    )
    pipe = bp.Pipeline(twin, devices=devices, chunks=CHUNKS, batch_dims={"output": None})
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)

    def step() -> object:
        optimizer.zero_grad()
        result = pipe.forward_backward(
            x, y, loss_fn=lambda outputs: outputs[1], return_outputs=True
        )
        optimizer.step()
        return result.outputs[-1]

    return lambda: model(x, y), step, net, twin


def inference_model(width: int, devices: list[str], x: Tensor) -> Pair:
    """A forward of several micro-batches."""
    net = layers(width).eval()
    twin = bp.begin_blocks(copy.deepcopy(net), {"1": 1})
    poptorch.BeginBlock(net[1], ipu_id=1)
    model = poptorch.inferenceModel(
        net, poptorch.Options().deviceIterations(CHUNKS), devices=devices
    )
    pipe = bp.Pipeline(twin, devices=devices, chunks=CHUNKS)

    @torch.no_grad()
    def forward() -> Tensor:
        return pipe(x)

    return lambda: model(x), forward, net, twin


def report(label: str, pair: Pair, repeats: int) -> None:
    """Check that both compute the same, and print one line."""
    through, without, *models = pair
    through(), without()
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    for _ in range(10):
        through(), without()
    runs = taken_in_turn(through, without, repeats)
    wall, processor = (
        statistics.quantiles([door[clock] / pipe[clock] for door, pipe in runs], n=4)
        for clock in range(2)
    )
    step = statistics.median(pipe[0] for _, pipe in runs)
    print(
        f"{label}  {1e3 * step:8.2f}  {wall[1]:.3f}  {processor[1]:.3f} "
        f"(quartiles {processor[0]:.3f} and {processor[2]:.3f})",
        flush=True,
    )


def taken_in_turn(
    through: Callable[[], object], without: Callable[[], object], repeats: int
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Return the seconds of each pair of runs, by both clocks; which is first is drawn each time,
    for the second finds the first one's caches."""
    draws, runs = random.Random(0), []
    for _ in range(repeats):
        if draws.random() < 0.5:
            door, pipe = clocks(through), clocks(without)
        else:
            pipe, door = clocks(without), clocks(through)
        runs.append((door, pipe))
    return runs


def clocks(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a run by the wall clock, and by the processor's."""
    begun = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - begun[0], time.process_time() - begun[1]


if __name__ == "__main__":
    main()
