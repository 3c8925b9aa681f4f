"""What users change between steps of a pipeline over processes; here it is one with two stages."""

import contextvars
import copy
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.distributed import DistributedPipeline, engines
from blockpipe.errors import RouteError, UsageError

from ..ranks import NEEDS_SCHEDULES

pytestmark = [
    pytest.mark.cpu("the processes have no simulated accelerator"),
    NEEDS_SCHEDULES,
]

FACTOR = 1.0
DIVISOR = 1.0


def divisor() -> float:
    """Reads another global of this file than the model does."""
    return DIVISOR


class Settings:
    """An object of the user's."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale, self.limit = scale, 1.0


def by_pattern(settings: Settings) -> float:
    """Reads an attribute that it names in a pattern alone."""
    match settings:
        case Settings(limit=2.0):
            return 2.0
    return 1.0


class Inner(nn.Module):
    """Stays on one stage, and reads what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.temperature, self.calls = nn.Linear(4, 4), 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * self.temperature


class Model(nn.Module):
    """Reads all kinds of values between its modules."""

    bias = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.second = nn.Linear(4, 4), Inner(), nn.Linear(4, 4)
        self.scale, self.skips, self.step, self.act = 1.0, True, 0, torch.tanh
        self.shift = torch.ones(4)
        self.table, self.order, self.settings = {"scale": 1.0}, [1.0], Settings()
        self.register_buffer("mask", torch.ones(4))
        self.power = torch.tensor(1.0)
        self.optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            x = x * (self.power + 1).item() / divisor() * self.optimizer.param_groups[0]["lr"]
            x = x * by_pattern(self.settings)
            h = self.act(self.first(x)) * self.scale * self.table["scale"] + self.shift
            if self.step >= 2:
                h = h * 3
        with bp.Block(stage=1):
            y = self.second(self.inner(h)) * self.settings.scale * FACTOR + self.bias
            return (y + h if self.skips else y) * self.order[0] * self.mask


@pytest.fixture(autouse=True)
def _process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pipe_of(model: nn.Module) -> DistributedPipeline:
    """Two stages in this process."""
    return DistributedPipeline(
        model, sample=torch.ones(4, 4), device="cpu", chunks=2, schedule="looped-bfs"
    )


def assert_like_plain(pipe: DistributedPipeline, plain: nn.Module) -> None:
    """A step gives the loss and the gradients of the plain model."""
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    pipe.module.zero_grad()
    plain.zero_grad()
    found = pipe.forward_backward(x, target=y, loss_fn=mse_loss).loss
    loss = mse_loss(plain(x), y)
    loss.backward()
    torch.testing.assert_close(found.as_subclass(Tensor), loss.detach())
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in pipe.module.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-6)


def _times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda h: h * factor


