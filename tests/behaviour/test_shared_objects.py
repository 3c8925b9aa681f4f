"""The user's objects that several stages see and change."""

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
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import RecordingError, StateError
from blockpipe.restoring import process_state

from ..parity import plain_step
from ..stage_devices import assert_close
from .noticed_models import _pipe

# --- what the user's own code shares


SCALE = [1.0]


LIMITS = {"low": 0.0}


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
    (_an_array, "an ndarray"),
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


@pytest.mark.parametrize("on", [[0], [0, 1]])
def test_warnings_that_a_forward_collects_are_of_one_stage(on: list[int]) -> None:
    """The list of one stage had the other's warnings, and all later ones of the process."""

    class Collects(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with warnings.catch_warnings(record=True) as caught:
                h = super().forward(x)
            return h * (1 + len(caught))

    layers = [Collects(8, 8) if stage in on else nn.Linear(8, 8) for stage in (0, 1)]
    pipe = _pipe(bp.begin_blocks(nn.Sequential(*layers), {"1": 1}))
    shows = warnings._showwarnmsg_impl  # type: ignore[attr-defined]
    refused = pytest.raises(StateError, match=r"where warnings go .* on hops \[0, 1\]")
    with refused if len(on) > 1 else contextlib.nullcontext():
        pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)
    assert warnings._showwarnmsg_impl is shows  # type: ignore[attr-defined]
