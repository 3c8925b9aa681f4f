"""Plain values that hops share: who sets them and who reads them is seen, and nothing else is."""

import collections
import contextvars
import copy
import dataclasses
import functools
import heapq
import itertools
import os
import random
import sys
import time

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ...parity import assert_same_gradients, plain_step
from ...stage_devices import assert_close, stages

LIMITS, VARIABLE, FACTOR = {"k": 1.0}, contextvars.ContextVar("VARIABLE", default=1.0), 1.0


class Sealed(nn.Linear):
    """A module that is called as a whole; what is done in it, a test says."""

    def __init__(self, use, state) -> None:
        super().__init__(4, 4)
        self.use, self.state = use, state

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.state, super().forward(x))


class State:
    """An object that modules of two stages hold."""

    factor = 1.0  # of the class

    def __init__(self) -> None:
        self.k, self.count, self.last = 1.0, 1, 1.0
        self.numbers, self.table, self.array = [1.0, 2.0], {"k": 1.0}, np.ones(2)
        self.recent, self.calls = collections.deque([1.0], maxlen=3), itertools.count(1)

    @property
    def scale(self) -> float:
        return self.last

    @scale.setter
    def scale(self, value: float) -> None:
        self.last = value

    def __call__(self, h: Tensor) -> Tensor:
        return h * self.k


@dataclasses.dataclass
class Slotted:
    __slots__ = ("k",)
    k: float


@functools.lru_cache
def kept() -> list[float]:
    return [1.0]


def largest(h: Tensor) -> float:
    return h.detach().abs().max().item()


def net_of(first, second, state: object = None) -> nn.Sequential:
    state = State() if state is None else state
    net = nn.Sequential(Sealed(first, state), nn.Tanh(), Sealed(second, state))
    return bp.begin_blocks(net, {"1": 1})


def step(net: nn.Module, **options) -> bp.Pipeline:
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, **options)
    pipe.forward_backward(torch.randn(8, 4), target=torch.zeros(8, 4), loss_fn=mse_loss)
    return pipe


# --- what is refused


def _sets_attribute(state: State, h: Tensor) -> Tensor:
    state.k = largest(h)
    return h


def _sets_by_name(state: State, h: Tensor) -> Tensor:
    setattr(state, "k", largest(h))  # noqa: B010
    return h


def _sets_its_dictionary(state: State, h: Tensor) -> Tensor:
    state.__dict__.update(k=largest(h))
    return h


def _counts(state: State, h: Tensor) -> Tensor:
    state.count += 1
    return h


def _sets_property(state: State, h: Tensor) -> Tensor:
    state.scale = largest(h)
    return h


def _sets_class(state: State, h: Tensor) -> Tensor:
    type(state).factor = largest(h)
    return h


def _sets_entry(state: State, h: Tensor) -> Tensor:
    state.table["k"] = largest(h)
    return h


def _sets_element(state: State, h: Tensor) -> Tensor:
    state.numbers[0] = largest(h)
    return h


def _appends(state: State, h: Tensor) -> Tensor:
    state.recent.append(largest(h))
    return h


def _sets_array(state: State, h: Tensor) -> Tensor:
    state.array[:1].fill(largest(h))
    return h


def _copies_to_array(state: State, h: Tensor) -> Tensor:
    np.copyto(state.array, largest(h))
    return h


def _pushes(state: State, h: Tensor) -> Tensor:
    heapq.heappush(state.numbers, -largest(h))
    return h


def _sets_global(state: State, h: Tensor) -> Tensor:
    global FACTOR
    FACTOR = largest(h)
    return h


def _sets_environment(state: State, h: Tensor) -> Tensor:
    os.environ["BLOCKPIPE_TEST"] = str(largest(h))
    return h


def _sets_global_entry(state: State, h: Tensor) -> Tensor:
    LIMITS.update(k=largest(h))
    return h


def _sets_variable(state: State, h: Tensor) -> Tensor:
    VARIABLE.set(largest(h))
    return h


def _sets_kept(state: State, h: Tensor) -> Tensor:
    kept()[0] = largest(h)
    return h


def _advances(state: State, h: Tensor) -> Tensor:
    return h * next(state.calls)


def _sets_if_large(state: State, h: Tensor) -> Tensor:
    if largest(h) > 1e6:
        state.k = 3.0
    return h


def _sets_by_chance(state: State, h: Tensor) -> Tensor:
    if random.random() > 2:
        state.k = 3.0
    return h


def _sets_every_third(state: State, h: Tensor) -> Tensor:
    state.count += 1
    if state.count % 3 == 0:
        state.k += 1
    return h


