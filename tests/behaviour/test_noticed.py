"""What a recording has not seen is noticed by the steps after it: recorded anew, or an error."""

import contextlib
import copy
import functools
import io
import logging
import os
import sys
import types
import warnings
from array import array
from types import MethodType
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import blockpipe as bp
from blockpipe.errors import RecordingError, StateError
from blockpipe.restoring import process_state

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages

LANES = ["1f1b", "gpipe"]


def _net(*middle: nn.Module) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(8, 8), *middle, nn.Linear(8, 4))
    bp.begin_blocks(net, {str(len(net) - 1): 1})
    return net


def _pipe(net: nn.Module, **options: object) -> bp.Pipeline:
    return bp.Pipeline(net, devices=stages(2), chunks=4, **options)


def _output(pipe: bp.Pipeline, x: Tensor) -> Tensor:
    with torch.no_grad():
        return pipe(x)


# --- code


def _patched_instance(net: nn.Sequential) -> None:
    old = net[1].forward
    net[1].forward = lambda h: old(h) * 3


def _other_class(net: nn.Sequential) -> None:
    class Tripled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 3

    net[1].__class__ = Tripled


def _patched_method(net: nn.Sequential) -> None:
    net[1].forward = MethodType(lambda self, h: nn.Linear.forward(self, h) * 3, net[1])


@pytest.mark.parametrize("schedule", [*LANES, "sequential"])
@pytest.mark.parametrize("change", [_patched_instance, _other_class, _patched_method])
def test_a_forward_that_is_replaced_after_a_step_runs(change, schedule):
    """The old one went on running: the doors had captured it."""
    net, x = _net(), torch.randn(8, 8)
    pipe = _pipe(net, schedule=schedule)
    before = _output(pipe, x)
    change(net)
    assert_close(_output(pipe, x), 3 * before)


def test_a_patch_of_a_class_runs(monkeypatch):
    class Own(nn.Linear):
        pass

    net, x = _net(Own(8, 8)), torch.randn(8, 8)
    pipe = _pipe(net)
    before = _output(pipe, x)
    forward = nn.Linear.forward
    monkeypatch.setattr(Own, "forward", lambda self, h: 0 * forward(self, h))
    assert not torch.equal(_output(pipe, x), before)


def test_marks_that_are_changed_after_a_step_count():
    net, x = _net(nn.ReLU(), nn.Linear(8, 8)), torch.randn(8, 8)
    pipe = _pipe(net)
    _output(pipe, x)
    assert pipe.recording.parameters[2].stage == 0
    bp.remove_blocks(net)
    bp.begin_blocks(net, {"2": 1})
    _output(pipe, x)
    assert pipe.recording.parameters[2].stage == 1


def test_a_patch_that_comes_back_needs_no_third_way():
    net, x = _net(), torch.randn(8, 8)
    pipe = _pipe(net)
    before = _output(pipe, x)
    _patched_instance(net)
    _output(pipe, x)
    del net[1].forward
    assert_close(_output(pipe, x), before)


# --- switches


class Switched(nn.Module):
    """A detached side input of the last stage, which a switch turns on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), Reads(8, 4)
        self.b.parent = [self]
        self.skip: Tensor | None = None
        self.with_skip = False

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.skip = h.detach()
        with bp.Block(stage=1):
            return self.b(h)


class Reads(nn.Linear):
    def forward(self, h: Tensor) -> Tensor:
        (parent,) = self.parent
        return super().forward(h + parent.skip if parent.with_skip else h)


@pytest.mark.parametrize("schedule", LANES)
def test_a_switch_that_is_turned_is_recorded_anew(schedule):
    """A sealed module began to read what the stage before leaves for each micro-batch: a race. Now
    it is the right micro-batch's, or an error."""
    model, x, y = Switched(), torch.randn(8, 8), torch.randn(8, 4)
    pipe = _pipe(model, schedule=schedule)
    loss_fn = nn.functional.mse_loss
    pipe.forward_backward(x, target=y, loss_fn=loss_fn)
    model.with_skip = True
    plain = Switched()
    plain.load_state_dict(model.state_dict())
    plain.with_skip = True
    loss = plain_step(plain, (x,), {}, y, loss_fn, 4)
    for _ in range(3):
        model.zero_grad()
        try:
            result = pipe.forward_backward(x, target=y, loss_fn=loss_fn)
        except StateError as error:
            assert "belongs to micro-batch" in str(error)
            continue
        assert_close(result.loss, loss)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(one.grad, other.grad)


