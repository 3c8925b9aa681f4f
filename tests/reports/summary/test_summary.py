"""The summary: every number is added up again here, from the model itself."""

import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import blockpipe as bp
from blockpipe._common.text import bytes_text, flops_text, milliseconds_text
from blockpipe.costs.rates import STATED_ACCELERATOR, STATED_CPU
from blockpipe.errors import UsageError
from blockpipe.reports.summary.columns import COLUMNS
from blockpipe.reports.summary.rows import ModuleRow
from blockpipe.schedules.simulation import simulate

from ...golden_models import MARKS, make
from .summarized import Net, recorded


class Plain:
    """A plain run of a model, without Blockpipe: what its modules and stages cost and save."""

    def __init__(self, model: nn.Module, args: Any, kwargs: Any, begins: dict[str, int]) -> None:
        own = [*model.parameters(), *model.buffers()]
        self.saved: dict[str, int] = defaultdict(int)  # by module, summed over its calls
        self.outputs: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        self.by_stage = [dict[int, int]() for _ in range(1 + max(begins.values()))]
        self._skipped = {t.untyped_storage().data_ptr() for t in own}
        self._begins, self._stage = begins, 0
        self._stack: list[int] = []  # of each call under way, the bytes
        self._alive: list[Tensor] = []
        handles = [h for path, m in model.named_modules() for h in self._watch(path, m)]
        counter = FlopCounterMode(model, display=False, depth=None)
        with counter, torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t):
            model(*args, **kwargs)
        for handle in handles:
            handle.remove()
        top = type(model).__name__
        self.flops = {
            path.removeprefix(top).removeprefix("."): sum(counts.values())
            for path, counts in counter.get_flop_counts().items()
            if path != "Global"
        }

    def _watch(self, path: str, module: nn.Module) -> Iterator[Any]:
        def enter(*_: Any) -> None:
            self._stage = self._begins.get(path, self._stage)
            self._stack.append(0)

        def leave(_: nn.Module, __: Any, output: Any) -> None:
            self.saved[path] += self._stack.pop()
            found = output if isinstance(output, tuple) else (output,)
            self.outputs[path] += [tuple(t.shape) for t in found if isinstance(t, Tensor)]

        yield module.register_forward_pre_hook(enter)
        yield module.register_forward_hook(leave)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._skipped:
            self._alive.append(tensor.detach())  # so that no other storage gets its address
            if storage.data_ptr() not in self.by_stage[self._stage]:  # the first that saves it
                self.by_stage[self._stage][storage.data_ptr()] = storage.nbytes()
                self._stack = [saved + storage.nbytes() for saved in self._stack]
        return tensor


def held_by(model: nn.Module, row: ModuleRow) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    modules = [model.get_submodule(path) for path in row.paths]
    parameters = {id(p): p for module in modules for p in module.parameters()}
    return parameters, {id(b): b for module in modules for b in module.buffers()}


