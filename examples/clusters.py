"""Llama 3.1 on 8, 64, 512 and 4096 H100s: steps on paper, by published numbers and ``simulate``.

    python examples/clusters.py                                    # the tables
    python examples/clusters.py docs/explanation/clusters.md       # put them into the page

Nothing is measured here. A stage's time is its arithmetic divided by a rate that follows from the
published throughput of a run without a pipeline; a transfer's time is its bytes divided by a link's
bandwidth; ``simulate`` plays the schedule out. The page says where each number is from, and what
is an assumption.
"""

import re
import sys
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

from blockpipe import partition_balanced
from blockpipe.schedules import Costs, Simulation, make_schedule, simulate

TOKENS = 8192  # of a sequence; a micro-batch is one sequence, unless said otherwise
HOST_GPUS = 8
NVLINK = 360e9  # bytes a second, one way; 80 % of the 450e9 that are specified
NETWORK = 40e9  # bytes a second for each GPU, one way: 80 % of the 400 Gb/s that are specified
MEMORY = 80e9  # bytes of an H100
STATE = 16  # bytes a parameter: bf16 weights and gradients, fp32 weights and two fp32 moments


@dataclass(frozen=True)
class Model:
    """A Llama.

    Attributes:
        layers: how many there are.
        width: of the residual stream.
        layer: the parameters of a layer.
        head: the parameters of the output layer, and of the embedding.
    """

    layers: int
    width: int
    layer: float
    head: float

    @property
    def parameters(self) -> float:
        """All of them."""
        return self.layers * self.layer + 2 * self.head

    def layer_work(self) -> float:
        """The operations of a layer's forward for a sequence; attention is causal."""
        return TOKENS * (2 * self.layer + 2 * TOKENS * self.width)

    def head_work(self) -> float:
        """Those of the output layer."""
        return TOKENS * 2 * self.head

    def work(self) -> float:
        """Those of a forward."""
        return self.layers * self.layer_work() + self.head_work()


def llama(layers: int, width: int, feed_forward: int, heads: int) -> Model:
    """A Llama 3.1 with eight heads of keys and values, of 128 numbers each."""
    attention = 2 * width * heads * 128 + 2 * width * 8 * 128
    return Model(layers, width, attention + 3 * width * feed_forward, 128256 * width)


SMALL = llama(32, 4096, 14336, 32)
MIDDLE = llama(80, 8192, 28672, 64)
LARGE = llama(126, 16384, 53248, 128)
NAMES = {SMALL: "8B", MIDDLE: "70B", LARGE: "405B"}


@cache
def partitioned(model: Model, stages: int) -> list[tuple[float, float]]:
    """The work of each stage for a sequence's forward, and its parameters; as even as they can be
    made of whole layers."""
    items = [(0.0, model.head)]  # the embedding
    items += [(model.layer_work(), model.layer)] * model.layers
    items += [(model.head_work(), model.head)]
    each = iter(items)
    counts = partition_balanced([work for work, _ in items], stages)
    found = [[*islice(each, count)] for count in counts]
    return [(sum(w for w, _ in part), sum(p for _, p in part)) for part in found]


# Operations a second that a GPU does in a stage. Each follows from the published tokens a second
# and GPU of a run without a pipeline, which are the work of three forwards, or of four where the
# forward is recomputed.
BF16 = 6667 * 3 * SMALL.work() / TOKENS  # torchtitan, 8 GPUs: FSDP, torch.compile
FP8 = 876 * 4 * MIDDLE.work() / TOKENS  # torchtitan, 256 GPUs: FSDP, TP 8, float8, asynchronous TP


