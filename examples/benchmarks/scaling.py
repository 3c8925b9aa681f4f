"""Scaling on paper: times measured on one device, played out as pipelines of 2, 4 and 8 of them.

    python examples/benchmarks/scaling.py
    python examples/benchmarks/scaling.py --tiny  # small images, in half a minute on a CPU

Each block of the model is run by itself, forward and backward. The chain of blocks is cut into
stages, the largest as small as can be, and ``blockpipe.simulate`` plays each schedule out, with the
time that the activations take over links of a given bandwidth. What it leaves out: the host's
time, copies that wait for each other, the optimizer, and that 8 devices may share a link.

Beside it are the speed-ups that torchgpipe published. Those are measured, on Tesla P40s, with other
batches, and with checkpointing: a forward is done again before its backward, which alone makes a
third more work: its pipelines of one device run at 0.853 and 0.858 of the plain speed. "gpipe
again" is that on paper.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from measure import machine  # before torch: it sets OMP_NUM_THREADS

import torch
from torch import Tensor, nn

import models
from accelerators import best_device, is_accelerator, name_of, now
from models import Chain

import blockpipe as bp
from blockpipe.schedules.builders import make_schedule


@dataclass(frozen=True)
class Published:
    """torchgpipe's speed-up over one device without a pipeline, and its micro-batches a batch.

    Source: benchmarks/resnet101-speed and benchmarks/unet-speed of torchgpipe 0.0.5.
    """

    speedup: float
    chunks: int


@dataclass(frozen=True)
class Model:
    """A chain to cut, the side of its images, and what was published for how many devices."""

    make: Callable[[], Chain]
    size: int
    published: Mapping[int, Published]


RESNET = {2: Published(1.414, 1667), 4: Published(2.774, 256), 8: Published(4.294, 150)}
UNET = {2: Published(1.246, 32), 4: Published(2.352, 16), 8: Published(3.105, 40)}
MODELS = {
    "resnet101": Model(models.resnet101, 224, RESNET),
    "unet": Model(models.unet, 192, UNET),
}
TINY = 64  # pixels: a 32nd of it, at the U-Net's deepest level, is still more than one


@dataclass(frozen=True)
class Layout:
    """A schedule, and which device each stage is on."""

    schedule: str
    lanes: Callable[[int], list[int]]
    again: bool = False  # whether backwards do their forwards again


def chain_of(devices: int) -> list[int]:
    """0 1 2 3: a stage a device."""
    return list(range(devices))


LAYOUTS = {
    "gpipe again": Layout("gpipe", chain_of, again=True),
    "gpipe": Layout("gpipe", chain_of),
    "1f1b": Layout("1f1b", chain_of),
    "interleaved": Layout("interleaved", lambda n: chain_of(n) * 2),  # 0 1 2 3 0 1 2 3
    "zb-h1": Layout("zb-h1", chain_of),
    "zb-v": Layout("zb-v", lambda n: [*chain_of(n), *reversed(chain_of(n))]),  # 0 1 2 3 3 2 1 0
}


@dataclass(frozen=True)
class Block:
    """What a block of the chain takes for a micro-batch: seconds, and bytes that it makes."""

    forward: float
    backward: float  # all of it
    weight: float  # of that, what only the gradients of the parameters need
    made: int

    @property
    def whole(self) -> float:
        """Forward and backward; also a backward that does the forward again."""
        return self.forward + self.backward


def measure(chain: Chain, x: Tensor, repeats: int) -> list[Block]:
    """Run the blocks one by one, each on what the ones before have made."""
    found = []
    made, sources = x, set(chain.skips.values())
    kept: dict[int, Tensor] = {}
    for index, block in enumerate(chain):
        inputs = [made, kept.pop(chain.skips[index])] if index in chain.skips else [made]
        times, made = measure_block(block, inputs, repeats)
        found.append(times)
        if index in sources:
            kept[index] = made
    return found


def measure_block(block: nn.Module, inputs: Sequence[Tensor], repeats: int) -> tuple[Block, Tensor]:
    """Medians of some runs after a warm-up, and the output for the next block, without a graph.

    What the input gradients need is measured too: the rest of a backward is the weight part, of a
    backward in two. The first block's input needs none.
    """
    device = inputs[0].device
    times: list[tuple[float, float, float]] = []
    needs = [tensor for tensor in inputs if tensor.requires_grad]
    for _ in range(repeats + 1):
        for tensor in needs:
            tensor.grad = None
        begun = now(device)
        output: Tensor = block(*inputs)
        forward = now(device) - begun
        gradient = torch.ones_like(output)
        begun = now(device)
        output.backward(gradient, retain_graph=True)
        backward = now(device) - begun
        begun = now(device)
        if needs:
            torch.autograd.grad(output, needs, gradient)
        times.append((forward, backward, now(device) - begun))
    forward, backward, inputs_part = (
        statistics.median(values) for values in zip(*times[1:], strict=True)
    )
    block.zero_grad()
    bytes_made = output.nelement() * output.element_size()
    weight = max(0.0, backward - inputs_part)
    return Block(forward, backward, weight, bytes_made), output.detach().requires_grad_()


def balanced(times: Sequence[float], stages: int) -> list[range]:
    """Contiguous stages, the largest as small as can be: by dynamic programming.

    Example:
        >>> balanced([1, 1, 1, 3], 2)
        [range(0, 3), range(3, 4)]
    """
    until = [0.0, *accumulate(times)]

    @cache
    def best(end: int, parts: int) -> tuple[float, tuple[int, ...]]:
        """The least largest stage of the blocks before ``end``, and where its stages begin."""
        if parts == 1:
            return until[end], (0,)
        return min(
            (max(best(at, parts - 1)[0], until[end] - until[at]), (*best(at, parts - 1)[1], at))
            for at in range(parts - 1, end)
        )

    _, begins = best(len(times), stages)
    return [range(a, b) for a, b in zip(begins, (*begins[1:], len(times)), strict=True)]


@dataclass(frozen=True)
class Paper:
    """What pipelines are made of on paper: blocks, skips between them, links in bytes a second."""

    blocks: Sequence[Block]
    skips: Mapping[int, int]
    bandwidth: float

    def total(self, part: str, over: range | None = None) -> float:
        """Seconds of some of the blocks, or of all, for a micro-batch."""
        found = self.blocks if over is None else self.blocks[over.start : over.stop]
        return sum(float(getattr(block, part)) for block in found)

    def stages(self, count: int) -> list[range]:
        """The blocks of each stage."""
        return balanced([block.whole for block in self.blocks], count)

    def unevenness(self, count: int) -> float:
        """The largest stage over the mean: what no schedule can make good."""
        largest = max(self.total("whole", stage) for stage in self.stages(count))
        return largest * count / self.total("whole")

    def costs(self, layout: Layout, devices: int) -> bp.Costs:
        """What the stages take.

        A skip to another device is added to the transfer of the stage that made it, or, if that
        one's successor is on its own device, to the first transfer after.
        """
        lanes = layout.lanes(devices)
        stages = self.stages(len(lanes))
        sent = [self.blocks[stage[-1]].made for stage in stages]
        stage_of = {index: s for s, stage in enumerate(stages) for index in stage}
        for used, made in self.skips.items():
            source, target = stage_of[made], stage_of[used]
            if lanes[source] != lanes[target]:
                while lanes[source] == lanes[source + 1]:
                    source += 1
                sent[source] += self.blocks[made].made
        backward = "whole" if layout.again else "backward"
        return bp.Costs(
            forward=[self.total("forward", stage) for stage in stages],
            backward=[self.total(backward, stage) for stage in stages],
            weight=[self.total("weight", stage) for stage in stages],
            transfer=[made / self.bandwidth for made in sent],
        )

    def speedup(self, layout: Layout, devices: int, chunks: int) -> float:
        """The time of all blocks for all micro-batches over the schedule's."""
        costs = self.costs(layout, devices)
        schedule = make_schedule(layout.schedule, layout.lanes(devices), chunks, costs=costs)
        return chunks * self.total("whole") / bp.simulate(schedule, costs).makespan


