"""What follows from a count, and is the same in the first forwards: a ramp, a phase, a warm-up. A
recording sees one value; a later step has several."""

import contextvars
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import blockpipe as bp
from blockpipe.errors import StateError

from ..alike import DEVICE
from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages

X = torch.randn(8, 4)
PHASE, SHARED = None, contextvars.ContextVar("phase", default=0)


class Shared:
    phase = 0


def _variable() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    phase = None

    def put(value: Any) -> None:
        nonlocal phase
        phase = value

    def get() -> Any:
        return phase

    return put, get


class Net(nn.Module):
    """Its first stage counts, and sets something that follows from the count."""

    def __init__(self, put: Callable[..., None], get: Callable[..., Any], late: bool) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("kept", torch.zeros(1))
        self.put, self.get, self.late = put, get, late
        self.calls, self.alpha, self.seen = 0, None, dict[int, bool]()
        self.table, self.set_own, self.get_own = {"alpha": 0}, *_variable()

    def phase(self) -> int:
        return self.calls // 6

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            scale = self.get(self) or 0 if self.late else 0
            h = self.a(x) * (1 + scale)
            if not self.late:
                self.put(self)
                self.calls += 1
        with bp.Block(stage=1):
            if self.late:
                self.put(self)
                self.calls += 1
                return self.b(h)
            return self.b(h) * (1 + self.get(self))


def _put_global(net: Net) -> None:
    global PHASE
    PHASE = net.calls // 6


def _put_by_name(net: Net) -> None:
    now = net.phase()
    net.alpha = now


def _put_ramp(net: Net) -> None:
    net.alpha = max(0.0, min(1.0, (net.calls - 8) * 0.25))


