"""verify: what it compares, what it finds, and that it leaves no trace."""

import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockpipe as bp
from blockpipe.errors import StateError, UsageError
from blockpipe.preparation import prepared
from blockpipe.reports.verify.result import Verification

from ...hiding import hidden
from ...models import EVERY_SCHEDULE
from ...parameter_sets import each_value
from ...stage_devices import equal, exact, is_simulated, stages
from .verified import Shared, Wrong, sharing


def _net(dropout: float = 0.0) -> nn.Sequential:
    net = nn.Sequential(
        nn.Linear(8, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(16, 16),
        nn.ReLU(),
        nn.Linear(16, 4),
    )
    bp.begin_blocks(net, {"3": 1, "5": 2})
    return net


def _batch(samples: int = 10) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 8), torch.randint(0, 4, (samples,))


def _verify(net: nn.Module, chunks: int = 4, count: int = 3, **options: Any) -> Verification:
    pipe = bp.Pipeline(net, devices=stages(count), chunks=chunks, **options)
    x, y = _batch()
    return pipe.verify(x, target=y, loss_fn=F.cross_entropy)


# --- what is right


@each_value(
    schedule=EVERY_SCHEDULE,
    checkpoint=["never", "except_last", "always"],
)
def test_a_good_model_is_exact(schedule: str, checkpoint: str):
    """With dropout, batch norm and uneven micro-batches, to the bit under every schedule."""
    found = _verify(_net(0.5), schedule=schedule, checkpoint=checkpoint)
    assert found.verdict in exact()
    assert found.exact != is_simulated()  # whether bits are promised
    assert found
    assert found.first_difference is None
    assert {d.kind for d in found.differences} == {"outputs", "loss", "gradients", "buffers"}
    assert sum(d.kind == "gradients" for d in found.differences) == 8


def test_input_gradients_are_compared():
    """Those of every input that needs them, by position or name; the caller's ``.grad`` stays."""
    pipe = bp.Pipeline(_net(), devices=stages(3), chunks=3)
    x = torch.randn(7, 8, requires_grad=True)
    found = pipe.verify(x)
    assert found.worst["input gradients"].verdict in exact()
    assert x.grad is None


def test_an_argument_named_target_is_compared_beside_the_losss_target():
    class Shifted(nn.Linear):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            with bp.Block(stage=0):
                return super().forward(x) - target

    pipe = bp.Pipeline(Shifted(4, 4), devices=stages(1), chunks=2)
    x, t, y = (torch.randn(4, 4, requires_grad=True) for _ in range(3))
    given = {"target": y, "loss_fn": nn.functional.mse_loss, "model_kwargs": {"target": t}}
    found = pipe.verify(x, **given)
    names = {d.name for d in found.differences if d.kind == "input gradients"}
    assert names == {"0", "target", "the loss's target"}


@pytest.mark.parametrize("reduction", ["mean", "sum", lambda args, kwargs, target: len(target)])
def test_each_loss_reduction_is_weighed_as_the_pipeline_does(reduction: Any):
    """The plain loop weighs losses as the pipeline does."""
    assert _verify(_net(), loss_reduction=reduction).verdict in exact()


def test_the_plain_loop_defers_batch_norm_too():
    """The plain loop defers the running statistics as well, and they change."""
    found = _verify(_net(0.1), deferred_batch_norm=True)
    assert found.verdict in exact()
    assert len([d for d in found.differences if d.kind == "buffers"])


def test_batches_split_on_another_dim_are_compared():
    """Batches that are split on another dim, and outputs joined there."""

    class Turned(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.transpose(0, 1)).transpose(0, 1)

    net = nn.Sequential(Turned(4, 4), Turned(4, 2))
    bp.begin_blocks(net, {"1": 1})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, batch_dims=1)
    assert pipe.verify(torch.randn(4, 6)).verdict in exact()