def _doubles(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def _sets_global(_: nn.Module) -> None:
    global FACTOR
    FACTOR = 2.0


def _sets_global_of_a_function(_: nn.Module) -> None:
    global DIVISOR
    DIVISOR = 2.0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda m: setattr(m, "scale", 2.0),
    "flag": lambda m: setattr(m, "skips", False),
    "number that is compared": lambda m: setattr(m, "step", 2),
    "function": lambda m: setattr(m, "act", torch.relu),
    "tensor": lambda m: setattr(m, "shift", torch.full((4,), 2.0)),
    "tensor's value": lambda m: m.shift.fill_(3.0),
    "entry": lambda m: m.table.update(scale=2.0),
    "element": lambda m: m.order.__setitem__(0, 2.0),
    "object": lambda m: setattr(m.settings, "scale", 2.0),
    "attribute of a pattern": lambda m: setattr(m.settings, "limit", 2.0),
    "another dictionary": lambda m: setattr(m, "table", {"scale": 2.0}),
    "another list": lambda m: setattr(m, "order", [2.0]),
    "a member more": lambda m: m.order.insert(0, 2.0),
    "another object": lambda m: setattr(m, "settings", Settings(2.0)),
    "closure": lambda m: setattr(m, "act", _times(2.0)),
    "class": lambda m: setattr(Model, "bias", 1.0),
    "global": _sets_global,
    "global of a function": _sets_global_of_a_function,
    "number in a tensor": lambda m: m.power.fill_(2.0),
    "number in a tensor, unseen": lambda m: m.power.data.fill_(2.0),
    "learning rate": lambda m: m.optimizer.param_groups[0].update(lr=2.0),
    "hook": lambda m: m.register_forward_hook(_doubles),
    "hook of a layer": lambda m: m.first.register_forward_hook(_doubles),
    "inside of a module": lambda m: setattr(m.inner, "temperature", 2.0),
    "buffer's value": lambda m: m.mask.fill_(2.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_value_when_it_is_changed_between_steps_counts_from_the_next_one_on(
    change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also back again: the tape has what the code between modules read as constants."""
    monkeypatch.setattr(Model, "bias", 0.0)
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    monkeypatch.setitem(globals(), "DIVISOR", 1.0)
    model = Model()
    plain = copy.deepcopy(model)
    pipe = pipe_of(model)
    assert_like_plain(pipe, plain)
    change(model)
    change(plain)
    assert_like_plain(pipe, plain)
    assert_like_plain(pipe, plain)


def test_a_forward_is_recorded_once_for_each_state_of_what_its_code_reads() -> None:
    """Not for what only the inside of a module reads, and not for what the forward sets itself."""
    model = Model()
    plain = copy.deepcopy(model)
    with mock.patch.object(engines, "CutForward", wraps=engines.CutForward) as cut:
        pipe = pipe_of(model)
        for step in range(4):
            for net in (model, plain):
                net.inner.temperature = 1.0 + step
            assert_like_plain(pipe, plain)
        assert cut.call_count == 1
        for scale in (2.0, 1.0, 2.0):
            model.scale = plain.scale = scale
            assert_like_plain(pipe, plain)
        assert cut.call_count <= 3


def test_a_container_that_is_made_anew_with_the_same_content_makes_no_other_recording() -> None:
    """Only the content is on the tape."""
    model = Model()
    plain = copy.deepcopy(model)
    with mock.patch.object(engines, "CutForward", wraps=engines.CutForward) as cut:
        pipe = pipe_of(model)
        for _ in range(3):
            for net in (model, plain):
                net.table, net.order, net.settings = {"scale": 1.0}, [1.0], Settings()
            assert_like_plain(pipe, plain)
        assert cut.call_count == 1


@pytest.mark.parametrize("has_changed", [False, True])
def test_the_closure_of_a_hook_when_it_is_registered_anew_counts(has_changed: bool) -> None:
    """Its code is the same."""
    model = Model()
    plain = copy.deepcopy(model)
    with mock.patch.object(engines, "CutForward", wraps=engines.CutForward) as cut:
        pipe = pipe_of(model)
        handles: list[Any] = []
        for step in range(3):
            scale = _times(1.0 + step * has_changed)
            for handle in handles:
                handle.remove()
            handles = [
                net.second.register_forward_hook(lambda m, args, output, scale=scale: scale(output))
                for net in (model, plain)
            ]
            assert_like_plain(pipe, plain)
        assert cut.call_count == (4 if has_changed else 2)


class Adds(nn.Module):
    """Adds its second argument on the second stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(x)
        with bp.Block(stage=1):
            return self.second(h) + y


@pytest.mark.parametrize("alias", [lambda x: x, lambda x: x[:]])
def test_two_arguments_when_the_sample_had_one_tensor_for_both_are_apart(
    alias: Callable[[Tensor], Tensor],
) -> None:
    """And the other way round, once each."""
    model, x = Adds(), torch.ones(4, 4)
    plain = copy.deepcopy(model)
    with mock.patch.object(engines, "CutForward", wraps=engines.CutForward) as cut:
        pipe = DistributedPipeline(
            model, sample=((x, alias(x)), {}), device="cpu", chunks=2, schedule="looped-bfs"
        )
        for is_one in (False, True, False):
            x = torch.randn(4, 4)
            y = alias(x) if is_one else torch.randn(4, 4)
            found = pipe.forward_backward(x, y, target=y, loss_fn=mse_loss).loss
            torch.testing.assert_close(found.as_subclass(Tensor), mse_loss(plain(x, y), y).detach())
        assert cut.call_count == 2


class Returns(nn.Module):
    """A module of one stage returns a number beside its tensor, which the other one's multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scaled(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h, scale = self.first(x)
        with bp.Block(stage=1):
            return self.second(h) * scale


class Scaled(nn.Linear):
    """Returns a number of its own."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.temperature, self.step = 1.0, 0.0

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        self.temperature += self.step
        return super().forward(x), self.temperature


def test_a_number_that_a_module_returns_when_it_is_set_between_steps_counts() -> None:
    """Code between modules has it as a constant, so that it is recorded anew."""
    model = Returns()
    plain = copy.deepcopy(model)
    pipe = pipe_of(model)
    for step in range(3):
        model.first.temperature = plain.first.temperature = 1.0 + step
        assert_like_plain(pipe, plain)


def test_a_number_that_a_module_returns_when_each_call_has_another_is_refused() -> None:
    """It would be the recorded one in all of them."""
    model = Returns()
    pipe = pipe_of(model)
    model.first.step = 1.0
    x = torch.ones(4, 4)
    with pytest.raises(
        RouteError, match=r"expected \[2.0\] beside the tensors from module 'first'"
    ):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)


def test_a_value_that_is_another_one_in_each_step_is_told_to_be_slow() -> None:
    model = Model()
    pipe = pipe_of(model)
    x = torch.ones(4, 4)

    def train() -> None:
        for step in range(10):
            model.scale = float(step)
            pipe.forward_backward(x, target=x, loss_fn=mse_loss)

    with pytest.warns(UserWarning, match=r"recorded for 8 states .*'scale' of Model"):
        train()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda m: setattr(m, "first", nn.Linear(4, 4)), "expected the modules, parameters and"),
        (lambda m: setattr(m.first, "bias", nn.Parameter(torch.ones(4))), "expected the modules"),
        (lambda m: setattr(m, "mask", torch.ones(4)), r"expected buffer 'mask' .*mask.copy_\(…\)"),
    ],
)
def test_a_module_or_a_tensor_that_is_replaced_is_refused(change: Any, what: str) -> None:
    """An optimizer has the old one, and so have other processes."""
    model = Model()
    pipe = pipe_of(model)
    change(model)
    with pytest.raises(UsageError, match=what):
        pipe.forward_backward(torch.ones(4, 4), target=torch.ones(4, 4), loss_fn=mse_loss)