def test_dropout_that_is_turned_up_while_another_stage_draws_takes_turns_at_once():
    """From run to run the numbers differed."""

    def run() -> Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 4)
        )
        bp.begin_blocks(net, {"2": 1})
        pipe = _pipe(net, schedule="gpipe")
        pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)
        net[3].p = 0.5
        for _ in range(3):
            result = pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)
        assert pipe.recording.hops[1].draws
        return result.loss

    losses = {float(run()) for _ in range(3)}
    assert len(losses) == 1


# --- writes


class Averages(nn.Module):
    """``k`` follows ``q`` on stage 0, every so many forwards, and is read on both stages."""

    def __init__(self, how: str, every: int) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.how, self.every, self.calls = how, every, [0]

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            if self.calls[0] % self.every == self.every - 1:
                with torch.no_grad():
                    if self.how == "in place":
                        self.k.weight.lerp_(self.q.weight, 0.1)
                    else:
                        self.k.weight.data = 0.9 * self.k.weight + 0.1 * self.q.weight
            self.calls[0] += 1
            h = self.q(x) * self.k(x)
        with bp.Block(stage=1):
            return self.k(h)


@pytest.mark.parametrize("how", ["in place", "data"])
def test_a_parameter_that_is_written_and_read_on_several_stages_is_refused(how):
    pipe = _pipe(Averages(how, 1))
    with pytest.raises(StateError, match=r"parameter 'k.weight' is written .* hops \[0, 1\]"):
        pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)


@pytest.mark.cpu("the write races with a copy, as it would on any accelerator, before it is found")
@pytest.mark.parametrize("how", ["in place", "data"])
def test_a_parameter_that_is_written_later_is_found_by_that_step(how):
    """Silently each micro-batch had what the others had made of it."""
    pipe = _pipe(Averages(how, 6))
    pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)
    with pytest.raises(
        StateError, match=r"'k.weight'.* was written (during the step|in place, there or)"
    ):
        pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)


class Codebook(nn.Module):
    """Is revived every sixth forward, on stage 0, and read on both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("book", torch.ones(8))
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x) + self.book
            self.calls[0] += 1
            if self.calls[0] % 6 == 0:
                self.book.mul_(0.5)
        with bp.Block(stage=1):
            return self.b(h + self.book)


@pytest.mark.cpu("the write races with a copy, as it would on any accelerator, before it is found")
@pytest.mark.parametrize("isolate", [False, True])
def test_a_buffer_that_is_written_later_is_found_by_that_step(isolate):
    pipe = _pipe(Codebook(), isolate=isolate)
    pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)
    with pytest.raises(
        StateError, match=r"'book'.* was written (during the step|in place, there or)"
    ):
        pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)


# --- what two lanes share


class Masks(nn.Module):
    """Keeps state within its own call."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.mask = (x.detach() > 0).float()
        return self.f(x) * self.mask


