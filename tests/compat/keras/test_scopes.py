"""Keras' scopes: layers made in them, and layers called in them."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.compat import keras
from blockpipe.compat.keras import PipelineStage
from blockpipe.errors import MarkError

from ...parity import any_loss, plain_step
from ...stage_devices import equal, stages


class TwoInputs(nn.Module):
    """The model of Keras' own tests: each layer is called twice, one has a stage of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        with PipelineStage(2):
            self.dense_1 = nn.Linear(8, 4)
        self.dense_2 = nn.Linear(4, 8)

    def forward(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        with PipelineStage(0):
            one = self.flatten(one)
        with PipelineStage(1):
            two = self.flatten(two)
        one = self.dense_1(one)  # on stage 2, where it was made
        with PipelineStage(3):
            two = self.dense_1(two)
        with PipelineStage(4):
            one = self.dense_2(one)
        with PipelineStage(5):
            two = self.dense_2(two)
        return one, two


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 2, 4), torch.randn(6, 2, 4)


def test_scopes_put_calls_on_stages():
    """Each call by its own scope, which counts more than the scope that made the layer."""
    entries = keras.get_pipeline_stage_assignment(TwoInputs(), inputs())
    assert [(e.path, e.call, e.pipeline_stage) for e in entries] == [
        ("flatten", 0, 0),
        ("flatten", 1, 1),
        ("dense_1", 0, 2),
        ("dense_1", 1, 3),
        ("dense_2", 0, 4),
        ("dense_2", 1, 5),
    ]


def test_a_model_with_scopes_trains_as_the_plain_loop():
    net = TwoInputs()
    twin, x = copy.deepcopy(net), inputs()
    pipe = bp.Pipeline(net, devices=stages(6), chunks=3)
    for _ in range(2):
        loss = pipe.forward_backward(*x, loss_fn=any_loss).loss
        assert equal(loss, plain_step(twin, x, {}, None, any_loss, 3))
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert equal(p.grad, q.grad)


def test_every_module_that_is_made_is_noticed():
    """In a variable, in a list, in another module, and one without parameters."""
    with PipelineStage(1):
        relu = nn.ReLU()
        listed = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())])
    net = nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), *listed)
    assert bp.record(net, torch.zeros(2, 4)).plan.layout == "1=1"
    net = nn.Sequential(nn.Linear(4, 4), listed[1])
    assert bp.record(net, torch.zeros(2, 4)).plan.layout == "1=1"
    net = nn.Sequential(nn.Linear(4, 4), listed[0])
    assert bp.record(net, torch.zeros(2, 4)).plan.layout == "1=1"


def test_nested_models_have_scopes_of_their_own():
    """A model made in a scope, with a scope in its constructor: the inner one wins inside."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            with PipelineStage(2):
                self.second = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    with PipelineStage(1):
        inner = Inner()
    with PipelineStage(3):
        last = nn.Linear(4, 4)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), inner, last)
    plan = bp.record(net, torch.zeros(2, 4)).plan
    assert plan.layout == "2=1, 2.second=2, 3=3"


def test_scopes_in_a_forward_may_be_nested():
    """Keras refuses them; here leaving the inner one restores the outer one."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with PipelineStage(0):
                x = self.layer(x)
                with PipelineStage(1):
                    x = self.layer(x)
                return self.layer(x)

    entries = keras.get_pipeline_stage_assignment(Nested(), torch.zeros(2, 4))
    assert [entry.pipeline_stage for entry in entries] == [0, 1, 0]


def test_a_failing_constructor_leaves_nothing_behind():
    """No replacement of torch's, no scope that is still open, no mark."""
    before = nn.Module.__init__
    layer = None

    def fail() -> None:
        nonlocal layer
        with PipelineStage(1):
            layer = nn.Linear(4, 4)
            raise KeyError("no")

    with pytest.raises(KeyError, match="no"):
        fail()
    assert nn.Module.__init__ is before
    outside = nn.Linear(4, 4)
    assert bp.record(nn.Sequential(nn.Linear(4, 4), layer, outside), torch.zeros(2, 4)).route == [0]


def test_a_failing_forward_leaves_the_scope():
    """The next recording begins anew."""

    class Fails(nn.Module):
        broken = True

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with PipelineStage(0):
                x = self.a(x)
            with PipelineStage(1):
                x = self.b(x)
                if self.broken:
                    raise KeyError("no")
                return x

    net = Fails()
    with pytest.raises(Exception, match="no"):
        bp.record(net, torch.zeros(2, 4))
    Fails.broken = False
    assert bp.record(net, torch.zeros(2, 4)).route == [0, 1]


def test_outside_of_a_pipeline_scopes_do_nothing():
    """The forward is the model's, and nothing of torch's stays replaced."""
    net, x = TwoInputs(), inputs()
    before = nn.Module.__init__
    one, two = net(*x)
    assert torch.equal(one, net.dense_2(net.dense_1(x[0].flatten(1))))
    assert torch.equal(two, net.dense_2(net.dense_1(x[1].flatten(1))))
    assert nn.Module.__init__ is before
    assert torch.equal(torch.compile(net, backend="eager", fullgraph=True)(*x)[0], one)


def test_copies_and_pickles_keep_the_scope_of_a_layer():
    """And its rule: a scope around the call counts more."""
    net = TwoInputs()
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert bp.record(other, inputs()).route == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("stage", [-1, None, True, 1.0, "1"])
def test_no_stage_is_refused(stage):
    """With the value, which Keras' own message leaves out."""
    got = repr(stage)
    with pytest.raises(MarkError, match=rf"from 0 on for stage, got {got}.*test_scopes"):
        PipelineStage(stage)


def test_a_scope_and_a_mark_of_its_own():
    """A module marked in the scope that made it keeps its mark; one marked after it has two."""
    with PipelineStage(1):
        layer = bp.BeginBlock(nn.Linear(4, 4), stage=2)
    assert "stage=2" in repr(layer)
    with PipelineStage(1):
        other = nn.Linear(4, 4)
    with pytest.raises(MarkError, match=r"stage 1 already \(\S*test_scopes.py:\d+\), and now as"):
        bp.BeginBlock(other, stage=2)
    assert "stage=1" in repr(other)
    assert "stage" not in repr(bp.remove_blocks(other))


def test_a_layer_that_is_never_called_is_named():
    """What is made in a scope and used in another way has a warning, with the scope's line."""

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            with PipelineStage(1):
                self.b = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.a(x), self.b.weight)

    pipe = bp.Pipeline(Unused(), devices=stages(1), chunks=2)
    with pytest.warns(
        UserWarning, match=r"'b' is marked as stage 1 \(.*test_scopes.py:\d+\), but never"
    ):
        pipe(torch.zeros(2, 4))