@dataclass(frozen=True)
class Run:
    """A way to train.

    Attributes:
        model: which.
        gpus: how many there are.
        tensor: the GPUs that share each layer.
        pipeline: the stages' groups of GPUs.
        visits: the stages of each group.
        sequences: those of a step and a replica.
        microbatches: in how many they are cut.
        rate: of a GPU, operations a second.
        schedule: its name.
        forwards: the work of a micro-batch, in forwards: 4 with recomputation.
        published: what was reported for this run, tokens a second and GPU.
    """

    model: Model
    gpus: int
    tensor: int
    pipeline: int
    visits: int
    sequences: int
    microbatches: int
    rate: float
    schedule: str = "1f1b"
    forwards: int = 4
    published: float | None = None

    @property
    def replicas(self) -> int:
        """How many pipelines there are; GPUs that make up no whole one are idle."""
        return self.gpus // (self.tensor * self.pipeline)

    def parts(self) -> list[tuple[float, float]]:
        """The work of each stage for a sequence's forward, and its parameters."""
        return partitioned(self.model, self.pipeline * self.visits)

    def simulation(self, *, instant: bool = False) -> Simulation:
        """The schedule played out, in seconds; with transfers that take no time, if asked for."""
        size = self.sequences / self.microbatches
        scale = size / (self.tensor * self.rate)
        forward = [work * scale for work, _ in self.parts()]
        again = self.forwards == 4
        costs = Costs(
            forward=forward,
            backward=[(3 if again else 2) * f for f in forward],
            weight=forward,
            transfer=0.0 if instant else self.transfer() * size,
        )
        lanes = list(range(self.pipeline)) * self.visits
        return simulate(make_schedule(self.schedule, lanes, self.microbatches), costs)

    def transfer(self) -> float:
        """The seconds in which a GPU sends its share of a sequence's activations, in bf16."""
        within_host = self.tensor * self.pipeline <= HOST_GPUS
        bytes_sent = 2 * TOKENS * self.model.width / self.tensor
        return bytes_sent / (NVLINK if within_host else NETWORK)

    def parameters(self) -> float:
        """Those of the GPU that has most."""
        own = [parameters for _, parameters in self.parts()]
        return max(sum(own[lane :: self.pipeline]) for lane in range(self.pipeline)) / self.tensor

    def gradient_sum(self) -> float:
        """The seconds of a ring's all-reduce of bf16 gradients over the replicas."""
        share = 2 * (self.replicas - 1) / self.replicas
        return share * 2 * self.parameters() / NETWORK

    def tokens(self) -> float:
        """Tokens a second and GPU."""
        step = self.simulation().makespan + self.gradient_sum()
        return self.replicas * self.sequences * TOKENS / step / self.gpus

    def cells(self) -> list[str]:
        """A row of the table."""
        found = self.simulation()
        step = found.makespan + self.gradient_sum()
        waited = 1 - self.simulation(instant=True).makespan / found.makespan
        state = STATE * self.parameters()
        return [
            f"{self.gpus}",
            NAMES[self.model],
            f"{self.tensor} × {self.pipeline} × {self.replicas}",
            f"{self.schedule}{f' ×{self.visits}' if self.visits > 1 else ''}",
            f"{self.microbatches}",
            f"{found.bubble:.1%}",
            f"{waited:.1%}",
            f"{self.gradient_sum() / step:.1%}",
            f"{state / 1e9:.0f} GB{'' if state < MEMORY else ': too much'}",
            f"{self.tokens():,.0f}",
            "–" if self.published is None else f"{self.published:,.0f}",
        ]


HEADER = (
    "GPUs, model, TP × PP × DP, schedule, micro-batches, bubble, transfers, gradients, state, "
    "tokens/s a GPU, published"
)