class _CallsTwice(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.s, self.out = shared, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            x = self.s(x)
        with bp.Block(stage=1):
            return self.out(self.s(x))


def test_state_within_a_call_of_a_module_that_two_stages_call_is_refused():
    """20 of 36 steps were wrong: each stage wrote its mask over the other's."""
    with pytest.raises(StateError, match=r"changes s\.mask, and calls 's' on hops \[0, 1\]"):
        _pipe(_CallsTwice(Masks())).forward_backward(torch.ones(8, 8), loss_fn=torch.sum)
    model, x, y = _CallsTwice(Masks()), torch.randn(8, 8), torch.randn(8, 4)
    result = _pipe(model, schedule="sequential").forward_backward(
        x, target=y, loss_fn=nn.functional.mse_loss
    )
    assert_close(result.loss, plain_step(model, (x,), {}, y, nn.functional.mse_loss, 4))


def test_a_module_that_two_stages_call_and_that_keeps_nothing_is_fine():
    _pipe(_CallsTwice(nn.Linear(8, 8))).forward_backward(torch.ones(8, 8), loss_fn=torch.sum)


class _Changes(nn.Module):
    """Two layers, and what a subclass does with them on two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)


class _SwapsParameters(_Changes):
    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            x = functional_call(self.a, {k: v * 0.9 for k, v in self.a.named_parameters()}, x)
        with bp.Block(stage=1):
            return self.b(self.a(x))


class _SwapsWhatIsReadElsewhere(_Changes):
    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            x = functional_call(self.a, {"weight": self.b.weight}, x)
        with bp.Block(stage=1):
            return self.b(x) @ self.a.weight


class _FreezesForAWhile(_Changes):
    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.b.requires_grad_(False)
            x = self.b(self.a(x))
            self.b.weight.requires_grad = True
            self.b.bias.requires_grad = True
        with bp.Block(stage=1):
            return self.b(x)


class _SetsAnAttributeForAWhile(_Changes):
    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.a.eval()
            x = self.a(x)
            self.a.train()
        with bp.Block(stage=1):
            return self.b(self.a(x))


class _ChoosesKernels(_Changes):
    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            q = self.a(x)[:, None]
        with bp.Block(stage=1), sdpa_kernel(SDPBackend.MATH):
            return self.b(nn.functional.scaled_dot_product_attention(q, q, q)[:, 0])


class _IsDeterministicForAWhile(_Changes):
    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            before = torch.are_deterministic_algorithms_enabled()
            torch.use_deterministic_algorithms(True)
            x = self.a(x)
            torch.use_deterministic_algorithms(before)
        with bp.Block(stage=1):
            return self.b(x)


CHANGES = [
    (_SwapsParameters, r"changes a\.bias, and calls 'a' on hops \[0, 1\]"),
    (_SwapsWhatIsReadElsewhere, r"changes a\.weight, and calls 'a' on hops \[0, 1\]"),
    (_FreezesForAWhile, r"changes b\.\w+\.requires_grad, and reads 'b\.\w+' on hops \[0, 1\]"),
    (_SetsAnAttributeForAWhile, r"changes a\.training, and calls 'a' on hops \[0, 1\]"),
    (_ChoosesKernels, r"changes torch\..*sdp_enabled\(\), and runs under it on hops \[1\]"),
    (_IsDeterministicForAWhile, r"changes torch\.are_deterministic.* under it on hops \[0\]"),
]


@pytest.mark.parametrize(
    ("model", "what"), CHANGES, ids=lambda value: getattr(value, "__name__", "")
)
def test_what_is_changed_for_a_while_and_seen_by_several_stages_is_refused(
    model: type[nn.Module], what: str
):
    """Attack 1.7: put back before the forward ends, it left nothing to find afterwards."""
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    with pytest.raises(StateError, match=what + r".*test_noticed\.py:\d+\).*sequential"):
        _pipe(model()).forward_backward(x, target=y, loss_fn=nn.functional.mse_loss)
    net = model()
    plain = copy.deepcopy(net)
    loss = plain_step(plain, (x,), {}, y, nn.functional.mse_loss, 4)
    result = _pipe(net, schedule="sequential").forward_backward(
        x, target=y, loss_fn=nn.functional.mse_loss
    )
    assert_close(result.loss, loss)
    assert_same_gradients(net, plain)
    assert any(line.startswith("the forward changes") for line in _pipe(net).summary(x).notes)


def test_what_is_changed_on_one_stage_only_is_fine():
    class Meta(_Changes):
        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=0):
                x = functional_call(self.a, {k: v * 0.9 for k, v in self.a.named_parameters()}, x)
                self.a.requires_grad_(False)
                x = self.a(x)
                self.a.requires_grad_(True)
            with bp.Block(stage=1):
                return self.b(x)

    _pipe(Meta()).forward_backward(torch.ones(8, 8), loss_fn=torch.sum)


# --- what the user's own code shares


SCALE = [1.0]
LIMITS = {"low": 0.0}


class Settings:
    """A class as a namespace."""

    factor = 1.0


class _scale:  # noqa: N801 - a context manager
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __enter__(self) -> None:
        SCALE.append(self.factor)

    def __exit__(self, *failure: object) -> None:
        SCALE.pop()


class _Uses(nn.Module):
    """Two stages, with something of the user's around each operation of theirs."""

    def __init__(self, use, only_first: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh()
        self.use, self.only_first = use, only_first
        self.k, self.own, self.numbers = 1.0, {"k": 1.0}, np.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            x = self.use(self, self.a(x), 0.5)
        with bp.Block(stage=1):
            x = self.b(x)
            return x if self.only_first else self.use(self, x, 2.0)


def _a_stack(net: _Uses, h: Tensor, k: float) -> Tensor:
    with _scale(k):
        return h * SCALE[-1]


def _an_attribute(net: _Uses, h: Tensor, k: float) -> Tensor:
    net.k = k
    return h * net.k


def _an_entry(net: _Uses, h: Tensor, k: float) -> Tensor:
    net.own["k"] = k
    return h * net.own["k"]


def _a_global_dict(net: _Uses, h: Tensor, k: float) -> Tensor:
    LIMITS["low"] = k
    h = h.clamp(min=LIMITS["low"])
    LIMITS["low"] = 0.0
    return h


def _an_array(net: _Uses, h: Tensor, k: float) -> Tensor:
    net.numbers[0] = k
    return h * float(net.numbers[0])


def _a_function_of_torch(net: _Uses, h: Tensor, k: float) -> Tensor:
    with mock.patch.object(nn.functional, "relu", lambda t: t * k):
        return nn.functional.relu(h.sin())


def _a_mode(net: _Uses, h: Tensor, k: float) -> Tensor:
    net.c.train(k > 1)
    h = h.sin() * (2 if net.c.training else 1)
    net.c.train()
    return h


def _a_hook(net: _Uses, h: Tensor, k: float) -> Tensor:
    handle = net.c.register_forward_hook(lambda module, args, output: output * k)
    h = net.c(h)
    handle.remove()
    return h


def _an_environment(net: _Uses, h: Tensor, k: float) -> Tensor:
    with mock.patch.dict(os.environ, {"BLOCKPIPE_TEST": str(k)}):
        return h.sin() * float(os.environ["BLOCKPIPE_TEST"])


def _for_a_while(get, put):
    """Puts a factor somewhere, reads it there, and puts back what was there before."""

    def use(net: _Uses, h: Tensor, k: float) -> Tensor:
        before = get(net)
        put(net, k)
        h = h.sin() * get(net)
        put(net, before)
        return h

    return use


def _by_default(k: float = 1.0, *, other: float = 1.0) -> float:
    return k * other


@functools.lru_cache
def _a_cached_list() -> list[float]:
    return [1.0]


class _Number(float):
    """A number with attributes."""


LEVELS = logging.getLogger("blockpipe_test")
RAISED, NUMBER, NAMESPACE = ValueError(1.0), _Number(1), types.ModuleType("blockpipe_test")
NAMESPACE.k = NUMBER.k = 1.0
BYTES, NUMBERS, MARKS, TEXT = bytearray([4]), array("d", [1]), {1.0}, io.StringIO()


def _a_set(net: _Uses, h: Tensor, k: float) -> Tensor:
    MARKS.add(k)
    h = h * sum(MARKS)
    MARKS.remove(k)
    return h


def _a_text(net: _Uses, h: Tensor, k: float) -> Tensor:
    TEXT.write(str(k))
    h = h.sin() * float(TEXT.getvalue())
    TEXT.seek(0)
    TEXT.truncate()
    return h


def _a_list_of_its_own(net: _Uses, h: Tensor, k: float) -> Tensor:
    if k < 1:
        net.stack = [1.0]
    net.stack.append(k)
    h = h * net.stack[-1]
    net.stack.pop()
    return h


HOLDERS = [
    (
        lambda net: _by_default(),
        lambda net, k: setattr(_by_default, "__defaults__", (k,)),
        "'__defaults__', which _by_default reads",
    ),
    (
        lambda net: _by_default(),
        lambda net, k: _by_default.__kwdefaults__.update(other=k),
        "entry 'other' of a dict",
    ),
    (
        lambda net: _a_cached_list()[0],
        lambda net, k: _a_cached_list().__setitem__(0, k),
        "a list",
    ),
    (
        lambda net: LEVELS.level / 10 or 1.0,
        lambda net, k: LEVELS.setLevel(int(k * 10)),
        "a Logger",
    ),
    (lambda net: RAISED.args[0], lambda net, k: setattr(RAISED, "args", (k,)), "attribute 'args'"),
    (lambda net: NUMBER.k, lambda net, k: setattr(NUMBER, "k", k), "attribute 'k' of a _Number"),
    (
        lambda net: NAMESPACE.k,
        lambda net, k: setattr(NAMESPACE, "k", k),
        r"'NAMESPACE\.k', which <lambda>",
    ),
    (
        lambda net: getattr(net.b.weight, "k", 1.0),
        lambda net, k: setattr(net.b.weight, "k", k),
        "attribute 'k' of 'b.weight'",
    ),
    (
        lambda net: BYTES[0] / 4,
        lambda net, k: BYTES.__setitem__(0, int(k * 4)),
        "a bytearray",
    ),
    (lambda net: NUMBERS[0], lambda net, k: NUMBERS.__setitem__(0, k), "an array"),
]

USES = [
    (_a_set, "a set"),
    (_a_text, "a StringIO"),
    (_a_list_of_its_own, "a list"),
    *((_for_a_while(get, put), what) for get, put, what in HOLDERS),
    (_a_stack, "a list"),
    (_an_attribute, "attribute 'k' of the model"),
    (_an_entry, "entry 'k' of a dict"),
    (_a_global_dict, "entry 'low' of a dict"),
    (_an_array, "a ndarray"),
    (_a_function_of_torch, r"'nn\.functional\.relu', which _a_function_of_torch reads"),
    (_a_mode, r"c\.training"),
    (_a_hook, r"c\._forward_hooks"),
    (_an_environment, "environment variable 'BLOCKPIPE_TEST'"),
]


@pytest.mark.parametrize(("use", "what"), USES)
def test_what_the_users_code_sets_on_several_stages_is_refused(use, what: str):
    """Wrong in nearly every step: each stage read what the other had set."""
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    with pytest.raises(
        StateError, match=rf"changes ({what}).*sets it on hops \[0(, 1)?\] \(.*:\d+\)"
    ):
        _pipe(_Uses(use)).forward_backward(x, target=y, loss_fn=nn.functional.mse_loss)
    net = _Uses(use)
    plain = copy.deepcopy(net)
    expected = plain_step(plain, (x,), {}, y, nn.functional.mse_loss, 4)
    pipe = _pipe(net, schedule="sequential")
    found = pipe.forward_backward(x, target=y, loss_fn=nn.functional.mse_loss)
    assert_close(found.loss, expected)


@pytest.mark.parametrize("use", [_a_stack, _a_global_dict, _a_mode])
def test_what_is_set_for_a_while_and_anybody_may_read_is_refused(use):
    with pytest.raises(StateError, match=r"sets it on hops \[0\]"):
        _pipe(_Uses(use, only_first=True)).forward_backward(torch.ones(8, 8), loss_fn=torch.sum)


@pytest.mark.parametrize("use", [_an_attribute, _an_entry, _an_array])
def test_what_one_stage_keeps_for_itself_is_fine(use):
    _pipe(_Uses(use, only_first=True)).forward_backward(torch.ones(8, 8), loss_fn=torch.sum)


def test_collecting_is_fine():
    """Each stage adds to one list, and nobody reads a number from it."""
    seen: list[str] = []

    def collect(net: _Uses, h: Tensor, k: float) -> Tensor:
        seen.append(f"{k}")
        return h * 2

    _pipe(_Uses(collect)).forward_backward(torch.ones(8, 8), loss_fn=torch.sum)
    assert sorted(seen) == ["0.5"] * 4 + ["2.0"] * 4


def test_a_generator_that_is_sent_values_is_refused_with_a_remedy():
    def scales():
        scale = 1.0
        while True:
            scale = yield scale

    generator = scales()
    next(generator)

    def send(net: _Uses, h: Tensor, k: float) -> Tensor:
        return h * generator.send(k)

    with pytest.raises(RecordingError, match=r"the generator .*scales .* nor put back.*argument"):
        _pipe(_Uses(send)).forward_backward(torch.ones(8, 8), loss_fn=torch.sum)


def test_collecting_elsewhere_is_fine():
    names, text, table = {"a"}, io.StringIO(), bytearray()

    @functools.lru_cache(1)
    def scale(k: float) -> list[float]:
        return [k]

    def collect(net: _Uses, h: Tensor, k: float) -> Tensor:
        names.add(f"{k}")
        text.write(f"{k} ")
        table.append(1)
        return h * scale(k)[0]

    _pipe(_Uses(collect)).forward_backward(torch.ones(8, 8), loss_fn=torch.sum)
    assert names == {"a", "0.5", "2.0"}
    assert sorted(text.getvalue().split()) == ["0.5"] * 4 + ["2.0"] * 4
    assert len(table) == 8


def test_counting_is_fine():
    """What counts calls is on several stages, and nobody reads it meanwhile."""
    calls = {"n": 0}

    def count(net: _Uses, h: Tensor, k: float) -> Tensor:
        calls["n"] += 1
        return h * 2

    _pipe(_Uses(count)).forward_backward(torch.ones(8, 8), loss_fn=torch.sum)
    assert calls["n"] == 8


def test_a_buffer_that_is_assigned_anew_each_time_is_recorded_once():
    class Averages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("mean", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=0):
                h = self.a(x)
                self.mean = self.mean * 0.9 + h.detach().mean(0) * 0.1
            with bp.Block(stage=1):
                return self.b(h)

    pipe = _pipe(Averages())
    pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)
    first = pipe.recording
    for _ in range(3):
        pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)
    assert pipe.recording is first