def main() -> None:
    """Measure each model's blocks, and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--devices", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--chunks", type=int, default=32, help="0: as many as torchgpipe took")
    parser.add_argument("--rows", type=int, help="in a micro-batch; 16, on the CPU 2")
    parser.add_argument("--bandwidth", type=float, default=12.0, help="GB/s; 12: PCIe 3.0")
    parser.add_argument("--device", type=torch.device, default=best_device())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help=f"images of {TINY} px, 3 repeats")
    options = parser.parse_args()
    device: torch.device = options.device
    print(
        f"{machine()}, {name_of(device)}\n"
        f"Speed-up over one device. Ours is simulated: times of blocks measured on {device}, links "
        f"of\n{options.bandwidth:g} GB/s. torchgpipe's is measured: on Tesla P40s, at other batch "
        "sizes, and with\ncheckpointing, as in 'gpipe again' (a forward is done twice). "
        "Unevenness: the largest of n, and\nof 2 n stages, over the mean; interleaved and zb-v "
        "have 2 n."
    )
    rows = options.rows or (16 if is_accelerator(device) else 2)
    for name in options.model:
        model = MODELS[name]
        size = TINY if options.tiny else model.size
        torch.manual_seed(0)
        with device:
            chain, x = model.make(), torch.randn(rows, 3, size, size)
        blocks = measure(chain, x, 3 if options.tiny else options.repeats)
        paper = Paper(blocks, chain.skips, 1e9 * options.bandwidth)
        forward, backward, weight = (
            1e3 * paper.total(part) for part in ("forward", "backward", "weight")
        )
        print(
            f"\n{name}, {len(blocks)} blocks, a micro-batch of {rows} images of {size} pixels: "
            f"forward {forward:.1f} ms,\nbackward {backward:.1f} ms, of that {weight:.1f} ms only "
            "for the parameters"
        )
        if chain.skips:
            print("skips: their bytes are added to the transfer of the stage that they come from")
        print(table(paper, model.published, options.devices, options.chunks), flush=True)


def table(
    paper: Paper, published: Mapping[int, Published], devices: Sequence[int], chunks: int
) -> str:
    """A line for each number of devices: the cuts, the longest transfer, the speed-ups."""
    titles = ["devices", "chunks", "unevenness", "transfer ms", *LAYOUTS, "torchgpipe"]
    lines = ["  ".join(titles)]
    for n in devices:
        theirs = published.get(n)
        count = chunks or (theirs.chunks if theirs else 32)
        transfer = paper.costs(LAYOUTS["1f1b"], n).transfer
        assert isinstance(transfer, list)
        slowest = 1e3 * max(transfer[:-1], default=0.0)
        uneven = "  ".join(f"{paper.unevenness(stages):.2f}" for stages in (n, 2 * n))
        cells = [f"{n}", f"{count}", uneven, f"{slowest:.2f}"]
        cells += [f"{paper.speedup(layout, n, count):.3f}" for layout in LAYOUTS.values()]
        cells.append(f"{theirs.speedup:.3f}" if theirs else "-")
        lines.append(
            "  ".join(f"{cell:>{len(title)}}" for cell, title in zip(cells, titles, strict=True))
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