def size(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("name", MARKS)
@pytest.mark.filterwarnings("ignore")
def test_every_number_is_the_models_own(name: str) -> None:
    """Of modules and stages: parameters, bytes, flops, activations; and what is printed is these."""
    if MARKS[name][0] != "torchvision":
        pytest.importorskip({"huggingface": "transformers"}.get(MARKS[name][0], "timm"))
    model, args, kwargs = make(name)
    summary = bp.record(model, args, kwargs).summary(depth=99, columns=COLUMNS.keys() - {"device"})
    bp.remove_blocks(model)
    plain = Plain(model, args, kwargs, MARKS[name][2])
    printed = str(summary).splitlines()
    for number, row in enumerate(summary.modules):
        parameters, buffers = held_by(model, row)
        assert row.parameters == sum(p.numel() for p in parameters.values()), row.name
        assert row.trainable == sum(p.numel() for p in parameters.values() if p.requires_grad)
        assert row.bytes == size((*parameters.values(), *buffers.values())), row.name
        assert row.activation_bytes == sum(plain.saved[path] for path in row.paths), row.name
        assert row.flops == sum(plain.flops.get(path, 0) for path in row.paths), row.name
        if row.outputs and plain.outputs[row.paths[0]]:
            assert row.outputs[0] == plain.outputs[row.paths[0]][0], row.name
        line = printed[2 + number]
        assert line.startswith("  " * row.depth + (row.name or summary.model)), line
        for text in (
            f"{row.parameters:,}" if row.parameters else "-",
            f"{row.trainable:,}" if row.trainable else "-",
            bytes_text(row.bytes) if row.bytes else "-",
            bytes_text(row.activation_bytes) if row.activation_bytes else "-",
            flops_text(row.flops) if row.flops else "-",
            milliseconds_text(row.forward_seconds),
            milliseconds_text(row.backward_seconds),
        ):
            assert f" {text}" in line or f" *{text}" in line, (text, line)
    stages = summary.stages
    assert [s.activation_bytes for s in stages] == [sum(on.values()) for on in plain.by_stage]
    assert sum(s.parameters for s in stages) == sum(p.numel() for p in model.parameters())
    assert sum(s.bytes for s in stages) == size((*model.parameters(), *model.buffers()))
    assert sum(s.flops for s in stages) == plain.flops[""] == summary.modules[0].flops
    for crossing in summary.crossings:
        element = getattr(torch, crossing["dtype"]).itemsize
        assert crossing["bytes"] == element * torch.Size(crossing["shape"]).numel()


@pytest.mark.parametrize("name", [n for n in MARKS if MARKS[n][0] == "torchvision"])
def test_the_usual_table_fits_100_characters(name: str) -> None:
    model, args, kwargs = make(name)
    recording = bp.record(model, args, kwargs)
    text = str(recording.summary(devices=["cuda:0"] * 3))
    assert max(map(len, text.splitlines())) <= 100


def test_shares_are_of_the_stages_time() -> None:
    """A stage's rows have what its glue has not; the bars and the imbalance follow from the stages."""
    net = nn.Sequential(nn.Linear(8, 512), nn.Sequential(nn.Linear(512, 8)), nn.Linear(8, 8))
    summary = recorded(bp.begin_blocks(net, {"2": 1})).summary()
    shares = [row.share for row in summary.modules]
    assert shares[0] is None
    assert shares[1] + shares[2] == pytest.approx(1)
    assert shares[3] == pytest.approx(1)
    seconds = [
        sum(r.forward_seconds + r.backward_seconds for r in summary.modules[1:] if r.stages == [s])
        for s in (0, 1)
    ]
    assert [stage.seconds for stage in summary.stages] == pytest.approx(seconds)
    assert summary.imbalance == pytest.approx(max(seconds) / (sum(seconds) / 2))
    assert f"takes {summary.imbalance:.2f} times the mean" in str(summary)
    bars = [line for line in str(summary).splitlines() if "█" in line]
    assert [line.split()[1].count("█") for line in bars] == [
        16,
        round(16 * seconds[1] / seconds[0]),
    ]


def test_times_are_those_of_the_devices() -> None:
    """Each stage's by its own; a device that is not there has rates that are stated."""
    recording = recorded()
    on_cpu, on_both = recording.summary(), recording.summary(["cpu", "cuda:99"])
    first, second = (hop.work for hop in recording.hops[:2])
    for summary, rates in ((on_cpu, STATED_CPU), (on_both, STATED_ACCELERATOR)):
        seconds = STATED_CPU.forward(first), rates.forward(second)
        assert [stage.forward_seconds for stage in summary.stages] == pytest.approx(seconds)
        assert summary.modules[0].forward_seconds == pytest.approx(sum(seconds))
    assert "by rates measured on cpu, 1 thread." in str(on_cpu)
    assert "stated for an accelerator: cuda:99 is not there" in str(on_both)
    assert [row.device for row in on_both.modules] == [
        "cpu, cuda:99",
        "cpu",
        "cpu, cuda:99",
        "cpu",
        "cuda:99",
    ]


def test_a_pipelines_summary_predicts_a_step() -> None:
    """Step, bubble and peaks are the simulation's and the memory report's."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    pipe = bp.Pipeline(
        bp.begin_blocks(net, {"1": 1, "3": 2}), devices=["cpu"] * 3, chunks=5, schedule="gpipe"
    )
    x = torch.zeros(20, 64)
    summary = pipe.summary(x)
    found = summary.prediction
    prepared = pipe._preparer.sketch(pipe._runner.split((x,), {})[0], pipe._options)
    played = simulate(prepared.schedule("gpipe", 5), prepared.costs)
    assert (found.schedule, found.microbatches) == ("gpipe", 5)
    assert (found.step_seconds, found.bubble) == (played.makespan, played.bubble)
    assert found.peak_bytes == [stage.peak for stage in pipe.memory(x).stages]
    assert [stage.memory_bytes for stage in summary.stages] == found.peak_bytes
    backward = [prepared.costs.of(hop)[1] for hop in range(3)]
    assert [stage.backward_seconds for stage in summary.stages] == backward
    assert (
        f"predicted {milliseconds_text(played.makespan)} ms, {100 * played.bubble:.0f} % bubble"
        in str(summary)
    )
    assert pipe.recording is None  # nothing is placed


def test_recomputation_is_in_the_stages_time() -> None:
    net = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(2))
    )
    bp.begin_blocks(net, {"1": 1})
    x = torch.zeros(20, 8)
    without, with_it = (
        bp.Pipeline(net, devices=["cpu"] * 2, chunks=2, checkpoint=c).summary(x)
        for c in ("never", "always")
    )
    for before, after in zip(without.stages, with_it.stages, strict=True):
        assert before.restore_seconds == 0
        assert after.seconds == before.seconds + after.forward_seconds
    assert "Recompute ms" in str(with_it)
    assert "Recompute ms" not in str(without)


def test_a_schedule_that_does_not_fit_is_said_and_the_rest_is_there() -> None:
    net = nn.Sequential(nn.Linear(4, 4), bp.BeginBlock(nn.Linear(4, 4), 1))
    schedule = bp.Schedule.from_csv("0F0,0B0\n1F0,1B0")
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2, schedule=lambda lanes, count: schedule)
    summary = pipe.summary(torch.zeros(4, 4))
    assert summary.prediction is None
    assert [note for note in summary.notes if "no step is predicted: expected a schedule" in note]


def test_what_crosses_most_is_shown() -> None:
    """Of many crossings the largest, in their order; the rest is added up."""

    class Many(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            made = [x[:, :1] + n for n in range(20)] + [x + 1]
            with bp.Block(1):
                return sum(made)

    text = str(recorded(Many()).summary())
    table = [line for line in text.splitlines() if line.startswith("0 → 1")]
    assert len(table) == 11
    assert "[4, 8]" in table[-1]
    assert "… 10 more" in text
    assert "160 B" in text  # 10 × 4 numbers


def test_what_is_frozen_has_no_backward() -> None:
    """Before the first trainable parameter nothing has, behind it everything; without gradients,
    nothing at all."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    net[:2].requires_grad_(False)
    bp.begin_blocks(net, {"2": 1})
    recording = bp.record(net, torch.zeros(4, 64))
    frozen, trained = recording.summary().stages
    assert frozen.backward_seconds == 0 < frozen.forward_seconds
    counted = Counter[str]()
    for operation, count in recording.hops[1].work.backward.items():
        counted[operation.kind] += count
    # Of weights, and of what came in, which for the first layer needs no gradient.
    assert counted == {"product": 3, "addition": 2 + 4}
    assert trained.backward_seconds > 1.5 * trained.forward_seconds
    with torch.no_grad():
        stages = bp.record(net, torch.zeros(4, 64)).summary().stages
    assert [stage.backward_seconds for stage in stages] == [0, 0]
    plan = bp.balance(net, torch.zeros(4, 64), 2, measure=False)
    assert plan.layout == "3=1"  # 1 + 1 + 3 and 3, not 1 + 1 and 3 + 3


def test_data_is_json_and_whole() -> None:
    """All columns, whatever is shown; numbers as they are."""
    summary = recorded().summary(["cpu"] * 2, columns=["stage"])
    data = json.loads(json.dumps(summary.to_dict(), allow_nan=False))
    assert data["parameters"] == sum(p.numel() for p in Net().parameters())
    assert data["modules"][1]["parameters"] == 72
    assert data["modules"][1]["trainable"] == 72
    assert data["modules"][2]["trainable"] == 0
    assert 0 < data["modules"][1]["forward_seconds"] < data["modules"][1]["backward_seconds"]
    assert data["rates"] == "measured on cpu, 1 thread"
    assert data["stages"][1]["name"] == "top"
    assert data["stages"][1]["memory_bytes"] == summary.stages[1].memory_bytes
    assert data["crossings"][0]["shape"] == [4, 8]
    assert data["imbalance"] == summary.imbalance
    fields = {"outputs", "flops", "activation_bytes", "bytes", "device", "share", "stages"}
    assert fields <= data["modules"][0].keys()


def test_at_a_prompt_it_is_the_table() -> None:
    summary = recorded().summary()
    assert repr(summary) == str(summary)


@pytest.mark.parametrize("columns", [["stages"], "stage", ["stage", 3], 7, [None]])
def test_wrong_columns_are_refused_with_the_list(columns: Any) -> None:
    """The error has the list, and the user's line."""
    with pytest.raises(
        UsageError,
        match=r"names out of stage, device.*output for columns, got .*test_summary\.py:\d+",
    ):
        recorded().summary(columns=columns)


def test_a_device_column_needs_devices() -> None:
    with pytest.raises(UsageError, match=r"pass devices=\[…\], one for each stage"):
        recorded().summary(columns=["device"])


@pytest.mark.parametrize("depth", [-1, 1.5, "2", True])
def test_wrong_depths_are_refused(depth: Any) -> None:
    with pytest.raises(UsageError, match=r"an integer from 0 up, or None for depth, got"):
        recorded().summary(depth=depth)
    pipe = bp.Pipeline(Net(), devices=["cpu"] * 2, chunks=2)
    with pytest.raises(UsageError, match=r"an integer from 0 up, or None for depth, got"):
        pipe.summary(torch.zeros(4, 8), depth=depth)


@pytest.mark.parametrize("devices", [["cpu"], "cpu", 2])
def test_too_few_devices_are_refused(devices: Any) -> None:
    with pytest.raises(UsageError, match="for each of 2 stages"):
        recorded().summary(devices)


@given(st.lists(st.sampled_from([n for n in COLUMNS if n != "device"]), max_size=6))
def test_any_columns_line_up(columns: list[str]) -> None:
    """Headings stand over their cells, each column once, in the order asked for."""
    text = str(RECORDING.summary(columns=columns))
    head, rule = text.splitlines()[:2]
    expected = [COLUMNS[name].head for name in dict.fromkeys(columns)]
    places = [head.index(f" {name}") for name in expected]
    assert all(a < b for a, b in pairwise(places))
    assert len(head) <= len(rule)


RECORDING = recorded()


# --- large models

LLAMA = """
import resource, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
import blockpipe as bp

config = LlamaConfig(
    hidden_size=8192, num_hidden_layers=4, num_attention_heads=64, num_key_value_heads=8,
    intermediate_size=28672, vocab_size=128256, use_cache=False,
)
with torch.device("meta"):
    net = LlamaForCausalLM(config)
bp.begin_blocks(net, {"model.layers.1": 1, "model.layers.3": 2})
ids = torch.zeros(1, 512, dtype=torch.long)
tiny = torch.nn.Linear(2, 2)
bp.record(tiny, torch.zeros(1, 2)).summary()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
recording = bp.record(net, (ids,), {"labels": ids})
text = str(recording.summary(depth=5))
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert recording.fake and sum(p.elements for p in recording.parameters) > 5e9
assert all(t.is_meta for t in (*net.parameters(), *net.buffers()))
print(grown)
"""


@pytest.mark.slow
def test_a_large_model_needs_no_memory() -> None:
    """Twenty gigabytes of parameters, and half a gigabyte of logits, are recorded and summarized in
    less than the smallest weight: nothing real is allocated."""
    pytest.importorskip("transformers")
    done = subprocess.run([sys.executable, "-c", LLAMA], check=True, capture_output=True, text=True)
    weight = 8192 * 1024 * 4  # of a key or value
    assert int(done.stdout.split()[-1]) * 1024 < 4 * weight