def test_where_the_process_prints_to_is_as_before():
    """``redirect_stdout`` of two threads at once: all that was printed later was gone."""

    class Quiet(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                return super().forward(x)

    pipe = _pipe(bp.begin_blocks(nn.Sequential(Quiet(8, 8), Quiet(8, 8)), {"1": 1}))
    assert pipe.summary(torch.ones(8, 8))
    out, filters = sys.stdout, list(warnings.filters)
    with process_state.kept_process_state():
        sys.stdout = io.StringIO()
        warnings.simplefilter("ignore")
    assert sys.stdout is out
    assert list(warnings.filters) == filters
    pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)
    assert pipe.recording.changes_process
    assert sys.stdout is out
    assert list(warnings.filters) == filters


# --- what begins to be written later


class _Rebinds(nn.Module):
    """A layer that from its fifth call on gives a buffer of the whole another tensor."""

    def __init__(self, whole: nn.Module, count: bytearray) -> None:
        super().__init__()
        self.l, self.whole, self.count = nn.Linear(8, 8), [whole], count

    def forward(self, x: Tensor) -> Tensor:
        h, whole = self.l(x), self.whole[0]
        if self.count and self.count[0] > 0:
            whole.ema = whole.ema.lerp(h.detach().mean(0), 0.5)
        return h + whole.ema