ALPHA = contextvars.ContextVar("alpha", default=1.0)
LOCAL = threading.local()
LOGGER = logging.getLogger(__name__)


class Surrounded(nn.Module):
    """Reads attributes of tensors, and what is another value in another thread or context."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4))
        self.shift = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(x) * getattr(self.first.weight, "scale", 1.0)
        with bp.Block(stage=1):
            if getattr(self.second.weight, "frozen", False):
                h = h.detach()
            h = h * ALPHA.get() * LOCAL.scale + getattr(self.mask, "scale", 1.0)
            h = h + 1 if LOGGER.isEnabledFor(logging.DEBUG) else h
            return self.second(h) * getattr(self.shift, "scale", 1.0)


SURROUNDINGS: dict[str, Callable[[Any], Any]] = {
    "attribute of a parameter": lambda m: setattr(m.first.weight, "scale", 2.0),
    "flag of a parameter": lambda m: setattr(m.second.weight, "frozen", True),
    "attribute of a buffer": lambda m: setattr(m.mask, "scale", 2.0),
    "attribute of a tensor": lambda m: setattr(m.shift, "scale", 2.0),
    "context variable": lambda m: ALPHA.set(2.0),
    "thread's own": lambda m: setattr(LOCAL, "scale", 2.0),
    "logger": lambda m: LOGGER.setLevel(logging.DEBUG),
}


@pytest.mark.parametrize("change", SURROUNDINGS.values(), ids=SURROUNDINGS)
@pytest.mark.parametrize("later", [False, True])
def test_an_attribute_of_a_tensor_or_a_value_of_this_thread_when_it_is_set_counts(
    change: Callable[[Any], Any], later: bool
) -> None:
    """Before the pipeline is made, where the recording's tensors are others, and between steps."""

    def run() -> None:
        LOCAL.scale = 1.0
        model = Surrounded()
        plain = copy.deepcopy(model)
        pipe = pipe_of(model) if later else None
        if pipe is not None:
            assert_like_plain(pipe, plain)
        for net in (model, plain):
            change(net)
        assert_like_plain(pipe or pipe_of(model), plain)

    try:
        contextvars.copy_context().run(run)
    finally:
        LOGGER.setLevel(logging.NOTSET)