def test_without_gradients_the_forward_is_compared():
    """Under ``no_grad``, and for a frozen model."""
    net = _net()
    pipe = bp.Pipeline(net, devices=stages(3), chunks=2)
    with torch.no_grad():
        assert {d.kind for d in pipe.verify(_batch()[0]).differences} == {"outputs", "buffers"}
    found = bp.Pipeline(net.requires_grad_(False), devices=stages(3), chunks=2).verify(_batch()[0])
    assert found
    assert {d.kind for d in found.differences} == {"outputs", "buffers"}


def test_parameters_of_a_loss_are_compared():
    """Their gradients are compared, and left as they were."""

    class Loss(nn.Linear):
        def forward(self, output: Tensor) -> Tensor:
            return super().forward(output).square().mean()

    loss = Loss(4, 1)
    pipe = bp.Pipeline(_net(), devices=stages(3), chunks=2)
    found = pipe.verify(_batch()[0], loss_fn=loss)
    assert found.verdict in exact()
    assert {"loss_fn.weight", "loss_fn.bias"} <= {d.name for d in found.differences}
    assert loss.weight.grad is None


def test_several_threads_are_compared_with_as_many():
    """A lane has its share of the threads, and the plain loop as many as a lane."""
    torch.set_num_threads(2)
    pipe = bp.Pipeline(_net(), devices=stages(3), chunks=4)
    x, y = _batch()
    pipe.forward_backward(x, target=y, loss_fn=F.cross_entropy)
    for _ in range(5):
        assert pipe.verify(x, target=y, loss_fn=F.cross_entropy).verdict in exact()
    assert torch.get_num_threads() == 2


@pytest.mark.cpu("accelerators compute with no threads of the host")
@pytest.mark.parametrize("device", ["stages", "cpu"])
@pytest.mark.parametrize("trains", [True, False])
def test_both_runs_have_the_threads_of_a_lane(
    device: str, trains: bool, monkeypatch: pytest.MonkeyPatch
):
    """Sums differ by their number: an uncut reference with the caller's threads was "different",
    and so was a frozen model, whose small step ran without lanes."""
    monkeypatch.setattr(prepared, "SMALL_OPERATION", 1.0)
    seen: set[int] = set()
    shelf = hidden(seen)

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            by = torch.get_num_threads() if bp.current_microbatch() is not None else 2
            shelf().add(by)  # not in a recording
            return super().forward(x)

    torch.set_num_threads(6)
    net = bp.begin_blocks(nn.Sequential(Net(4, 4), Net(4, 4), Net(4, 4)), {"1": 1, "2": 2})
    pipe = bp.Pipeline(net.requires_grad_(trains), devices=stages(3), chunks=4)
    assert pipe.verify(torch.ones(8, 4), device=device, whole=False)
    assert seen == {2}
    assert torch.get_num_threads() == 6


@pytest.mark.cpu("whether threads pay is a matter of the CPU")
def test_lanes_run_for_small_models(monkeypatch: pytest.MonkeyPatch):
    """A step of this model takes one thread, but what is verified is its schedule; afterwards
    steps are as before."""
    monkeypatch.undo()
    monkeypatch.setattr("blockpipe.preparation.prepared.SMALL_HOP", 1.0)
    names: list[threading.Thread] = []
    shelf = hidden(names)

    class Named(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            shelf().append(threading.current_thread())
            return super().forward(x)

    net = nn.Sequential(Named(4, 4), Named(4, 4))
    bp.begin_blocks(net, {"1": 1})
    x = torch.randn(4, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, sample=(x,))
    found = pipe.verify(x)
    assert found
    assert "on 2 lanes" in str(found)
    assert any(thread is not threading.main_thread() for thread in names)
    names.clear()
    pipe.forward_backward(x, loss_fn=torch.sum)
    assert set(names) == {threading.main_thread()}


def test_state_that_a_recording_sees_is_refused_by_it():
    """There is nothing to verify then."""
    pipe = bp.Pipeline(sharing(Shared()), devices=stages(2), chunks=4, schedule="gpipe")
    with pytest.raises(StateError, match="attribute 'value' of a Shared .* reads it on hops"):
        pipe.verify(torch.randn(8, 8))


told_by_threads = pytest.mark.cpu("autograd gives a device a thread, in the plain run too")


# --- no trace


def _state(net: nn.Module) -> dict[str, Any]:
    return {
        "values": {k: v.clone() for k, v in net.state_dict().items()},
        "grads": [p.grad for p in net.parameters()],
        "modes": [m.training for m in net.modules()],
        "attributes": [dict(m.__dict__) for m in net.modules()],
        "rng": torch.get_rng_state(),
        "python": random.getstate(),
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()],
        "threads": torch.get_num_threads(),
    }