@pytest.mark.cpu("the write races with a copy, as it would on any accelerator, before it is found")
def test_a_buffer_that_is_assigned_anew_later_and_read_on_two_stages_is_noticed():
    net = nn.Sequential(nn.Identity(), nn.Identity())
    net.register_buffer("ema", torch.ones(8))
    count = bytearray([0])  # in which nobody looks
    net[0], net[1] = _Rebinds(net, count), bp.BeginBlock(_Rebinds(net, bytearray()), stage=1)
    pipe = _pipe(net)
    pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)
    count[0] = 1
    with pytest.raises(StateError, match="'ema' was written during the step"):
        pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)


class _Warms(nn.Module):
    """Keeps a detached mean of its own after a warm-up; another module may read it then."""

    def __init__(self, warm: bytearray, reads: "_Warms | None" = None) -> None:
        super().__init__()
        self.l, self.warm, self.reads = nn.Linear(8, 8), warm, [reads]
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        if self.warm[0]:
            if self.reads[0] is not None:
                return h + self.reads[0].mean
            with torch.no_grad():
                self.mean.lerp_(h.mean(0), 0.5)
        return h


@pytest.mark.cpu("the write races with a copy, as it would on any accelerator, before it is found")
@pytest.mark.parametrize("is_read", [False, True])
def test_a_buffer_that_is_written_later_is_recorded_anew(is_read: bool):
    """Where only its own stage has it, all is well; where another reads it by now, it is an error."""
    warm = bytearray([False])  # in which nobody looks
    first = _Warms(warm)
    second = _Warms(warm if is_read else bytearray([False]), first)
    net = nn.Sequential(first, bp.BeginBlock(second, stage=1))
    plain = copy.deepcopy(net)
    pipe = _pipe(net)
    x = torch.ones(8, 8)
    pipe.forward_backward(x, loss_fn=torch.sum)
    plain_step(plain, (x,), {}, None, torch.sum, 4)
    warm[0] = plain[0].warm[0] = True
    if is_read:
        with pytest.raises(
            StateError, match=r"0\.mean was written.*buffer '0\.mean' is written by"
        ):
            pipe.forward_backward(x, loss_fn=torch.sum)
        return
    before = pipe.recording
    for _ in range(2):
        pipe.forward_backward(x, loss_fn=torch.sum)
        plain_step(plain, (x,), {}, None, torch.sum, 4)
    assert pipe.recording is not before, "and is known until the next one"
    assert_same_gradients(net, plain)
    assert_close(net[0].mean, plain[0].mean)


