"""Backwards in two parts: the same gradients as plain, and really in two parts."""

import copy

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.crossing import hop_backward as backward
from blockpipe.schedules.builders import SCHEDULES, make_schedule

from ..models import square
from ..parameter_sets import each_value, every_pair
from ..parity import compare, difference, plain_step
from ..stage_devices import assert_close, equal, stages

SPLITTING = ["zb-h1", "zb-v"]


class Double(torch.autograd.Function):
    """Computes all its gradients at once, as custom functions do."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Parts(nn.Module):
    """Three stages; what the second does is the test's."""

    def __init__(self, middle):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layer = nn.Linear(6, 6)
        self.embed = nn.Embedding(6, 6)
        self.query = nn.Parameter(torch.randn(6))
        self.norm = nn.BatchNorm1d(6)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.last = nn.Linear(6, 3)
        self.middle = middle

    def forward(self, x):
        with bp.Block(0):
            x = self.first(x)
        with bp.Block(1):
            x = self.middle(self, x)
        with bp.Block(2):
            return self.last(x)


def plain_middle(net, x):
    return net.norm(net.layer(x)).relu()


def queries(net, x):
    return x.tanh() + net.query.exp()


def embedding(net, x):
    return x * net.embed(x.argmax(1))


def convolution(net, x):
    return net.conv(x[:, None])[:, 0] + x


def twice(net, x):
    return net.layer(net.layer(x).tanh())


def in_place_on_a_view(net, x):
    y = x * 1
    y[:, :3] = net.layer(x)[:, :3]
    y[:, 1].mul_(net.query[1])
    return y


def several_outputs(net, x):
    a, b = net.layer(x).split(3, 1)
    return torch.cat([b * net.query[:3], a], 1)


def untouched_by_parameters(net, x):
    return x.tanh()


def only_parameters(net, x):
    return net.query.expand_as(x) * 1


def reads_in_vain(net, x):
    _ = net.first.weight * 2  # of another stage, and nothing comes of it
    return net.layer(x)


@pytest.fixture
def parts(monkeypatch):
    """Counts the weight parts that were run, and the graphs that could not be split."""
    counts = {"split": 0, "whole": 0}
    original = backward.run_input_part

    def counted(graph):
        rest = original(graph)
        counts["whole" if rest is None else "split"] += 1
        return rest

    monkeypatch.setattr("blockpipe.crossing.tensors.gradients.run_input_part", counted)
    return counts


def run(net, schedule, *, plain=None, steps=2, isolate=False):
    """Steps beside those of a plain copy: four micro-batches of two rows; equal to the bit."""
    plain = copy.deepcopy(net) if plain is None else plain
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4, schedule=schedule, isolate=isolate)
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    loss_fn = nn.functional.cross_entropy
    for _ in range(steps):
        loss = pipe.forward_backward(x, target=y, loss_fn=loss_fn).loss
        expected = plain_step(plain, (x,), {}, y, loss_fn, 4)
    assert difference(net, plain, loss, expected).same
    return pipe


@every_pair(
    schedule=SPLITTING,
    middle=[
        plain_middle,
        queries,
        embedding,
        convolution,
        in_place_on_a_view,
        several_outputs,
        untouched_by_parameters,
    ],
    isolate=[False, True],
)
def test_gradients_equal_plain_in_two_parts(schedule, middle, isolate, parts):
    """To the bit; parameters that no incoming tensor leads to (an embedding, queries) too."""
    pipe = run(Parts(middle), schedule, isolate=isolate)
    assert pipe.recording.splits_backward == [False, True, True]
    assert parts == {"split": 2 * 2 * 4, "whole": 0}


def test_a_frozen_first_stage(parts):
    """Nothing that comes in needs a gradient: the second hop's backward is whole."""
    net = Parts(embedding)
    net.first.requires_grad_(False)
    pipe = run(net, "zb-h1")
    assert pipe.recording.splits_backward == [False, False, True]
    assert parts["split"] == 2 * 4


def test_what_comes_in_is_not_read():
    """A hop whose result hangs on its parameters alone: the hops before it get no gradient."""
    net = Parts(only_parameters)
    run(net, "zb-h1")
    assert [p.grad for p in net.first.parameters()] == [None, None]
    assert net.query.grad is not None


def test_a_crossing_that_no_gradient_comes_to(parts):
    """It is an end of the first part like the others, and gets nothing."""
    run(Parts(reads_in_vain), "zb-h1")
    assert parts["whole"] == 0


def with_custom_function(net, x):
    return Double.apply(net.layer(x))


def with_tensor_hook(net, x):
    y = net.layer(x)
    y.register_hook(lambda gradient: 2 * gradient)
    return y


def with_checkpoint(net, x):
    return torch.utils.checkpoint.checkpoint(lambda x: net.layer(x).tanh(), x, use_reentrant=False)


@pytest.mark.parametrize("schedule", SPLITTING)
@pytest.mark.parametrize(
    ("middle", "why"),
    [
        (with_custom_function, "Double is a Python function"),
        (twice, "a parameter is read twice"),
        (with_tensor_hook, "a hook"),
        (with_checkpoint, "it recomputes"),
    ],
)
def test_what_cannot_be_split_is_whole(schedule, middle, why, parts):
    """Gradients are the plain ones, and the recording and its summary say why."""
    pipe = run(Parts(middle), schedule)
    assert pipe.recording.splits_backward == [False, False, True]
    assert pipe.recording.hops[1].whole.startswith(why)
    assert why in str(pipe.summary())
    assert parts["split"] == 2 * 4


