"""Where memory goes: what a recording predicts, and what a step really holds."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import blockpipe as bp
from blockpipe.preparation.memory.measured import LiveBytes
from blockpipe.preparation.memory.model import copies_of

from ...models import FeedForward, square
from ...parameter_sets import every_pair
from ...stage_devices import examples, is_simulated, stages


def layers(count=4, stages=2, width=32):
    net = nn.Sequential(*(FeedForward(width) for _ in range(count)))
    marks = {str(stage * count // stages): stage for stage in range(1, stages)}
    return bp.begin_blocks(net, marks)


def test_activations_are_counted_by_storage():
    """By hand: rows × width × (4 + 16 + 16) bytes for a layer."""
    hops = bp.record(layers(), torch.randn(8, 32)).hops
    a_layer = 8 * 32 * 36
    assert [hop.never.bytes for hop in hops] == [2 * a_layer] * 2
    assert hops[0].never.inputs == 8 * 32 * 4
    assert [hop.always.bytes for hop in hops] == [2 * 8 * 32 * 4] * 2  # the layers' inputs
    assert [hop.never.shared for hop in hops] == [0, 0]


def test_what_two_hops_save_is_counted_once_on_one_device():
    """A tensor that both stages save is there once where it does not move."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(8))

        def forward(self, x):
            with bp.Block(0):
                y = (x * self.w).exp()
            with bp.Block(1):
                return y.sin()

    first, second = bp.record(Net(), torch.randn(4, 8)).hops
    assert (first.never.bytes, first.never.shared) == (2 * 128, 0)  # x and exp's result
    assert (second.never.bytes, second.never.shared) == (128, 128)


def test_the_parts_of_a_report():
    """Parameters, gradients, the optimizer's copies: added up from the model itself."""
    net = layers()
    net[3].b.bias.requires_grad_(False)
    net[0].register_buffer("scale", torch.ones(10))
    report = bp.Pipeline(net, devices=stages(2), chunks=4).memory(
        torch.randn(8, 32), optimizer="adam"
    )
    own = [
        sum(p.numel() * 4 for layer in part for p in layer.parameters())
        for part in (net[:2], net[2:])
    ]
    first, second = report.stages
    assert (first.parameters, second.parameters) == (own[0] + 40, own[1])
    assert (first.gradients, second.gradients) == (own[0], own[1] - 32 * 4)
    assert (first.optimizer, second.optimizer) == (2 * own[0], 2 * (own[1] - 32 * 4))
    assert first.in_flight == 2
    assert second.in_flight == 1
    assert second.activations == 2 * 2 * 32 * 36
    for stage in report.stages:
        assert stage.peak == sum(
            [stage.parameters, stage.gradients, stage.optimizer, stage.activations, stage.working]
        )
    assert (first.crossings, second.crossings) == (0, 2 * 32 * 4)
    expected = Counter({first.device: first.peak}) + Counter({second.device: second.peak})
    assert report.by_device == expected
    assert report.to_dict()["stages"][0]["kept"] == first.kept
    assert net[0].a.weight.device.type == "cpu"


@every_pair(
    schedule=["1f1b", "gpipe", "zb-h1"],
    mode=["never", "except_last", "always"],
    chunks=[2, 5],
)
def test_the_prediction_is_within_15_percent(schedule, mode, chunks):
    """Of what live tensors come to, for each stage."""
    torch.manual_seed(0)
    net = layers(count=12, stages=3, width=64)
    x = torch.randn(chunks * 256, 64)
    pipe = bp.Pipeline(net, devices=stages(3), chunks=chunks, schedule=schedule, checkpoint=mode)
    pipe.forward_backward(x, loss_fn=square)  # gradients are there
    with pipe.measured_memory() as report:
        pipe.forward_backward(x, loss_fn=square)
    for stage in report.stages:
        static = stage.parameters + stage.gradients
        measured = stage.measured - static
        assert abs(stage.activations + stage.working - measured) < 0.15 * measured, str(report)


@settings(max_examples=examples(30), deadline=None)
@given(
    st.integers(2, 4),
    st.integers(2 if is_simulated() else 1, 6),  # one micro-batch on several devices is warned of
    st.sampled_from(["1f1b", "gpipe", "interleaved", "zb-h1", "sequential"]),
    st.sampled_from(["never", "except_last", "always"]),
    st.one_of(st.none(), st.integers(1, 3)),
)
def test_the_peak_is_that_of_the_schedule(depth, chunks, schedule, mode, in_flight):
    """Beside a book kept action by action over the schedule that runs."""
    net = layers(count=2 * depth, stages=depth)
    pipe = bp.Pipeline(
        net,
        devices=stages(depth),
        chunks=chunks,
        schedule=schedule,
        checkpoint=mode,
        in_flight=in_flight,
    )
    x = torch.randn(2 * chunks, 32)
    report = pipe.memory(x)
    prepared = pipe._preparer.sketch(pipe._runner.split((x,), {})[0], pipe._options)
    one_by_one = prepared.runs_inline(schedule, chunks)
    made = prepared.schedule("sequential" if one_by_one else schedule, chunks)
    gradients = [hop.weight_bytes for hop in prepared.recording.hops]
    a_row, rows = 32 * 4, 2
    assert gradients[1:] == [2 * 5 * a_row * rows] * (depth - 1)  # of each linear layer's result
    for stage in range(depth):
        now = most = 0
        outside = a_row * rows if stage == 0 and not is_simulated() else 0  # the caller's batch
        full, less = 2 * 9 * a_row * rows - outside, 2 * a_row * rows - outside
        split = made.split()
        for kind, hop, m in made.lanes[made.lane_of_hop[stage]]:
            assert hop == stage
            again = mode == "always" or (mode == "except_last" and m < chunks - 1)
            if kind == "F":
                now += less if again else full
            elif kind == "R":
                assert again
                now += full - less
            elif kind == "B" and (hop, m) in split:
                now += gradients[hop]
            else:
                now -= full + gradients[hop] * (kind == "W")
            most = max(most, now)
        assert now == 0
        assert report.stages[stage].activations == most


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [
        (None, 0),
        ("sgd", 0),
        ("AdamW", 2),
        (1.5, 1.5),
        (lambda p: torch.optim.SGD(p, lr=1), 0),
        (lambda p: torch.optim.SGD(p, lr=1, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p), 2),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 3),
        (lambda p: torch.optim.Adagrad(p), 1),
        (lambda p: torch.optim.RMSprop(p, momentum=0.9), 2),
        (lambda p: torch.optim.Adadelta(p), 2),
        (lambda p: torch.optim.NAdam(p), 2),
    ],
)
def test_copies_of_an_optimizer_are_what_its_state_has(optimizer, copies):
    """As many copies of the parameters as their states have after a step."""
    net = nn.Linear(30, 40)
    if not callable(optimizer):
        assert copies_of(optimizer) == copies
        return
    made = optimizer(net.parameters())
    if type(made).__name__ != "Adagrad":  # whose state is there from the beginning
        assert copies_of(made) == copies
    net(torch.randn(2, 30)).sum().backward()
    made.step()
    assert copies_of(made) == pytest.approx(copies, abs=0.01)