# --- tensors that no module registered


class _Stats:
    """A running mean in an object of the user's."""

    def __init__(self) -> None:
        self.ema = torch.ones(8)


MEANS = [torch.ones(8)]


def _of_an_object(net: nn.Module) -> Tensor:
    return net.stats.ema


def _of_a_global_list(net: nn.Module) -> Tensor:
    return MEANS[0]


def _of_a_dict(net: nn.Module) -> Tensor:
    return net.means["a"]


def _of_itself(net: nn.Module) -> Tensor:
    return net.mean


class _Keeps(nn.Module):
    """Reads such a tensor, and writes to it first where it is asked to."""

    def __init__(self, whole: nn.Module, mean, writes) -> None:
        super().__init__()
        self.l, self.whole, self.mean, self.writes = nn.Linear(8, 8), [whole], mean, writes

    def forward(self, x: Tensor) -> Tensor:
        h, mean = self.l(x), self.mean(self.whole[0])
        if self.writes():
            mean.mul_(0.5).add_(h.detach().mean(0))
        return h * mean.clone()


def _keeping(mean, writes, other=None, second=lambda: False) -> nn.Sequential:
    net = nn.Sequential(nn.Identity(), nn.Identity())
    net.stats, net.means, net.mean = _Stats(), {"a": torch.ones(8)}, torch.ones(8)
    net[0] = _Keeps(net, mean, writes)
    net[1] = bp.BeginBlock(_Keeps(net, other or mean, second), stage=1)
    MEANS[0] = torch.ones(8)
    return net