@each_value(
    schedule=[*SPLITTING, "auto"],
    where=["loss", "module hook", "inside a sealed module"],
)
def test_hooks_on_activations_fire_once(schedule, where):
    """Also those that the recording could not see: in the loss function, or added after it."""
    net = Parts(plain_middle)
    x = torch.randn(8, 6)
    fired = []

    def halved(gradient):
        fired.append(1)
        return gradient * 0.5

    def loss_fn(output):
        if where == "loss":
            output.register_hook(halved)
        return output.square().mean()

    class Hooked(nn.Linear):
        hooks = False

        def forward(self, x):
            y = super().forward(x)
            if self.hooks and y.requires_grad:
                y.register_hook(halved)
            return y

    net.layer.__class__ = Hooked
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4, schedule=schedule)
    pipe.forward_backward(x, loss_fn=square)
    net.zero_grad()
    if where == "module hook":
        net.layer.register_forward_hook(lambda m, i, out: out.register_hook(halved) and None)
    Hooked.hooks = where == "inside a sealed module"
    plain = copy.deepcopy(net).cpu()
    loss = pipe.forward_backward(x, loss_fn=loss_fn).loss
    count = len(fired)
    expected = plain_step(plain, (x,), {}, None, loss_fn, 4)
    assert count == 4
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or equal(p.grad, q.grad)
    assert_close(loss, expected)


@pytest.mark.parametrize("schedule", SPLITTING)
def test_one_micro_batch_that_cannot_be_split(schedule):
    """It takes another path than the recorded one: gradients still add up in order."""

    def sometimes(net, x):
        if bp.current_microbatch() == net.odd:
            return Double.apply(net.layer(x))
        return net.layer(x)

    for odd in range(4):
        net = Parts(sometimes)
        net.odd = odd
        plain = copy.deepcopy(net)
        x = torch.randn(8, 6)

        def loss_fn(output):
            return output.square().mean()

        pipe = bp.Pipeline(net, devices=stages(3), chunks=4, schedule=schedule)
        loss = pipe.forward_backward(x, loss_fn=loss_fn).loss
        total = torch.zeros(())
        for m, part in enumerate(x.split(2)):
            plain.middle = (
                (lambda n, v: Double.apply(n.layer(v))) if m == odd else (lambda n, v: n.layer(v))
            )
            found = loss_fn(plain(part))
            (found * 0.25).backward()
            total = total + found.detach() * 0.25
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or equal(p.grad, q.grad)
        assert_close(loss, total)


def test_saved_tensor_hooks_around_the_step_unpack_once():
    """A split backward would unpack for each part; hooks may allow it once only."""
    net = Parts(plain_middle)
    plain = copy.deepcopy(net)
    x = torch.randn(8, 6)

    def loss_fn(output):
        return output.square().mean()

    pipe = bp.Pipeline(net, devices=stages(3), chunks=4, schedule="zb-h1")
    pipe.forward_backward(x, loss_fn=loss_fn)
    net.zero_grad()
    plain_step(plain, (x,), {}, None, loss_fn, 4)
    plain.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: [t], lambda slot: slot.pop()):
        loss = pipe.forward_backward(x, loss_fn=loss_fn).loss
    expected = plain_step(plain, (x,), {}, None, loss_fn, 4)
    assert difference(net, plain, loss, expected).same


@pytest.mark.parametrize("schedule", SPLITTING)
def test_hooks_on_parameters_fire_once(schedule):
    """For each micro-batch, with the same gradients as in the plain loop."""
    net = Parts(plain_middle)
    plain = copy.deepcopy(net)
    seen = {}
    for name, model in (("piped", net), ("plain", plain)):
        calls = seen.setdefault(name, [])
        for parameter in (model.layer.weight, model.last.bias):
            parameter.register_hook(lambda g, calls=calls: calls.append(g.clone()) or 3 * g)
        model.first.weight.register_post_accumulate_grad_hook(
            lambda p, calls=calls: calls.append(p.grad.clone())
        )
    run(net, schedule, plain=plain, steps=1)
    assert len(seen["piped"]) == len(seen["plain"]) == 3 * 4


@pytest.mark.parametrize("schedule", SPLITTING)
def test_a_compiled_module_is_whole(schedule):
    """Its backward is one function: it would run twice."""
    net = Parts(plain_middle)
    net.layer = torch.compile(net.layer, backend="aot_eager")
    pipe = run(net, schedule)
    assert pipe.recording.hops[1].whole == "compiled module layer"


def test_the_weight_part_comes_when_the_schedule_says(parts):
    """A schedule of one's own that puts all weight parts at the very end."""
    order = make_schedule("gpipe", [0, 1, 2], 4)
    lanes = [
        [*lane, *(bp.Action("W", hop, m) for m in range(4) if hop)]
        for hop, lane in enumerate(order.lanes)
    ]
    schedule = bp.Schedule("late weights", (0, 1, 2), 4, tuple(lanes))
    net = Parts(plain_middle)
    seen = []
    net.last.weight.register_post_accumulate_grad_hook(lambda p: seen.append("last"))
    net.first.weight.register_post_accumulate_grad_hook(lambda p: seen.append("first"))
    run(net, schedule, steps=1)
    assert seen.count("last") == 4
    assert parts["split"] == 2 * 4


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_real_models_in_every_schedule(schedule):
    """A ResNet in four stages, sanitizer on: to the bit."""
    import torchvision

    model = torchvision.models.resnet18(num_classes=5)
    marks = {"layer2": 1, "layer3": 2, "layer4": 3}
    found, _ = compare(model, (torch.randn(6, 3, 32, 32),), {}, marks, schedule=schedule)
    assert found.same, found