@pytest.mark.parametrize("wrong", ["16GB", -1, 0, True, 1.5])
def test_a_limit_is_a_number_of_bytes(wrong):
    """Anything else is refused."""
    pipe = bp.Pipeline(layers(), devices=stages(2), chunks=4)
    with pytest.raises(
        TypeError, match=r"expected a number of bytes for limit, got .*; pass 16 \* 2\*\*30"
    ):
        pipe.memory(torch.randn(8, 32), limit=wrong)


@pytest.mark.parametrize("wrong", ["adm", -1, True, object(), float("inf"), float("nan")])
def test_an_unknown_optimizer_is_refused(wrong):
    """With those that are known."""
    with pytest.raises(
        TypeError, match=r"expected a known optimizer .* pass one of 'sgd'.*number of copies"
    ):
        copies_of(wrong)


def test_it_suggests_recomputation_chunks_and_a_move():
    """Where one stage stands out; each with what it would come to."""
    net = layers(count=8, stages=2, width=64)
    bp.remove_blocks(net)
    bp.begin_blocks(net, {"6": 1})
    report = bp.Pipeline(net, devices=stages(2), chunks=4).memory(
        torch.randn(4096, 64), optimizer="adam"
    )
    text = "\n".join(report.suggestions)
    assert "checkpoint=True on the marks of stage 0" in text
    assert "twice as many chunks" in text
    assert "move '5' from stage 0 to stage 1" in text


def test_what_it_suggests_helps():
    """Recomputation and a move really come to what is promised, within a tenth."""
    net = layers(count=8, stages=2, width=64)
    x = torch.randn(4096, 64)

    def peak(marks, **options):
        bp.remove_blocks(net)
        for path, (stage, again) in marks.items():
            bp.BeginBlock(net[int(path)], stage, checkpoint=again)
        report = bp.Pipeline(net, devices=stages(2), chunks=4, **options).memory(x)
        return report, report.stages[0].peak

    report, before = peak({"0": (0, None), "6": (1, None)})
    promised = next(line for line in report.suggestions if line.startswith("checkpoint"))
    _, after = peak({"0": (0, True), "6": (1, None)})
    assert after < before
    assert _bytes(promised.split(": ")[1].split(" instead")[0]) == pytest.approx(after, rel=0.1)
    promised = next(line for line in report.suggestions if line.startswith("move"))
    _, after = peak({"0": (0, None), "5": (1, None)})
    assert _bytes(promised.split(": ")[1].split(" and")[0]) == pytest.approx(after, rel=0.1)


def _bytes(text):
    number, unit = text.split()
    return float(number) * {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]


def test_a_limit_is_told_whether_it_is_kept():
    """With the stage that has the highest peak."""
    pipe = bp.Pipeline(layers(), devices=stages(2), chunks=4)
    x = torch.randn(64, 32)
    assert "more than the 1.0 KiB of a device" in str(pipe.memory(x, limit=1024))
    assert "within the 1.0 GiB of a device" in str(pipe.memory(x, limit=2**30))


def test_a_model_on_the_meta_device_has_a_report():
    """Before there is a single value."""
    with torch.device("meta"):
        net = layers(width=4096)
    report = bp.Pipeline(net, devices=stages(2), chunks=4).memory(
        torch.randn(8, 4096), optimizer="adamw"
    )
    assert report.stages[0].optimizer == 2 * report.stages[0].gradients > 2**31


def test_live_bytes_are_counted_by_hand():
    """Views and writes in place make nothing; what is gone is gone."""
    x = torch.randn(10, 10)
    with LiveBytes() as live:
        a = x + 1
        b = a.view(100)
        b.mul_(2)
        assert live.now == {0: 400}
        del a, b
        assert live.now == {0: 0}
        c = x.sum()
    assert (live.now, live.peak) == ({0: 4}, {0: 400})
    del c


def test_measuring_needs_a_placed_model():
    """There is nothing to compare with before."""
    pipe = bp.Pipeline(layers(), devices=stages(2), chunks=4)
    with pytest.raises(
        TypeError,
        match=r"measured_memory\(\) compares with a prediction.*test_model\.py:\d+",
    ):
        with pipe.measured_memory():
            pass