def _reads_if_large(state: State, h: Tensor) -> Tensor:
    return h * state.k if largest(h) > 1e6 else h


def _unpacks(state: State, h: Tensor) -> Tensor:
    k, other = state.numbers
    return h * k * other


def _reads_beside_another(state: State, h: Tensor) -> Tensor:
    numbers = state.numbers
    count = 1
    return h * heapq.nlargest(count, numbers)[0]  # one instruction for both, from 3.13 on


def _matches(state: State, h: Tensor) -> Tensor:
    match state:
        case State(k=k):
            return h * k
    return h


PAIRS = [
    (_sets_attribute, lambda state, h: h * state.k, "attribute 'k' of a State"),
    (_sets_attribute, lambda state, h: h * getattr(state, "k", 1.0), "attribute 'k'"),
    (_sets_attribute, lambda state, h: h * vars(state)["k"], "attribute 'k'"),
    (_sets_attribute, lambda state, h: state(h), "attribute 'k'"),
    (_sets_attribute, lambda state, h: h * float(f"{state.k}"), "attribute 'k'"),
    (_sets_attribute, _matches, "attribute 'k'"),
    (_sets_attribute, _reads_if_large, "attribute 'k'"),
    (_sets_by_name, lambda state, h: h * state.k, "attribute 'k'"),
    (_sets_its_dictionary, lambda state, h: h * state.k, "a State"),
    (_sets_if_large, lambda state, h: h * state.k, "attribute 'k'"),
    (_sets_by_chance, lambda state, h: h * state.k, "attribute 'k'"),
    (_sets_every_third, lambda state, h: h * state.k, "attribute 'k'"),
    (_counts, lambda state, h: h * (0.1 * state.count), "attribute 'count'"),
    (_counts, lambda state, h: h if state.count % 2 else h * 2, "attribute 'count'"),
    (_sets_property, lambda state, h: h * state.scale, "attribute 'last'"),
    (_sets_class, lambda state, h: h * state.factor, "State.factor"),
    (_sets_entry, lambda state, h: h * state.table["k"], "entry 'k' of a dict"),
    (_sets_entry, lambda state, h: h * sum(state.table.values()), "entry 'k'"),
    (_sets_element, lambda state, h: h * state.numbers[-2], "a list"),
    (_sets_element, _unpacks, "a list"),
    (_sets_element, _reads_beside_another, "a list"),
    (_appends, lambda state, h: h * max(state.recent), "a deque"),
    (_pushes, lambda state, h: h * state.numbers[0], "a list"),
    (_sets_array, lambda state, h: h * float(state.array[0]), "an ndarray"),
    (_copies_to_array, lambda state, h: h * float(state.array.sum()), "an ndarray"),
    (_sets_global, lambda state, h: h * FACTOR, "test_shared_values.FACTOR"),
    (_sets_global_entry, lambda state, h: h * LIMITS["k"], "a dict"),
    (_sets_environment, lambda state, h: h * float(os.environ.get("BLOCKPIPE_TEST", 1)), "a dict"),
    (_sets_variable, lambda state, h: h * VARIABLE.get(), "a ContextVar"),
    (_sets_kept, lambda state, h: h * kept()[0], "a list"),
    (_advances, _advances, "a count"),
]


@pytest.mark.parametrize(("sets", "reads", "what"), PAIRS)
def test_what_one_stage_sets_and_a_sealed_module_of_another_reads_is_refused(sets, reads, what):
    """Stage 0 read it for the next micro-batch before stage 1 had set it, without a word."""
    with pytest.raises(
        StateError,
        match=rf"changes .*{what}.* on hops \[.*1\] \(.*values\.py:\d+\), and reads it on hops "
        r"\[0(, 1)?\] \(.*values\.py:\d+\).*pass it along",
    ):
        step(net_of(reads, sets))


def test_variables_of_closures_and_slots_are_seen():
    k, array = 1.0, pytest.importorskip("numpy").array([1.0], dtype=object)

    def sets_array(state: Slotted, h: Tensor) -> Tensor:
        array[0] = largest(h)
        return h

    def sets(state: Slotted, h: Tensor) -> Tensor:
        nonlocal k
        k = largest(h)
        return h

    def sets_slot(state: Slotted, h: Tensor) -> Tensor:
        state.k = largest(h)
        return h

    with pytest.raises(StateError, match=r"variable 'k' of a closure on hops \[1\]"):
        step(net_of(lambda state, h: h * k, sets))
    with pytest.raises(StateError, match=r"attribute 'k' of a Slotted on hops \[1\]"):
        step(net_of(lambda state, h: h * state.k, sets_slot, Slotted(1.0)))
    with pytest.raises(StateError, match=r"an ndarray on hops \[1\]"):  # of objects
        step(net_of(lambda state, h: h * array[0], sets_array))


