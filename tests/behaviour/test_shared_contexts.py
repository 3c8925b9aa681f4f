"""torch's context managers as one object for all stages, and thread state that a stage leaves on."""

import contextlib
import copy
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import blockpipe as bp
from blockpipe._common.threads.shared_contexts import SharedContexts
from blockpipe.errors import StateError
from blockpipe.replicas import Replicas

from ..parameter_sets import every_pair
from ..parity import assert_same_gradients, difference, plain_step
from ..stage_devices import assert_close, device_type, stages

WAYS = [
    {"schedule": "1f1b"},
    {"schedule": "gpipe", "checkpoint": "always"},
    {"schedule": "zb-h1"},
    {"schedule": "interleaved"},
    {"schedule": "1f1b", "checkpoint": "always", "isolate": True},
]
STAGES, CHUNKS, STEPS = 4, 16, 3


class _Contexts(SimpleNamespace):
    """One object of each kind, which all stages enter, and a copy of the model too."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Contexts":
        return self


def _contexts() -> _Contexts:
    return _Contexts(
        float32=torch.autocast(device_type(), enabled=False),
        bfloat16=torch.autocast(device_type(), dtype=torch.bfloat16),
        no_grad=torch.no_grad(),
        enable_grad=torch.enable_grad(),
        inference=torch.inference_mode(),
        range=torch.autograd.profiler.record_function("a stage"),
    )


def _longer(x: Tensor) -> Tensor:
    """Operations during which other stages come and go."""
    for _ in range(8):
        x = x * 1
    return x


class Stages(nn.Module):
    """Each stage does the same with contexts that it shares with others; odd ones are inside of
    another context."""

    def __init__(self, use: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(STAGES))
        self.use, self.contexts = use, _contexts()
        self.norm = self.contexts.float32(_norm)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            with bp.Block(stage=i):
                x = self.use(self, i, layer, x)
        return x.float()


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(_longer(x.float()), (8,))


def _own(i: int, context: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return context(*args, **kwargs) if i % 2 else contextlib.nullcontext()


def _decorated(net: Stages, i: int, layer: nn.Module, x: Tensor) -> Tensor:
    with _own(i, torch.autocast, device_type(), dtype=torch.bfloat16):
        return x + layer(net.norm(x)).relu()


def _autocast(net: Stages, i: int, layer: nn.Module, x: Tensor) -> Tensor:
    with _own(i, torch.autocast, device_type(), dtype=torch.bfloat16):
        with net.contexts.float32:
            x = _longer(x.float())
        return x + layer(x).tanh()


def _nested(net: Stages, i: int, layer: nn.Module, x: Tensor) -> Tensor:
    """torch leaves the outer one with what the inner one found."""
    with _own(i, torch.autocast, device_type(), dtype=torch.bfloat16):
        with net.contexts.float32:
            x = net.norm(x)
        return x + layer(x).tanh()


def _statistics(net: Stages, i: int, layer: nn.Module, x: Tensor) -> Tensor:
    with _own(i, torch.no_grad):
        with net.contexts.no_grad:
            mean = _longer(x.abs()).mean()
        mean = layer(mean + x).mean()
    return layer(x) / (1 + mean.abs())


def _gradient(net: Stages, i: int, layer: nn.Module, x: Tensor) -> Tensor:
    with _own(i, torch.no_grad):
        with net.contexts.enable_grad:
            h = _longer(layer(x))
        mean = layer(x).mean()
    return h / (1 + mean.abs())


def _inference(net: Stages, i: int, layer: nn.Module, x: Tensor) -> Tensor:
    with _own(i, torch.no_grad):
        with net.contexts.inference:
            mean = _longer(x.abs()).mean()
        mean = mean + layer(x).mean().detach()
    return layer(x) + mean


def _named(net: Stages, i: int, layer: nn.Module, x: Tensor) -> Tensor:
    with net.contexts.range:
        return _longer(layer(x).tanh())


def _across(net: Stages, i: int, layer: nn.Module, x: Tensor) -> Tensor:
    """The region ends on the next stage."""
    if i % 2 == 0:
        net.contexts.bfloat16.__enter__()
        return layer(x)
    x = layer(x)
    net.contexts.bfloat16.__exit__(None, None, None)
    return layer(x.float())


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, norm: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.norm = norm
        return norm(x) @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        with torch.autocast(device_type(), dtype=torch.bfloat16):
            gradient = ctx.norm(gradient)
            return (gradient @ weight.T).float(), (x.T @ gradient).float(), None


def _custom(net: Stages, i: int, layer: nn.Module, x: Tensor) -> Tensor:
    with _own(i, torch.autocast, device_type(), dtype=torch.bfloat16):
        return x + _InBackward.apply(x, layer.weight, net.norm).float()


USES = [
    _decorated,
    _autocast,
    _nested,
    _statistics,
    _gradient,
    _inference,
    _named,
    _across,
    _custom,
]


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


@every_pair(use=USES, options=WAYS)
def test_a_context_that_all_stages_enter_is_each_ones_own(use, options):
    """Stages set back what others had found: autocast and grad mode of the wrong stage."""
    net = Stages(use)
    plain = copy.deepcopy(net)
    x, y = torch.randn(64, 8), torch.randn(64, 8)
    loss_fn = net.contexts.float32(_loss)
    pipe = bp.Pipeline(net, devices=stages(STAGES), chunks=CHUNKS, **options)
    for _ in range(STEPS):
        loss = pipe.forward_backward(x, target=y, loss_fn=loss_fn).loss
        plain_loss = plain_step(plain, (x,), {}, y, loss_fn, CHUNKS)
        assert difference(net, plain, loss, plain_loss).same
    assert not torch.is_autocast_enabled(device_type())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("use", USES)
def test_such_a_context_when_the_backward_is_the_callers(use):
    net = Stages(use)
    plain = copy.deepcopy(net).to(stages(1)[0])
    x, y = torch.randn(64, 8), torch.randn(64, 8)
    pipe = bp.Pipeline(net, devices=stages(STAGES), chunks=CHUNKS)
    for _ in range(STEPS):
        outputs = pipe(x)
        loss = F.mse_loss(outputs, y.to(outputs.device))
        loss.backward()
        parts = torch.cat([plain(part.to(stages(1)[0])) for part in x.chunk(CHUNKS)])
        plain_loss = F.mse_loss(parts, y.to(parts.device))
        plain_loss.backward()
        assert_same_gradients(net, plain)
        assert_close(loss, plain_loss)


@pytest.mark.filterwarnings("ignore:chunks=1 on")
def test_such_a_context_when_copies_run_beside_each_other():
    """Each copy has one micro-batch, and runs it in its own thread."""
    net = Stages(_decorated)
    plain = copy.deepcopy(net)
    many = Replicas(net, [stages(2 * STAGES)[at::2] for at in range(2)], chunks=1)
    x, y = torch.randn(64, 8), torch.randn(64, 8)
    for _ in range(4 * STEPS):
        many.forward_backward(x, target=y, loss_fn=F.mse_loss)
        plain_step(plain, (x,), {}, y, F.mse_loss, 2)
        assert_same_gradients(net, plain)


def test_a_context_when_the_caller_has_it_entered_is_left_as_it_was_entered():
    """Stages inside of autocast leave their own there, where the caller would have found it."""
    net = Stages(_autocast)
    pipe = bp.Pipeline(net, devices=stages(STAGES), chunks=CHUNKS)
    x, y = torch.randn(64, 8), torch.randn(64, 8)
    pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)  # the first one is in its thread
    for _ in range(STEPS):
        with net.contexts.float32:
            pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
        assert not torch.is_autocast_enabled(device_type())


def test_contexts_of_torch_are_as_they_were_after_a_step():
    with SharedContexts(), torch.no_grad() as _:
        assert "prev" in vars(torch.no_grad)
    assert "prev" not in vars(torch.no_grad)
    assert "_inference_mode_context" not in vars(torch.inference_mode)
    assert torch.is_grad_enabled()


def test_a_context_that_is_entered_before_a_step_and_left_in_it():
    before, after = torch.no_grad(), torch.no_grad()
    before.__enter__()
    with SharedContexts():
        before.__exit__(None, None, None)
        assert torch.is_grad_enabled()
        after.__enter__()
    after.__exit__(None, None, None)
    assert torch.is_grad_enabled()


# --- what the user's code leaves on


class _Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.linear else result


def _leaves_autocast() -> None:
    torch.autocast(device_type(), dtype=torch.bfloat16).__enter__()


def _leaves_autocast_set() -> None:
    torch.set_autocast_enabled(device_type(), True)


def _leaves_grad_off() -> None:
    torch.set_grad_enabled(False)


def _leaves_inference_mode() -> None:
    guard = torch._C._InferenceMode(True)
    guard.__enter__()
    _kept.append(guard)


def _leaves_a_mode() -> None:
    _Doubling().__enter__()


def _leaves_a_device() -> None:
    torch.set_default_device("meta")


def _leaves_hooks() -> None:
    torch.autograd.graph.saved_tensors_hooks(_doubled, _doubled).__enter__()


def _doubled(tensor: Tensor) -> Tensor:
    return tensor * 2


_kept: list[Any] = []  # a guard that is deleted is left, by the thread that deletes it


def _step_of_a_model_that(leave: Callable[[], None]) -> None:
    """Run a step whose stages leave something on in their threads, and not in the caller's, where
    the recording runs."""

    def use(net: Stages, i: int, layer: nn.Module, x: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            leave()
        return layer(x)

    pipe = bp.Pipeline(Stages(use), devices=stages(STAGES), chunks=4)
    with contextlib.suppress(Exception):  # it may be that nothing has a gradient
        pipe.forward_backward(torch.randn(16, 8), target=torch.randn(16, 8), loss_fn=F.mse_loss)


def _steps_are_those_of_the_plain_loop(use: Callable[..., Tensor], **options: Any) -> None:
    net = Stages(use)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(STAGES), chunks=4, **options)
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    for _ in range(3):
        loss = pipe.forward_backward(x, target=y, loss_fn=F.mse_loss).loss
        torch.set_autocast_enabled(device_type(), False)
        plain_loss = plain_step(plain, (x,), {}, y, F.mse_loss, 4)
        torch.set_autocast_enabled(device_type(), False)
        assert difference(net, plain, loss, plain_loss).same
        for model in (net, plain):
            torch.optim.SGD(model.parameters(), 0.5).step()
            model.zero_grad()


LEAVES = [
    _leaves_autocast,
    _leaves_autocast_set,
    _leaves_grad_off,
    _leaves_inference_mode,
    _leaves_a_mode,
    _leaves_a_device,
    _leaves_hooks,
]


@pytest.mark.parametrize("leave", LEAVES)
def test_what_a_stage_leaves_on_in_a_thread_is_off_in_later_steps(leave):
    """Threads are the process's: another model's stages ran in bfloat16, and for good."""
    _step_of_a_model_that(leave)
    _steps_are_those_of_the_plain_loop(
        lambda net, i, layer, x: layer(x).tanh() * torch.ones(8).to(x.device)
    )
    thread = threading.Thread(target=_kept.clear)
    thread.start()
    thread.join()


def test_autocast_that_a_stage_leaves_entered_keeps_no_weights_of_the_step_before():
    """A thread that had left autocast once too seldom never forgot the weights that it had cast."""
    _step_of_a_model_that(_leaves_autocast)
    _steps_are_those_of_the_plain_loop(_decorated)


def test_the_dtype_of_the_callers_autocast_is_that_of_the_stages_own():
    """It is set, and autocast is off: a stage that turns it on without a dtype has it."""

    def use(net: Stages, i: int, layer: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(device_type()):
            return layer(x)

    dtype = torch.get_autocast_dtype(device_type())
    torch.set_autocast_dtype(device_type(), torch.float16)
    try:
        _steps_are_those_of_the_plain_loop(use)
    finally:
        torch.set_autocast_dtype(device_type(), dtype)


def test_a_forward_that_leaves_autocast_on_is_refused_where_micro_batches_overlap():
    """In the plain loop the next micro-batch begins with it: here it was on by chance."""

    def use(net: Stages, i: int, layer: nn.Module, x: Tensor) -> Tensor:
        x = layer(x)
        if i == STAGES - 1:
            torch.set_autocast_enabled(device_type(), True)
        return x

    x, y = torch.randn(16, 8), torch.randn(16, 8)
    pipe = bp.Pipeline(Stages(use), devices=stages(STAGES), chunks=4)
    text = r"changes autocast, and leaves it so on hops \[0, 1, 2, 3\].*enter it by 'with', or use sche"
    with pytest.raises(StateError, match=text):
        pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
    assert not torch.is_autocast_enabled(device_type())
    _steps_are_those_of_the_plain_loop(use, schedule="sequential")