@pytest.mark.cpu(
    "a tensor that no module registered stays on the host, and its writer is not there"
)
@pytest.mark.parametrize("mean", [_of_an_object, _of_a_global_list, _of_a_dict, _of_itself])
def test_an_unregistered_tensor_that_two_stages_share_and_one_writes_to_is_refused(mean):
    """Both modules run untouched, and each micro-batch read what the others had made of it."""
    x = torch.randn(8, 8)
    net = _keeping(mean, lambda: True)
    with pytest.raises(
        StateError,
        match=r"a tensor of shape \(8,\) that no module registered, and reads it on hops \[0, 1\]",
    ):
        _pipe(net).forward_backward(x, loss_fn=torch.sum)
    found = _pipe(net, schedule="sequential").forward_backward(x, loss_fn=torch.sum)
    plain = _keeping(mean, lambda: True)
    plain.load_state_dict(net.state_dict())
    assert_close(found.loss, plain_step(plain, (x,), {}, None, torch.sum, 4))


@pytest.mark.cpu(
    "a tensor that no module registered stays on the host, and its writer is not there"
)
def test_an_unregistered_tensor_of_each_stage_is_its_own():
    """A mean of its own for each stage, and two rows of one table: none of them is shared."""
    for first, second in [
        (_of_an_object, _of_a_dict),
        (lambda net: net.rows[0], lambda net: net.rows[1]),
    ]:
        net = _keeping(first, lambda: True, second, lambda: True)
        net.rows = [*torch.ones(2, 8)]
        plain = _keeping(first, lambda: True, second, lambda: True)
        plain.rows = [*torch.ones(2, 8)]
        plain.load_state_dict(net.state_dict())
        x, pipe = torch.randn(8, 8), _pipe(net)
        for _ in range(2):
            found = pipe.forward_backward(x, loss_fn=torch.sum)
            assert_close(found.loss, plain_step(plain, (x,), {}, None, torch.sum, 4))
        assert_same_gradients(net, plain)


