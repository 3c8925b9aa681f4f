"""Reads and writes of plain values that no attribute, entry or element in the code names."""

import bisect
import collections
import copy
import dataclasses
import functools
import operator
import os
import queue
import time
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ....parity import assert_same_gradients, plain_step
from ....stage_devices import stages

Use = Callable[[Any, Tensor], Tensor]
NUMBER = 1.0


class Registry(type):
    """A class of classes, by whose entries they are found."""

    numbers: ClassVar = {"k": 1.0}

    def __getitem__(cls, key: str) -> float:
        return cls.numbers[key]


class Options(metaclass=Registry):
    """Its attributes are for all of its objects."""

    scale = 1.0


@dataclasses.dataclass
class Data:
    k: float = 1.0


class State:
    """An object that modules of two stages hold."""

    def __init__(self) -> None:
        self.k, self.table, self.numbers = 1.0, {"k": 1.0}, [1.0]
        self.chain = collections.ChainMap({"k": 1.0})
        self.user, self.users = collections.UserDict(k=1.0), collections.UserList([1.0])
        self.view, self.queue = types.MappingProxyType(self.table), queue.Queue[float]()
        self.nested, self.data = [{"k": [1.0]}], Data()
        self.proxy = weakref.proxy(self.data)


class Sealed(nn.Linear):
    """A module that is called as a whole; what is done in it, a test says."""

    def __init__(self, use: Use, state: object) -> None:
        super().__init__(4, 4)
        self.use, self.state = use, state

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.state, super().forward(x))


def _net(first: Use, second: Use) -> nn.Sequential:
    state = State()
    net = nn.Sequential(Sealed(first, state), nn.Tanh(), Sealed(second, state))
    return bp.begin_blocks(net, {"1": 1})


def _sets(state: State, h: Tensor) -> Tensor:
    state.k = time.perf_counter()
    return h


def _sets_entry(state: State, h: Tensor) -> Tensor:
    state.table["k"] = time.perf_counter()
    return h


def _sets_by_operator(state: State, h: Tensor) -> Tensor:
    operator.setitem(state.table, "k", time.perf_counter())
    return h


def _sets_by_a_method(state: State, h: Tensor) -> Tensor:
    append = state.numbers.append
    append(time.perf_counter())
    return h


def _sets_by_a_function(state: State, h: Tensor) -> Tensor:
    bisect.insort(state.numbers, time.perf_counter())
    return h


def _sets_in_a_chain(state: State, h: Tensor) -> Tensor:
    state.chain.maps[0]["k"] = time.perf_counter()
    return h


def _sets_in_a_users_dictionary(state: State, h: Tensor) -> Tensor:
    state.user["k"] = time.perf_counter()
    return h


def _sets_in_a_users_list(state: State, h: Tensor) -> Tensor:
    state.users[0] = time.perf_counter()
    return h


def _sets_in_a_nest(state: State, h: Tensor) -> Tensor:
    state.nested[0]["k"][0] = time.perf_counter()
    return h


def _puts(state: State, h: Tensor) -> Tensor:
    state.queue.put(time.perf_counter())
    return h


def _sets_in_a_class_of_classes(state: State, h: Tensor) -> Tensor:
    Registry.numbers["k"] = time.perf_counter()
    return h


def _sets_class(state: State, h: Tensor) -> Tensor:
    Options.scale = time.perf_counter()
    return h


def _sets_by_globals(state: State, h: Tensor) -> Tensor:
    globals()["NUMBER"] = time.perf_counter()
    return h


def _sets_data(state: State, h: Tensor) -> Tensor:
    state.data.k = time.perf_counter()
    return h


def _sets_environment(state: State, h: Tensor) -> Tensor:
    os.environ["BLOCKPIPE_TEST"] = str(time.perf_counter())
    return h


def _reads_match(state: State, h: Tensor) -> Tensor:
    match state.table:
        case {"k": k}:
            return h * k
    return h


def _reads_by_a_bound_method(state: State, h: Tensor) -> Tensor:
    get = state.table.get
    return h * get("k")