def _assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert all(equal(v, after["values"][k]) for k, v in before["values"].items())
    assert all(a is b for a, b in zip(before["grads"], after["grads"], strict=True))
    assert equal(before["rng"], after["rng"])
    for name in ("modes", "python", "hooks", "threads"):
        assert before[name] == after[name]
    for a, b in zip(before["attributes"], after["attributes"], strict=True):
        assert a.keys() == b.keys()
        assert all(a[key] is b[key] for key in a)


class _Counting(nn.Linear):
    """Keeps state in an attribute, a list and Python's generator."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        super().__init__(8, 8)
        self.count, self.seen, self.fails_at = 0, [], fails_at

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append(self.count)
        if self.count == self.fails_at:
            raise ValueError("broken on purpose")
        return super().forward(x) * (1.0 + 0.1 * random.random())


def test_a_verification_leaves_nothing_behind():
    """Values, gradients, modes, attributes, generators, hooks: all as they were."""
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), _Counting())
    bp.begin_blocks(net, {"3": 1})
    net[1].eval()
    x = torch.randn(6, 8)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3)
    pipe.forward_backward(x, loss_fn=torch.sum)
    before = _state(net)
    assert pipe.verify(x)
    _assert_same(before, _state(net))
    assert pipe.chunks == 3
    assert len(pipe._preparer.known) == 1


def test_a_failed_verification_leaves_nothing_behind():
    """The pipelined run fails, in its second micro-batch, with its note; all is as it was."""
    net = nn.Sequential(nn.Linear(8, 8), _Counting())
    bp.begin_blocks(net, {"1": 1})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3, sample=(torch.randn(2, 8),))
    net[1].fails_at = net[1].count + 2
    x = torch.randn(6, 8)
    before = _state(net)
    with pytest.raises(ValueError, match="on purpose") as caught:
        pipe.verify(x)
    assert any("micro-batch 1 on stage 1" in note for note in caught.value.__notes__)
    _assert_same(before, _state(net))


def test_parameters_that_the_forward_writes_and_optimizers_in_the_backward():
    """``max_norm`` and post-accumulate hooks change parameters: not in a verification."""
    net = nn.Sequential(nn.Embedding(8, 8, max_norm=0.5), nn.Linear(8, 4))
    bp.begin_blocks(net, {"1": 1})
    steps = []
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: steps.append(p.data.add_(1)))
    before = [p.detach().clone() for p in net.parameters()]
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, schedule="sequential")
    found = pipe.verify(torch.arange(8).view(4, 2))
    assert found.verdict in exact()
    assert not steps
    assert all(equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
    pipe.forward_backward(torch.arange(8).view(4, 2), loss_fn=torch.sum)
    assert steps, "the hooks are back"


def test_inputs_are_not_written_to():
    """A forward that writes to its input writes to a copy, in each run."""

    class InPlace(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    net = nn.Sequential(InPlace(4, 4), nn.Linear(4, 2))
    bp.begin_blocks(net, {"1": 1})
    x = torch.ones(4, 4)
    assert bp.Pipeline(net, devices=stages(2), chunks=2).verify(x).verdict in exact()
    assert equal(x, torch.ones(4, 4))


# --- the rest


def test_on_the_stages_the_reference_is_uncut():
    """``device="stages"``: the reference is one uncut graph; the pipeline stays as it is."""
    pipe = bp.Pipeline(_net(0.5), devices=stages(3), chunks=4, checkpoint="always")
    x, y = _batch()
    found = pipe.verify(x, target=y, loss_fn=F.cross_entropy, device="stages")
    assert found.verdict in exact()
    assert "uncut graph" in found.reference
    assert (pipe.schedule, pipe.checkpoint) == ("1f1b", "always")


def test_a_model_from_the_meta_device():
    """Its values come with the placement, as at a first call."""
    with torch.device("meta"):
        net = _net()
    pipe = bp.Pipeline(net, devices=stages(3), chunks=2, init="reset_parameters")
    assert pipe.verify(_batch()[0]).verdict in exact()


@pytest.mark.slow
def test_compiled_modules_are_ok_and_not_exact():
    """Where the stages are compiled, bits are not promised; inner modules are not looked into."""
    pipe = bp.Pipeline(_net(), devices=stages(3), chunks=2)
    pipe.compile(backend="eager")
    found = pipe.verify(_batch()[0])
    assert found
    assert not found.exact


def test_dropout_that_the_recording_did_not_see():
    """It was 0 then: both runs draw the same all the same, once that is known."""
    net = _net(0.0)
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4, sample=(_batch()[0],))
    net[3].p = 0.5
    assert pipe.verify(_batch()[0]).verdict in exact()


@told_by_threads
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_scripted_modules_are_watched_from_around():
    """They bear no hooks: what is around them is watched."""
    net = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Tanh()), nn.ReLU(), Wrong(8, 4))
    bp.begin_blocks(net, {"3": 1})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3)
    found = pipe.verify(torch.randn(6, 8))
    assert not found.exact
    assert found.first_difference is not None


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"target": torch.zeros(10)}, "no loss_fn to compare it by"),
        ({"loss_fn": 3}, "expected a callable .* for loss_fn"),
        ({"rtol": -1.0}, "a number from 0 up for rtol"),
        ({"atol": "small"}, "a number from 0 up for atol"),
        ({"rtol": float("nan")}, "a number from 0 up for rtol"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], match: str):
    """It is an error that says what to do, and nothing has changed."""
    net = _net()
    pipe = bp.Pipeline(net, devices=stages(3), chunks=2)
    x = _batch()[0]
    before = _state(net)
    with pytest.raises(UsageError, match=match):
        pipe.verify(x, **given)
    _assert_same(before, _state(net))


def test_integers_alone_have_no_gradient():
    """A model whose outputs cannot be differentiated is told to run without gradients."""

    class Most(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).argmax(-1)

    pipe = bp.Pipeline(nn.Sequential(Most(4, 4)), devices=["cpu"], chunks=2)
    with pytest.raises(
        UsageError, match="an output with a gradient path for the backward, got none"
    ):
        pipe.verify(torch.randn(4, 4))
    with torch.no_grad():
        assert pipe.verify(torch.randn(4, 4)).verdict in exact()


def test_the_table_is_the_differences():
    """Each row's counts add up to what was compared, and ``to_dict`` is plain data."""
    found = _verify(_net())
    rows = [line.split() for line in str(found).splitlines()[2:6]]
    kinds = [d.kind for d in found.differences]
    assert {row[0]: sum(map(int, row[1:4])) for row in rows} == {k: kinds.count(k) for k in kinds}
    assert found.to_dict()["ok"] is True
    assert len(found.to_dict()["differences"]) == len(kinds)


@pytest.mark.filterwarnings("ignore:the loss of micro-batch")
def test_values_that_are_not_finite_are_told():
    """NaN equals NaN, but a note says that there is one."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    bp.begin_blocks(net, {"1": 1})
    x = torch.randn(4, 4)
    x[0, 0] = float("nan")
    found = bp.Pipeline(net, devices=stages(2), chunks=2).verify(x)
    assert found.verdict in exact()
    assert "not finite in the plain run" in str(found)