@pytest.mark.cpu("the write races with a copy, as it would on any accelerator, before it is found")
@pytest.mark.parametrize("mean", [_of_an_object, _of_a_global_list, _of_itself])
def test_an_unregistered_tensor_that_is_written_later_is_found_by_that_step(mean):
    """The model was recorded anew, but the step had gone wrong by then, and nothing said so."""
    calls = [0]

    def every_sixth() -> bool:
        calls[0] += 1
        return calls[0] % 6 == 0

    pipe = _pipe(_keeping(mean, every_sixth))
    pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)
    with pytest.raises(StateError, match=r"no module registered was written during the step"):
        pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)


@pytest.mark.cpu(
    "a tensor that no module registered stays on the host, and its writer is not there"
)
def test_an_unregistered_tensor_that_one_stage_begins_to_write_is_recorded_anew_once():
    warm = [False]
    net = _keeping(_of_an_object, lambda: warm[0], _of_a_dict)
    pipe, x, recordings = _pipe(net), torch.ones(8, 8), {}
    for step in range(5):
        warm[0] = step > 1
        pipe.forward_backward(x, loss_fn=torch.sum)
        recordings[id(pipe.recording)] = pipe.recording
    assert len(recordings) == 2


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_dictionary_by_microbatch_is_not_shared(checkpoint: str) -> None:
    """What one stage puts in under ``current_microbatch()``, another may take out."""
    kept: dict[int | None, Tensor] = {}

    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not bp.is_recomputing():
                kept[bp.current_microbatch()] = x
            return super().forward(x).tanh().sigmoid()

    class Takes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + kept.pop(bp.current_microbatch())

    net = nn.Sequential(Keeps(8, 8), nn.Linear(8, 8), Takes(8, 8))
    plain, x = copy.deepcopy(net), torch.rand(8, 8)
    pipe = _pipe(bp.begin_blocks(net, {"1": 1}), checkpoint=checkpoint)
    result = pipe.forward_backward(x, loss_fn=torch.mean, return_outputs=True)
    assert_close(result.outputs, plain(x))
    plain(x).mean().backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)
    assert not kept
