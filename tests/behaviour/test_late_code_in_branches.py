"""What a branch that was not taken, or a loss, hands to autograd: hooks, custom functions, hooks on
saved tensors and checkpoints. It runs in a backward, when later forwards have come."""

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import stages

X, Y = torch.linspace(0, 0.4, 32).view(8, 4), torch.ones(8, 4)
STATE = types.SimpleNamespace(scale=1.0)


@pytest.fixture(autouse=True)
def _state() -> None:
    STATE.scale = 1.0


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return gradient * STATE.scale


class Multiplied(torch.autograd.Function):
    """Keeps what it needs in its context: each application has its own."""

    @staticmethod
    def forward(context: Any, x: Tensor, by: float) -> Tensor:
        context.by = by
        return x * by

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return gradient * context.by, None


def scale(gradient: Tensor) -> Tensor:
    return gradient * STATE.scale


def scale_by(state: Any, gradient: Tensor) -> Tensor:
    return gradient * state.scale


def with_lambda(h: Tensor) -> Tensor:
    h.register_hook(lambda g: g * STATE.scale)
    return h


def with_inner(h: Tensor) -> Tensor:
    def hook(gradient: Tensor) -> Tensor:
        return sum((gradient * factor for factor in [STATE.scale]), torch.zeros(()))

    h.register_hook(hook)
    return h


def with_keyword(h: Tensor) -> Tensor:
    h.register_hook(hook=scale)
    return h


def with_partial(h: Tensor) -> Tensor:
    h.register_hook(functools.partial(scale_by, STATE))
    return h


def with_node(h: Tensor) -> Tensor:
    assert h.grad_fn is not None
    h.grad_fn.register_prehook(lambda gradients: (gradients[0] * STATE.scale,))
    return h


def with_several(h: Tensor) -> Tensor:
    h = h * 2
    register_multi_grad_hook([h], lambda gradients: scale(h))
    return h


def with_custom(h: Tensor) -> Tensor:
    return Scaled.apply(h)  # type: ignore[no-any-return]


apply = Scaled.apply


def with_alias(h: Tensor) -> Tensor:
    return apply(h)  # type: ignore[no-any-return]


def with_custom_in_checkpoint(h: Tensor) -> Tensor:
    return checkpoint(Scaled.apply, h, use_reentrant=False)  # type: ignore[no-any-return]


def with_unpacking(h: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: t, lambda t: t * STATE.scale):
        return h * h


def with_context(h: Tensor) -> Tensor:
    return Multiplied.apply(h, STATE.scale)  # type: ignore[no-any-return]


def with_checkpoint(h: Tensor) -> Tensor:
    def body(h: Tensor) -> Tensor:
        return h.tanh() * STATE.scale

    return checkpoint(body, h, use_reentrant=False)  # type: ignore[no-any-return]


def made_by(state: Any) -> Callable[[Tensor], Tensor]:
    def hook(gradient: Tensor) -> Tensor:
        return gradient * state.scale

    return hook


def with_factory(h: Tensor) -> Tensor:
    h.register_hook(made_by(STATE))
    return h


def with_variable(h: Tensor) -> Tensor:
    hook = lambda g: g * STATE.scale  # noqa: E731 - as users write it
    h.register_hook(hook)
    return h