def table(header: str, rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header.split(", "), ["---"] * (header.count(", ") + 1), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def torchtitan() -> str:
    """The published pair of runs, for the numbers of micro-batches that they may have had."""
    rows = []
    for first, second in ((8, 8), (8, 16), (16, 16), (32, 32)):
        each = [
            Run(LARGE, 512, 8, 8, visits, 32, count, FP8, schedule)
            for schedule, visits, count in (("1f1b", 1, first), ("interleaved", 2, second))
        ]
        plain, looped = (run.tokens() for run in each)
        cells = [f"{first}, {second}", *(f"{run.simulation().bubble:.1%}" for run in each)]
        rows.append([*cells, f"{plain:.0f}", f"{looped:.0f}", f"{looped / plain:.2f}"])
    rows.append(["not published", "–", "–", "100", "128", "1.28"])
    return table(
        "micro-batches, bubble of 1F1B, of interleaved ×2, tokens/s of 1F1B, of interleaved, ratio",
        [[row[0].replace(", ", " and "), *row[1:]] for row in rows],
    )


def llama_3() -> str:
    """What twice the GPUs cost with the same batch, in the paper and in the simulation."""
    rows = []
    for visits in (1, 2, 4, 8):
        schedule = "interleaved" if visits > 1 else "1f1b"
        few, many = (
            Run(LARGE, gpus, 8, 16, visits, count, count, BF16, schedule)
            for gpus, count in ((8192, 32), (16384, 16))
        )
        bubbles = [f"{run.simulation().bubble:.1%}" for run in (few, many)]
        rows.append([f"{visits}", *bubbles, f"{many.tokens() / few.tokens():.3f}"])
    rows.append(["not published", "–", "–", f"{400 / 430:.3f}"])
    return table("stages a GPU, bubble on 8192 GPUs, on 16384 GPUs, tokens/s a GPU: ratio", rows)


def with_tensor_parallelism() -> str:
    """Layers that the GPUs of a host share."""
    runs = [
        Run(SMALL, 8, 1, 8, 1, 16, 16, BF16, forwards=3, published=6667),
        Run(MIDDLE, 64, 8, 4, 1, 64, 64, FP8, published=876),
        Run(LARGE, 512, 8, 8, 1, 32, 8, FP8, published=100),
        Run(LARGE, 512, 8, 8, 2, 32, 16, FP8, "interleaved", published=128),
        Run(LARGE, 4096, 8, 16, 1, 64, 64, BF16),
        Run(LARGE, 4096, 8, 16, 8, 64, 64, BF16, "interleaved"),
    ]
    return table(HEADER, [run.cells() for run in runs])


def without() -> str:
    """Whole layers on every GPU, as Blockpipe has them."""
    runs = [
        Run(SMALL, 8, 1, 8, 1, 16, 16, BF16, forwards=3),
        Run(SMALL, 8, 1, 8, 2, 16, 16, BF16, "interleaved", forwards=3),
        Run(MIDDLE, 64, 1, 21, 1, 42, 42, BF16),
        Run(MIDDLE, 64, 1, 21, 1, 42, 42, BF16, "zb-h1"),
        Run(LARGE, 512, 1, 128, 1, 64, 64, BF16),
        Run(LARGE, 512, 1, 128, 1, 64, 64, BF16, "zb-h1"),
        Run(LARGE, 4096, 1, 128, 1, 64, 64, BF16),
        Run(LARGE, 4096, 1, 128, 1, 64, 64, BF16, "zb-h1"),
    ]
    return table(HEADER.removesuffix(", published"), [run.cells()[:-1] for run in runs])


TABLES = {
    "torchtitan": torchtitan,
    "llama-3": llama_3,
    "with-tensor-parallelism": with_tensor_parallelism,
    "without": without,
}


def filled(page: str) -> str:
    """A page with the tables between the comments that name them."""
    for name, make in TABLES.items():
        text = f"<!-- {name} -->\n\n{make()}\n\n<!-- end -->"
        place = re.compile(rf"<!-- {name} -->\n.*?<!-- end -->", re.DOTALL)
        page, count = place.subn(lambda _, text=text: text, page)
        assert count == 1, f"expected a place for the table {name!r}"
    return page


def main(path: str | None = None) -> None:
    """Print the tables, or put them into a page."""
    if path is None:
        print(f"rates: {BF16 / 1e12:.0f} (bf16) and {FP8 / 1e12:.0f} (float8) TFLOP/s a GPU")
        for make in TABLES.values():
            print(f"\n{make()}")
    else:
        Path(path).write_text(filled(Path(path).read_text()))


if __name__ == "__main__":
    main(*sys.argv[1:])