def _put_key(net: Net) -> None:
    net.seen[net.calls // 6] = True


def _put_on_parameter(net: Net) -> None:
    net.b.weight.phase = net.calls // 6  # type: ignore[assignment]


def _put_on_buffer(net: Net) -> None:
    net.kept.phase = net.calls // 6


def _put_mode(net: Net) -> None:
    net.norm.train(net.calls < 6)


def _set(name: str) -> Callable[[Net], None]:
    return lambda net: setattr(net, name, net.calls // 6)


KINDS: dict[str, tuple[Callable[[Net], Any], Callable[[Net], Any]]] = {
    "attribute": (_set("alpha"), lambda net: net.alpha),
    "a method's result": (_put_by_name, lambda net: net.alpha),
    "a ramp": (_put_ramp, lambda net: net.alpha),
    "entry": (lambda net: net.table.update(alpha=net.calls // 6), lambda net: net.table["alpha"]),
    "keys": (_put_key, lambda net: len(net.seen)),
    "global": (_put_global, lambda net: PHASE),
    "closure": (lambda net: net.set_own(net.calls // 6), lambda net: net.get_own()),
    "class": (lambda net: setattr(Shared, "phase", net.calls // 6), lambda net: Shared.phase),
    "parameter": (_put_on_parameter, lambda net: net.b.weight.phase),
    "buffer": (_put_on_buffer, lambda net: net.kept.phase),
    "choice": (
        lambda net: setattr(net, "alpha", 2.0 if net.calls > 5 else 1.0),
        lambda net: net.alpha,
    ),
}
BEFORE = {
    "attribute": KINDS["attribute"],
    "entry": KINDS["entry"],
    "class": KINDS["class"],
    "mode": (_put_mode, lambda net: 1 + net.norm.training),
}


def _reset() -> None:
    global PHASE
    PHASE, Shared.phase = None, 0


def _refused(net: nn.Module, reads: str = "reads it", **options: Any) -> None:
    _reset()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, **options)
    with pytest.raises(StateError, match=rf"the forward changes .*{reads}.*_phases\.py:\d+"):
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)


@pytest.mark.parametrize("kind", KINDS)
def test_what_follows_from_a_count_when_another_stage_reads_it_is_refused(kind: str):
    """Attack 43: it was the same in the forwards that were recorded, so that it was thought to be
    the same in all. In the step in which it changed, stages had another micro-batch's."""
    _refused(Net(*KINDS[kind], late=False))


@pytest.mark.parametrize("kind", BEFORE)
def test_what_follows_from_a_count_when_the_next_forward_reads_it_first_is_refused(kind: str):
    """Where it changed between two steps, the first stage had begun with the former value."""
    _refused(Net(*BEFORE[kind], late=True))


@pytest.mark.parametrize("kind", KINDS)
def test_what_follows_from_a_count_when_micro_batches_run_one_by_one_is_the_plain_loops(kind: str):
    net = Net(*KINDS[kind], late=False)
    plain = copy.deepcopy(net)
    net.to(DEVICE)
    want, got = [], []
    _reset()
    for _ in range(3):
        plain.zero_grad()
        plain_step(plain, (X,), {}, X, mse_loss, 4)
        want.append([p.grad.clone() for p in plain.parameters() if p.grad is not None])
    _reset()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="sequential")
    for _ in range(3):
        pipe.zero_grad()
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)
        got.append([p.grad.clone().cpu() for p in net.parameters() if p.grad is not None])
    assert_close(got, want)


class Reverse(torch.autograd.Function):
    """Reverses gradients, by a strength that it reads when they come."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.layer.alpha * gradient, None


class Reversed(nn.Module):
    def __init__(self, use: Callable[..., Tensor]) -> None:
        super().__init__()
        self.calls, self.alpha, self.use = 0, None, use

    def scaled(self, h: Tensor) -> Tensor:
        return h * self.alpha

    def forward(self, h: Tensor) -> Tensor:
        self.alpha = 0.5 * (1 + self.calls // 6)
        self.calls += 1
        return self.use(self, h)


def _by_hook(layer: Reversed, h: Tensor) -> Tensor:
    h = h * 1.0
    h.register_hook(lambda gradient: -layer.alpha * gradient)
    return h


def _by_checkpoint(layer: Reversed, h: Tensor) -> Tensor:
    return checkpoint(layer.scaled, h, use_reentrant=False)


USES = {
    "a custom backward": lambda layer, h: Reverse.apply(h, layer),
    "a hook": _by_hook,
    "a checkpoint": _by_checkpoint,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_what_follows_from_a_count_when_a_backward_reads_it_is_refused(use: str, schedule: str):
    """Of one module, on one stage: the usual gradient reversal. Earlier backwards came later."""
    net = nn.Sequential(nn.Linear(4, 4), Reversed(USES[use]), nn.Linear(4, 4))
    _refused(bp.begin_blocks(net, {"2": 1}), "reads it in a backward", schedule=schedule)


class Left(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.calls, self.alpha = nn.Linear(4, 4), nn.Linear(4, 4), 0, 0

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            self.alpha = self.calls // 6
            self.calls += 1
            return self.b(h)


def test_what_follows_from_a_count_when_a_hook_of_the_loss_reads_it_is_refused():
    net = Left()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        output = output * 1.0
        output.register_hook(lambda gradient: gradient * (1 + net.alpha))
        return mse_loss(output, target)

    _reset()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="gpipe")
    with pytest.raises(StateError, match=r"changes attribute 'alpha'.* reads it in a backward"):
        pipe.forward_backward(X, target=X, loss_fn=loss)


SCALE = [1.0]


@functools.lru_cache
def scale() -> float:
    return SCALE[0]


class Cached(Left):
    """The first stage has the scale computed anew; where the second one asks, no code runs."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            scale.cache_clear()
            SCALE[0] = h.abs().mean().item()
            scale()
        with bp.Block(stage=1):
            return self.b(h) / scale()


def test_a_result_that_a_cache_keeps_when_another_stage_clears_the_cache_is_refused():
    """Attack 45."""
    _refused(Cached())


class Every:
    """True at each sixth call."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> bool:
        self.count = (self.count + 1) % 6
        return self.count == 0


class Due(nn.Module):
    """Its second stage uses now and then what the first one sets, in a branch that it opens for a
    later forward."""

    def __init__(self, use: Callable[["Due", Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.use = nn.Linear(4, 4), nn.Linear(4, 4), use
        self.calls, self.seen, self.scale = 0, 0, 1.0
        self.due, self.pending, self.phase = False, None, "rest"
        self.flags, self.every = {"due": False}, Every()
        self.register_buffer("turn", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.calls += 1
            self.scale = 1 + self.calls / 10
        with bp.Block(stage=1):
            return self.b(self.use(self, h))


def _by_flag(net: Due, h: Tensor) -> Tensor:
    if net.due:
        h = h * net.scale
    net.seen += 1
    net.due = net.seen % 6 == 5
    return h


def _by_pending(net: Due, h: Tensor) -> Tensor:
    if net.pending is not None:
        h, net.pending = h * net.scale, None
    net.seen += 1
    if net.seen % 6 == 5:
        net.pending = "scale"
    return h


def _by_phase(net: Due, h: Tensor) -> Tensor:
    net.seen += 1
    if net.phase == "scale":
        h, net.phase = h * net.scale, "rest"
    elif net.seen % 6 == 5:
        net.phase = "scale"
    return h


def _by_entry(net: Due, h: Tensor) -> Tensor:
    if net.flags["due"]:
        h = h * net.scale
    net.seen += 1
    net.flags["due"] = net.seen % 6 == 5
    return h


def _by_buffer(net: Due, h: Tensor) -> Tensor:
    turn = int(net.turn)
    net.turn.fill_((turn + 1) % 6)
    return h * net.scale if turn == 5 else h


def _by_trigger(net: Due, h: Tensor) -> Tensor:
    return h * net.scale if net.every() else h


def _marked(net: Due) -> None:
    net.seen += 1
    net.due = net.seen % 6 == 5


def _scaled_if_due(net: Due, h: Tensor) -> Tensor:
    return h * net.scale if net.due else h


def _by_others(net: Due, h: Tensor) -> Tensor:
    h = _scaled_if_due(net, h)
    _marked(net)  # when the function that asks is over
    return h


OPENED = [_by_flag, _by_pending, _by_phase, _by_entry, _by_buffer, _by_trigger, _by_others]


@pytest.mark.parametrize("use", OPENED)
def test_a_branch_that_an_earlier_forward_opens_counts(use: Callable[[Due, Tensor], Tensor]):
    """Attack 45: nothing that decides it had changed while the model was recorded."""
    _refused(Due(use))


class CachedAlone(Left):
    """One stage alone uses a cache, which was filled before."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            self.calls += 1
            y = self.b(h) * scale()
            if self.calls % 3 == 2:
                scale.cache_clear()
                SCALE[0] = 1 + self.calls / 10
                scale()
            return y


@pytest.mark.parametrize("schedule", ["1f1b", "sequential"])
def test_what_a_cache_keeps_is_as_before_a_recording(schedule: str):
    """Attack 45: it kept what the recording had computed anew, for the same key."""
    net = CachedAlone()
    plain = copy.deepcopy(net)
    losses = []
    for model in (plain, net):
        scale.cache_clear()
        SCALE[0] = 1.0
        scale()
        if model is plain:
            found = [plain_step(plain, (X,), {}, X, mse_loss, 4) for _ in range(3)]
        else:
            pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
            found = [pipe.forward_backward(X, target=X, loss_fn=mse_loss).loss for _ in range(3)]
        losses.append([loss.cpu() for loss in found])
    assert_close(*losses)


class Own(Left):
    """What one stage alone sets and reads is its own, whatever it follows from."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.alpha = 1 + self.calls // 6
            self.calls += 1
            h = self.a(x) * self.alpha
        with bp.Block(stage=1):
            return self.b(h)


def test_what_follows_from_a_count_when_one_stage_uses_it_is_the_plain_loops():
    net = Own()
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    for _ in range(3):
        plain.zero_grad()
        pipe.zero_grad()
        plain_step(plain, (X,), {}, X, mse_loss, 4)
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)
        assert_same_gradients(net, plain)
    assert net.calls == plain.calls == 12
