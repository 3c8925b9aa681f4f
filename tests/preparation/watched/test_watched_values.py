"""Values that a training loop sets, and by which a forward turns."""

import copy
import dataclasses
import enum
import functools
import math
import os
import pickle
import types

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import StateError
from blockpipe.preparation.watched.watched_values import WatchedValues

from ...parity import assert_same_gradients, plain_step
from ...stage_devices import assert_close, stages


class Counted(nn.Module):
    """A module of plain numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.warm_up, self.rate = 0, 3, 0.5


QUESTIONS = [
    lambda m: m.step >= m.warm_up,
    lambda m: m.warm_up <= m.step,
    lambda m: m.step % 3 == 0,
    lambda m: 10 - m.step > 4,
    lambda m: m.step / m.warm_up < 1.5,
    lambda m: min(m.step / 4, 1.0) == 1.0,
    lambda m: not m.step,
    lambda m: 2**m.step > 9,
    lambda m: m.step * 0.5 > 1,
    lambda m: m.step in (2, 4),
]


@pytest.mark.parametrize("ask", QUESTIONS)
def test_what_was_asked_is_asked_again(ask):
    module = Counted()
    watched = _looking(module)
    module.step = 1
    assert watched.has_turned()
    with watched.asked():
        ask(module)
    assert type(module.step) is int
    known = watched.answered()
    for step in range(8):
        module.step = step
        assert not watched.has_turned(), "it is asked about by now"
        turned = ask(module) != ask_at(1, ask)
        assert not turned or not watched.holds(known)


def _looking(module: nn.Module) -> WatchedValues:
    watched = WatchedValues(module)
    watched.look_around()
    return watched


def ask_at(step: int, ask) -> bool:
    module = Counted()
    module.step = step
    return bool(ask(module))


def test_what_the_forward_counts_itself_is_nobody_elses_doing():
    module = Counted()
    watched = _looking(module)
    module.step += 1
    watched.step_is_over()
    assert not watched.has_turned()


def test_numbers_that_are_asked_are_numbers():
    module = Counted()
    watched = _looking(module)
    module.step, module.rate = 2, 0.25
    assert watched.has_turned()
    with watched.asked():
        x = torch.ones(2, 6) * module.step + module.rate
        assert x.view(module.step, -1).shape == (2, 6)
        assert torch.equal(x, torch.full((2, 6), 2.25))
        assert [*range(module.step)] == [0, 1]
        assert math.cos(module.rate) == math.cos(0.25)
        assert f"{module.step} {module.rate:.1f}" == "2 0.2"
        assert hash(module.step) == hash(2)
        for number, kind in ((module.step, int), (module.rate, float)):
            assert copy.copy(number) is copy.deepcopy(number) is number
            assert type(pickle.loads(pickle.dumps(number))) is kind


class WarmsUp(nn.Module):
    """From a step on that the training loop counts, the second stage does otherwise."""

    def __init__(self, changed) -> None:
        super().__init__()
        self.a, self.b, self.changed, self.step = nn.Linear(4, 4), Late(), changed, 0
        self.b.whole = [self]  # no child of its own

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            if self.changed is not None:
                self.changed(self, h)
        with bp.Block(stage=1):
            return self.b(h)


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)
        self.register_buffer("ema", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        whole = self.whole[0]
        return self.f(x) * (self.ema if whole.step >= 2 else 2.0)


def test_a_forward_that_turns_by_the_loops_count_trains_as_plain():
    net = WarmsUp(None)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    recordings = set()
    for step in range(5):
        net.step = plain.step = step
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        expected = plain_step(plain, (x,), {}, y, nn.functional.mse_loss, 4)
        found = pipe.forward_backward(x, target=y, loss_fn=nn.functional.mse_loss)
        assert_close(found.loss, expected)
        recordings.add(id(pipe.recording))
    assert_same_gradients(net, plain)
    assert len(pipe._preparer.known) == 2, "one for each answer"


def test_what_another_stage_begins_to_read_by_the_loops_count_is_refused():
    """It was wrong from run to run: the buffer is written on one stage all the time, and read by a
    sealed module of another one from the third step on."""

    def averages(net: WarmsUp, h: Tensor) -> None:
        with torch.no_grad():
            net.b.ema.lerp_(h.std(0), 0.5)

    net = WarmsUp(averages)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    x = torch.randn(8, 4)
    for net.step in range(2):
        pipe.forward_backward(x, loss_fn=torch.sum)
    net.step = 2
    with pytest.raises(StateError, match=r"buffer 'b\.ema' is written by the forward and read on"):
        pipe.forward_backward(x, loss_fn=torch.sum)


def test_a_copied_pipeline_follows_its_own_model():
    pipe = bp.Pipeline(WarmsUp(None), devices=stages(2), chunks=2)
    x = torch.randn(4, 4)
    pipe.forward_backward(x, loss_fn=torch.sum)
    other = copy.deepcopy(pipe)
    other.module.step = 5
    other.module.b.whole = [other.module]
    with torch.no_grad():
        assert_close(other(x), other.module(x) if stages(2)[0] == "cpu" else other(x))


# --- wherever the value is


STACK = [1.0]
STEP = 0
RUN = {"step": 0}


class Mode(enum.Enum):
    """How a configuration may say it."""

    WARM = 1
    FULL = 2


class Settings:
    """A class as a namespace."""

    step = 0


@dataclasses.dataclass(slots=True)
class Config:
    """A record without a dictionary."""

    step: int = 0


def _set_global(net: nn.Module, step: int) -> None:
    global STEP
    STEP = step


GATES = {
    "number": (lambda n, s: setattr(n, "step", s), lambda n: n.step >= 2),
    "none": (lambda n, s: setattr(n, "value", None if s < 2 else 0.5), lambda n: n.value),
    "enum": (lambda n, s: setattr(n, "value", Mode(1 + s // 2)), lambda n: n.value is Mode.FULL),
    "tuple": (lambda n, s: setattr(n, "pair", (s, "a")), lambda n: n.pair[0] >= 2),
    "numpy": (lambda n, s: setattr(n, "value", np.int64(s)), lambda n: n.value and n.value > 1),
    "object": (lambda n, s: setattr(n.config, "step", s), lambda n: n.config.step >= 2),
    "slots": (lambda n, s: setattr(n.record, "step", s), lambda n: n.record.step >= 2),
    "dict": (lambda n, s: n.own.update(step=s), lambda n: n.own["step"] >= 2),
    "new entry": (lambda n, s: n.own.update({"on": 1} if s > 1 else {}), lambda n: "on" in n.own),
    "first entry": (lambda n, s: n.empty.update({"on": 1} if s > 1 else {}), lambda n: n.empty),
    "first attribute": (
        lambda n, s: s > 1 and setattr(n.bare, "on", True),
        lambda n: hasattr(n.bare, "on"),
    ),
    "list": (lambda n, s: n.listed.__setitem__(0, s), lambda n: n.listed[0] >= 2),
    "set": (lambda n, s: n.names.update({"b"} if s > 1 else ()), lambda n: "b" in n.names),
    "class": (lambda n, s: setattr(Settings, "step", s), lambda n: Settings.step >= 2),
    "global": (_set_global, lambda n: STEP >= 2),
    "global dict": (lambda n, s: RUN.update(step=s), lambda n: RUN["step"] >= 2),
    "environment": (
        lambda n, s: os.environ.update(BLOCKPIPE_TEST=str(s)),
        lambda n: os.environ.get("BLOCKPIPE_TEST", "0") >= "2",
    ),
    "hooks": (
        lambda n, s: n.a.register_forward_hook(lambda *_: None) if s == 2 else None,
        lambda n: n.a._forward_hooks,
    ),
    "frozen": (lambda n, s: n.a.bias.requires_grad_(s < 2), lambda n: not n.a.bias.requires_grad),
}


class Warm:
    """A way to go, as an object."""

    def is_full(self) -> bool:
        return False

    @staticmethod
    def static() -> bool:
        return False


class Full(Warm):
    def is_full(self) -> bool:
        return True


def _says(answer: bool):
    """Both answers have one code, and other functions in the closure."""

    def yes() -> bool:
        return True

    def no() -> bool:
        return False

    said = yes if answer else no
    return lambda: said()


def _hook(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
    return output


def _swap_hook(net: nn.Module, step: int) -> None:
    """One hook in the place of another."""
    net.a._forward_hooks.clear()
    net.a.register_forward_hook(_hook if step < 2 else lambda *_: None)


CODE_GATES = {
    "function": (
        lambda n, s: setattr(n, "value", (lambda: True) if s > 1 else (lambda: False)),
        lambda n: n.value(),
    ),
    "closure": (lambda n, s: setattr(n, "value", _says(s > 1)), lambda n: n.value()),
    "partial": (
        lambda n, s: setattr(n, "value", functools.partial(max if s > 1 else min, 0, 1)),
        lambda n: n.value(),
    ),
    "method": (
        lambda n, s: setattr(n, "value", (Full if s > 1 else Warm)().is_full),
        lambda n: n.value(),
    ),
    "strategy": (
        lambda n, s: setattr(n, "value", Full() if s > 1 else Warm()),
        lambda n: n.value.is_full(),
    ),
    "a class": (
        lambda n, s: setattr(n, "value", Full if s > 1 else Warm),
        lambda n: n.value is Full,
    ),
    "patched class": (
        lambda n, s: setattr(Settings, "is_full", staticmethod((lambda: s > 1) if s < 2 else _yes)),
        lambda n: Settings.is_full(),
    ),
    "swapped hook": (
        _swap_hook,
        lambda n: next(iter(n.a._forward_hooks.values())) is not _hook,
    ),
}


def _yes() -> bool:
    return True


class Gated(nn.Module):
    """Pushes a factor on a list for each stage, where a gate says so."""

    def __init__(self, is_on) -> None:
        super().__init__()
        self.a, self.b, self.is_on = nn.Linear(4, 4), nn.Linear(4, 4), is_on
        self.step, self.value, self.pair = 0, None, (0, "a")
        self.config, self.record = types.SimpleNamespace(step=0), Config()
        self.own, self.listed, self.names = {"step": 0}, [0], {"a"}
        self.empty, self.bare = {}, types.SimpleNamespace()

    def scaled(self, h: Tensor, factor: float) -> Tensor:
        if not self.is_on(self):
            return h
        STACK.append(factor)
        try:
            return h * STACK[-1]
        finally:
            STACK.pop()

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.scaled(self.a(x), 0.5)
        with bp.Block(stage=1):
            return self.scaled(self.b(h), 2.0)


@pytest.fixture
def _as_it_was(monkeypatch):
    """Globals that the gates set."""
    global STEP
    monkeypatch.delenv("BLOCKPIPE_TEST", raising=False)
    yield
    STEP = Settings.step = RUN["step"] = 0
    os.environ.pop("BLOCKPIPE_TEST", None)


@pytest.mark.usefixtures("_as_it_was")
@pytest.mark.parametrize("gate", [*GATES, *CODE_GATES])
def test_what_turns_on_shared_state_is_noticed_by_the_step_in_which_it_does(gate: str):
    """Where the gate was no number, bool or string on a module, each step from the third on was
    wrong, without a word."""
    set_it, is_on = {**GATES, **CODE_GATES}[gate]
    net = Gated(is_on)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    x = torch.randn(8, 4)
    for step in range(2):
        set_it(net, step)
        pipe.forward_backward(x, loss_fn=torch.sum)
    set_it(net, 2)
    with pytest.raises(StateError, match=r"the forward changes a list, and sets it on hops"):
        pipe.forward_backward(x, loss_fn=torch.sum)


def _steps(pipe: bp.Pipeline, count: int, before) -> list[int]:
    """In which of some steps the model was recorded."""
    recorded, x, known = [], torch.randn(8, 4), {}
    for step in range(count):
        before(pipe.module, step)
        pipe.forward_backward(x, loss_fn=torch.sum)
        if id(pipe.recording) not in known:
            recorded.append(step)
        known[id(pipe.recording)] = pipe.recording
    return recorded


@pytest.mark.usefixtures("_as_it_was")
def test_what_counts_is_not_recorded_at_every_step():
    """Numbers are asked; of what is no number, a few values are followed; histories are let be."""

    def count(net: Gated, step: int) -> None:
        for gate in ("number", "tuple", "object", "slots", "dict", "list", "class", "global"):
            GATES[gate][0](net, step)
        net.own[f"loss of {step}"] = net.own[step] = 0.1 * step
        net.listed.append(step)
        net.names.add(step)

    pipe = bp.Pipeline(Gated(lambda net: False), devices=stages(2), chunks=4)
    assert _steps(pipe, 20, count)[-1] < 10
    pipe = bp.Pipeline(Gated(lambda net: net.config.step == 30), devices=stages(2), chunks=4)
    assert _steps(pipe, 12, GATES["object"][0]) == [0, 1], "as soon as it counts, it is asked"


def test_a_function_that_is_made_anew_for_each_step_is_recorded_once():
    """The same code, and nothing of what it closes over is kept."""

    def fresh(net: Gated, step: int) -> None:
        net.value = _says(False)
        net.config = Config()
        net.a._forward_hooks.clear()
        net.a.register_forward_hook(lambda *_: None)

    pipe = bp.Pipeline(Gated(lambda net: False), devices=stages(2), chunks=4)
    assert _steps(pipe, 5, fresh) == [0]


@pytest.mark.usefixtures("_as_it_was")
def test_a_setting_that_goes_to_and_fro_is_recorded_once_for_each_value():
    def turn(net: Gated, step: int) -> None:
        net.config.mode = "warm" if step % 2 else "full"

    net = Gated(lambda net: False)
    net.config.mode = "full"
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    assert _steps(pipe, 10, turn) == [0, 1, 2], "what is known does not say yet that it was full"


def test_what_the_forward_sets_itself_is_recorded_once():
    class Counts(Gated):
        def scaled(self, h: Tensor, factor: float) -> Tensor:
            if factor == 0.5:
                self.step += 1
                self.config.step += 1
                self.config.last = f"call {self.step}"
                self.own["step"] = self.step
                self.listed[0] = self.step
            return h

    pipe = bp.Pipeline(Counts(None), devices=stages(2), chunks=4)
    assert _steps(pipe, 6, lambda net, step: None) == [0]


@pytest.mark.usefixtures("_as_it_was")
def test_what_was_set_before_a_report_counts_in_the_next_step():
    """The report looked around, and the step found all as it was."""
    net = Gated(lambda net: net.value)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    x = torch.randn(8, 4)
    for _ in range(2):
        pipe.forward_backward(x, loss_fn=torch.sum)
    net.value = 0.5
    pipe.summary(x)
    with pytest.raises(StateError, match=r"the forward changes a list, and sets it on hops"):
        pipe.forward_backward(x, loss_fn=torch.sum)