class Glue(nn.Module):
    """Sets a number in its own code on one stage, and reads it in that on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.LeakyReLU()
        self.k, self.width = 1.0, 0


class Forth(Glue):
    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.k = largest(h)
        with bp.Block(stage=1):
            return self.b(h) * self.k


class Back(Glue):
    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x) * self.k
        with bp.Block(stage=1):
            h = self.b(h)
            self.k = largest(h)
            return h


class OfTorch(Glue):
    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.act(self.a(x))
        with bp.Block(stage=1):
            h = self.b(h)
            self.act.negative_slope = largest(h)
            return h


@pytest.mark.parametrize("kind", [Forth, Back, OfTorch])
def test_the_forwards_own_code_is_seen_too(kind: type[Glue]):
    with pytest.raises(StateError, match=r"(attribute 'k' of the model|act\.negative_slope) on"):
        step(kind())
    net = kind()
    plain = copy.deepcopy(net)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="sequential")
    found = pipe.forward_backward(x, target=y, loss_fn=mse_loss)
    assert_close(found.loss, plain_step(plain, (x,), {}, y, mse_loss, 4))
    assert_same_gradients(net, plain)


# --- what is fine


class Shapes(Glue):
    """Every micro-batch of a shape leaves the same."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.width = x.shape[1], [x.dim()]
        with bp.Block(stage=1):
            return self.b(h) * self.width[0]


class Local(Glue):
    def forward(self, x: Tensor) -> Tensor:
        state = State()
        with bp.Block(stage=0):
            h = self.a(x)
            state.k = largest(h)
            state.numbers.append(1.0)
        with bp.Block(stage=1):
            return self.b(h) * state.k * sum(state.numbers)


def _keeps_for_itself(state: list[State], h: Tensor) -> Tensor:
    state[0].k = 0.9 * state[0].k + 0.1 * largest(h)
    state[0].count += 1
    return h * state[0].k * state[0].count


def _logs(state: State, h: Tensor) -> Tensor:
    state.table["loss"] = largest(h)
    state.recent.append(largest(h))
    return h


def _prints(state: State, h: Tensor) -> Tensor:
    print(state.k, end="")
    return h


def _reads_when_evaluated(state: State, h: Tensor) -> Tensor:
    return h if torch.is_grad_enabled() else h * state.k


def _sets_a_setting(state: State, h: Tensor) -> Tensor:
    time.sleep(0.0)
    return h * state.k * state.table["k"] * sum(state.numbers)


FINE = [
    Shapes,
    Local,
    lambda: nn.Sequential(*(_sealed_with_its_own() for _ in range(2))),
    lambda: net_of(_logs, _logs),
    lambda: net_of(_prints, _sets_attribute),
    lambda: net_of(_sets_a_setting, _sets_a_setting),
    lambda: net_of(lambda state, h: h if h.dim() == 2 else h * state.count, _counts),
]


def _sealed_with_its_own() -> Sealed:
    return Sealed(_keeps_for_itself, [State()])


@pytest.mark.parametrize("make", FINE)
def test_what_no_other_stage_reads_is_fine(make):
    net = make()
    if isinstance(net, nn.Sequential) and len(net) == 2:
        bp.begin_blocks(net, {"1": 1})
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    for _ in range(3):
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        found = pipe.forward_backward(x, target=y, loss_fn=mse_loss)
        assert_close(found.loss, plain_step(plain, (x,), {}, y, mse_loss, 4))
    assert_same_gradients(net, plain)


def test_the_summary_says_what_one_forward_leaves_for_the_next():
    """Micro-batches count as forwards: such numbers are not those of the unsplit batch."""
    net = bp.begin_blocks(nn.Sequential(*(_sealed_with_its_own() for _ in range(2))), {"1": 1})
    notes = str(bp.record(net, torch.zeros(2, 4)).summary())
    assert "each forward changes attribute 'count' of a State, and the next one reads it" in notes
    assert "each forward" not in str(bp.record(Shapes(), torch.zeros(2, 4)).summary())


def test_a_trace_function_is_there_again_after_a_recording():
    calls: list[str] = []

    def traced(frame, event, argument):
        calls.append(event)

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        bp.record(Shapes(), torch.zeros(2, 4))
        assert sys.gettrace() is traced
    finally:
        sys.settrace(before)