PAIRS: dict[str, tuple[Use, Use]] = {
    "format_map": (_sets, lambda s, h: h * float("{k}".format_map(vars(s)))),
    "vars get": (_sets, lambda s, h: h * vars(s).get("k")),
    "vars given": (_sets, lambda s, h: h * dict(**vars(s))["k"]),
    "format": (_sets, lambda s, h: h * float(f"{s.k:.3f}")),
    "format given": (_sets_entry, lambda s, h: h * float("{k}".format(**s.table))),
    "attrgetter": (_sets, lambda s, h: h * operator.attrgetter("k")(s)),
    "itemgetter": (_sets_entry, lambda s, h: h * operator.itemgetter("k")(s.table)),
    "methodcaller": (_sets_entry, lambda s, h: h * operator.methodcaller("get", "k")(s.table)),
    "match": (_sets_entry, _reads_match),
    "setitem": (_sets_by_operator, lambda s, h: h * s.table["k"]),
    "setitem, all": (_sets_by_operator, lambda s, h: h * sum(s.table.values())),
    "bound method": (_sets_entry, _reads_by_a_bound_method),
    "mapped method": (_sets_entry, lambda s, h: h * next(map(s.table.get, ["k"]))),
    "partial method": (_sets_entry, lambda s, h: h * functools.partial(s.table.get, "k")()),
    "bound append": (_sets_by_a_method, lambda s, h: h * s.numbers[-1]),
    "insort": (_sets_by_a_function, lambda s, h: h * s.numbers[-1]),
    "view": (_sets_entry, lambda s, h: h * s.view["k"]),
    "view get": (_sets_entry, lambda s, h: h * s.view.get("k")),
    "chain": (_sets_in_a_chain, lambda s, h: h * s.chain["k"]),
    "chain get": (_sets_in_a_chain, lambda s, h: h * s.chain.get("k")),
    "user dictionary": (_sets_in_a_users_dictionary, lambda s, h: h * s.user["k"]),
    "user dictionary get": (_sets_in_a_users_dictionary, lambda s, h: h * s.user.get("k")),
    "user list": (_sets_in_a_users_list, lambda s, h: h * sum(s.users)),
    "nest": (_sets_in_a_nest, lambda s, h: h * copy.deepcopy(s.nested)[0]["k"][0]),
    "queue": (_puts, lambda s, h: h * (1 + s.queue.qsize())),
    "class of classes": (_sets_in_a_class_of_classes, lambda s, h: h * Options["k"]),
    "new object": (_sets_class, lambda s, h: h * Options().scale),
    "globals": (_sets_by_globals, lambda s, h: h * NUMBER),
    "read globals": (_sets_by_globals, lambda s, h: h * globals()["NUMBER"]),
    "proxy": (_sets_data, lambda s, h: h * s.proxy.k),
    "getenv": (_sets_environment, lambda s, h: h * float(os.getenv("BLOCKPIPE_TEST", "1"))),
}


@pytest.fixture(autouse=True)
def _variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKPIPE_TEST", "1")


@pytest.mark.every
@pytest.mark.parametrize("how", PAIRS)
def test_a_value_when_one_stage_sets_it_and_another_reads_it_in_other_words_is_refused(
    how: str,
) -> None:
    """Stage 0 read it for the next micro-batch before stage 1 had set it, without a word."""
    sets, reads = PAIRS[how]
    pipe = bp.Pipeline(_net(reads, sets), devices=stages(2), chunks=4)
    with pytest.raises(
        StateError, match=r"the forward changes .*, and reads it on hops \[0(, 1)?\]"
    ):
        pipe.forward_backward(torch.randn(8, 4), target=torch.zeros(8, 4), loss_fn=mse_loss)


def _asks_what_it_is(state: State, h: Tensor) -> Tensor:
    return (
        h if isinstance(state.user, collections.UserDict) and callable(state.queue.put) else 2 * h
    )


FINE: dict[str, tuple[Use, Use]] = {
    "another variable": (_sets_environment, lambda s, h: h * len(os.getenv("PATH", ""))),
    "another global": (_sets_by_globals, lambda s, h: h * len(globals()["__name__"])),
    "its class": (_sets_in_a_users_dictionary, _asks_what_it_is),
    "nothing set": (_sets, lambda s, h: h * s.chain["k"] * s.user.get("k") * sum(s.users)),
}


@pytest.mark.every
@pytest.mark.parametrize("how", FINE)
def test_a_value_when_another_stage_reads_something_else_is_fine(how: str) -> None:
    sets, reads = FINE[how]
    net, plain = _net(reads, sets), _net(reads, sets)
    plain.load_state_dict(net.state_dict())
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    pipe.forward_backward(x, target=y, loss_fn=mse_loss)
    plain_step(plain, (x,), {}, y, mse_loss, 4)
    assert_same_gradients(net, plain)