def attach(h: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    if h.requires_grad:
        h.register_hook(hook)
    return h


def with_helper(h: Tensor) -> Tensor:
    return attach(h, lambda g: g * STATE.scale)


class Damper:
    def __init__(self, state: Any) -> None:
        self.state = state

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient * self.state.scale  # type: ignore[no-any-return]


def with_object(h: Tensor) -> Tensor:
    h.register_hook(Damper(STATE))
    return h


def with_choice(h: Tensor) -> Tensor:
    hook = scale if h.requires_grad else None
    if hook is not None:
        h.register_hook(hook)
    return h


def with_node_of_factory(h: Tensor) -> Tensor:
    def make() -> Callable[[Any], Any]:
        return lambda gradients: (gradients[0] * STATE.scale,)

    h = h * 1
    assert h.grad_fn is not None
    h.grad_fn.register_prehook(make())
    return h


class Called(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, by: Callable[[], float]) -> Tensor:
        context.by = by
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return gradient * context.by(), None


def with_callable(h: Tensor) -> Tensor:
    return Called.apply(h, lambda: STATE.scale)  # type: ignore[no-any-return]


class Reversal(nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def forward(self, h: Tensor) -> Tensor:
        return Called.apply(h, self.read)  # type: ignore[no-any-return]

    def read(self) -> float:
        return -self.state.scale  # type: ignore[no-any-return]


def with_new_module(h: Tensor) -> Tensor:
    return Reversal(STATE)(h)  # type: ignore[no-any-return]


class Unpacking(saved_tensors_hooks):
    def __init__(self) -> None:
        super().__init__(lambda t: t, lambda t: t * STATE.scale)


def with_subclass(h: Tensor) -> Tensor:
    with Unpacking():
        return h * h


LATE = [
    *(with_factory, with_variable, with_helper, with_object, with_choice, with_node_of_factory),
    *(with_callable, with_new_module, with_subclass),
    *(with_lambda, with_inner, with_keyword, with_partial, with_node, with_several, with_custom),
    *(with_alias, with_custom_in_checkpoint, with_unpacking),
]


class Branching(nn.Module):
    """Counts on its last stage, and hands something to autograd there if the data say so."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            STATE.scale += 1.0
            if float(x.detach().max()) > 0.5:
                h = self.changed(h)
            return self.b(h)

    def changed(self, h: Tensor) -> Tensor:
        raise NotImplementedError


def branching(hand_over: Callable[[Tensor], Tensor]) -> nn.Module:
    class Model(Branching):
        def changed(self, h: Tensor) -> Tensor:
            return hand_over(h)

    return Model()


@pytest.mark.parametrize("hand_over", LATE)
def test_what_a_branch_hands_to_autograd_reads_what_each_forward_sets(
    hand_over: Callable[[Tensor], Tensor],
) -> None:
    pipe = bp.Pipeline(branching(hand_over), devices=stages(2), chunks=4, schedule="gpipe")
    with pytest.raises(StateError, match="'scale' of a SimpleNamespace .* reads it in a backward"):
        pipe.forward_backward(X, target=Y, loss_fn=mse_loss)


def assert_exact(make: Callable[[], nn.Module], loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Compare all steps with those of the plain loop, which begin with the same state."""
    net, plain = make(), make()
    plain.load_state_dict(net.state_dict())
    batches = [X, X + 0.4, X]  # the second one's larger samples take the branch
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="gpipe")
    for x in batches:
        pipe.forward_backward(x, target=Y, loss_fn=loss)
    STATE.scale = 1.0
    for x in batches:
        plain_step(plain, (x,), {}, Y, loss, 4)
    assert_same_gradients(net, plain)


CONTEXTS = [with_context, lambda h: Multiplied.apply(h, 2.0)]


@pytest.mark.parametrize("hand_over", CONTEXTS)
def test_a_custom_functions_context_is_its_own(hand_over: Callable[[Tensor], Tensor]) -> None:
    assert_exact(functools.partial(branching, hand_over), mse_loss)


class OnModule(Branching):
    """A module that only the branch calls has a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(4, 4)
        self.c.register_full_backward_hook(lambda m, into, out: (scale(into[0]),))

    def changed(self, h: Tensor) -> Tensor:
        return self.c(h)  # type: ignore[no-any-return]


class OnParameter(Branching):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(4, 4)
        self.c.weight.register_hook(scale)

    def changed(self, h: Tensor) -> Tensor:
        return self.c(h)  # type: ignore[no-any-return]


class Writing(nn.Module):
    """A hook that only the branch registers writes what each forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def note(self, gradient: Tensor) -> None:
        self.seen += gradient.abs().sum()

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            h = h * (1 + self.seen.clone())
            if float(x.detach().max()) > 0.5:
                h.register_hook(self.note)
            return self.b(h)


@pytest.mark.parametrize("kind", [OnModule, OnParameter, Writing])
def test_hooks_of_what_only_a_branch_calls(kind: type[nn.Module]) -> None:
    pipe = bp.Pipeline(kind(), devices=stages(2), chunks=4, schedule="gpipe")
    with pytest.raises(StateError, match="in a backward on hops \\[1\\]|'seen'"):
        pipe.forward_backward(X, target=Y, loss_fn=mse_loss)


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), bp.BeginBlock(nn.Linear(4, 4), stage=1))


@pytest.mark.parametrize("hand_over", [*LATE, with_checkpoint])
def test_what_a_loss_hands_to_autograd(hand_over: Callable[[Tensor], Tensor]) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        STATE.scale += 1.0
        return mse_loss(hand_over(output), target)

    pipe = bp.Pipeline(plain_model(), devices=stages(2), chunks=4, schedule="gpipe")
    with pytest.raises(StateError, match="'scale' of a SimpleNamespace .* reads it in a backward"):
        pipe.forward_backward(X, target=Y, loss_fn=loss)


@pytest.mark.parametrize("hand_over", CONTEXTS)
def test_a_context_in_a_loss_is_its_own(hand_over: Callable[[Tensor], Tensor]) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        STATE.scale += 1.0
        return mse_loss(hand_over(output), target)

    assert_exact(plain_model, loss)
