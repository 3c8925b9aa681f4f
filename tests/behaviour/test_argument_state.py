"""Arguments that are no tensors and that a forward changes: all micro-batches are given the same."""

import copy
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..parameter_sets import every_pair
from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages

Use = Callable[[Any, Tensor], Tensor]


class Uses(nn.Module):
    """Uses its second argument on its first stage, or sets it there and reads it on the second."""

    def __init__(self, use: Use, read: Use | None = None) -> None:
        super().__init__()
        self.a, self.b, self.use, self.read = nn.Linear(4, 4), nn.Linear(4, 4), use, read

    def forward(self, x: Tensor, given: Any) -> Tensor:
        with bp.Block(stage=0):
            h = self.use(given, self.a(x))
        with bp.Block(stage=1):
            h = self.b(h)
            return h if self.read is None else self.read(given, h)


class State:
    """An object of the user's own."""

    n = 0


def _counts(given: Any, h: Tensor) -> Tensor:
    given["n"] = given.get("n", 0) + 1
    return h * given["n"]


def _counts_in_attribute(given: Any, h: Tensor) -> Tensor:
    given.n += 1
    return h * given.n


def _appends(given: Any, h: Tensor) -> Tensor:
    given.append(len(given))
    return h * len(given)


def _draws(given: Any, h: Tensor) -> Tensor:
    return h * given.random()


def _counts_words(given: Any, h: Tensor) -> Tensor:
    given["a"] += 1
    return h * given["a"]


def _advances(given: Any, h: Tensor) -> Tensor:
    return h * next(given)


def _collects_tensors(given: Any, h: Tensor) -> Tensor:
    given.append(h.detach().mean())
    return h * len(given)


KINDS: dict[str, tuple[Callable[[], Any], Use]] = {
    "dict": (dict, _counts),
    "object": (State, _counts_in_attribute),
    "namespace": (lambda: SimpleNamespace(n=0), _counts_in_attribute),
    "list": (list, _appends),
    "deque": (deque, _appends),
    "counter": (Counter, _counts_words),
    "random": (lambda: random.Random(1), _draws),
    "iterator": (lambda: iter(range(99)), _advances),
    "collector": (list, _collects_tensors),
}


@every_pair(kind=KINDS, schedule=["1f1b", "gpipe", "sequential", "uncut"], by_name=[False, True])
def test_what_a_stage_counts_in_an_argument_is_the_plain_loops(kind, schedule, by_name) -> None:
    """The recording's counts, and a fake tensor, stayed in it."""
    make, use = KINDS[kind]
    net = Uses(use)
    plain = copy.deepcopy(net).to(stages(1)[0])
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    ours, its = make(), make()
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    for _ in range(1 if kind == "collector" else 2):
        args, kwargs = ((x,), {"given": ours}) if by_name else ((x, ours), {})
        loss = pipe.forward_backward(*args, target=y, loss_fn=mse_loss, **kwargs).loss
        its_kwargs = {"given": its}
        expected = plain_step(plain, (x.to(stages(1)[0]),), its_kwargs, y, mse_loss, 4)
        assert_close(loss, expected)
        assert_same_gradients(net, plain)
    if kind == "collector":
        assert [type(held) for held in ours] == [torch.Tensor] * 4


def _sets(given: Any, h: Tensor) -> Tensor:
    given.n = h.sum().item()
    return h


def _reads(given: Any, h: Tensor) -> Tensor:
    return h * given.n


def test_a_value_when_one_stage_sets_it_in_an_argument_and_another_reads_it_is_refused() -> None:
    """Another micro-batch's value was read from the second step on, silently."""
    pipe = bp.Pipeline(Uses(_sets, _reads), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"attribute 'n' of a State on hops \[0\].*hops \[1\]"):
        pipe.forward_backward(torch.randn(8, 4), State(), loss_fn=torch.sum)


@pytest.mark.parametrize("schedule", ["1f1b", "sequential"])
def test_a_list_of_tensors_when_the_forward_adds_to_it_is_refused(schedule: str) -> None:
    """Each micro-batch has a copy of it, with the tensors of its devices: what it added was lost."""
    pipe = bp.Pipeline(
        Uses(_collects_tensors),
        devices=stages(2),
        chunks=4,
        schedule=schedule,
        batch_dims={"given": None},
    )
    with pytest.raises(StateError, match="argument of type list that holds tensors"):
        pipe.forward_backward(torch.randn(8, 4), [torch.zeros(())], loss_fn=torch.sum)


@pytest.mark.parametrize("report", ["summary", "verify", "memory"])
def test_a_report_leaves_an_argument_as_it_was(report: str) -> None:
    pipe = bp.Pipeline(Uses(_counts), devices=stages(2), chunks=4)
    given: dict[str, int] = {}
    getattr(pipe, report)(
        torch.randn(8, 4), given, **({"loss_fn": torch.mean} if report == "verify" else {})
    )
    assert not given


@dataclass
class Memory:
    state: Tensor


HELD: dict[
    str, tuple[Callable[[], Any], Callable[[Any], Tensor], Callable[[Any, Tensor], None]]
] = {
    "list": (
        lambda: [torch.zeros(8, 4)],
        lambda given: given[0],
        lambda given, h: given.__setitem__(0, h),
    ),
    "dict": (
        lambda: {"state": torch.zeros(8, 4), "n": 0},
        lambda given: given["state"],
        lambda given, h: given.update(state=h, n=given["n"] + 1),
    ),
    "dataclass": (
        lambda: Memory(torch.zeros(8, 4)),
        lambda given: given.state,
        lambda given, h: setattr(given, "state", h),
    ),
}


@pytest.mark.parametrize("schedule", ["1f1b", "sequential", "uncut"])
@pytest.mark.parametrize(("make", "get", "put"), HELD.values(), ids=HELD)
def test_a_state_in_a_container_when_it_is_passed_again_is_refused(
    make: Callable[[], Any], get: Any, put: Any, schedule: str
) -> None:
    """Each call began with the first call's state."""

    def steps(given: Any, h: Tensor) -> Tensor:
        h = h + get(given)
        put(given, h.detach())
        return h

    net, x = Uses(steps), torch.randn(8, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    given = make()
    for _ in range(2):
        pipe.forward_backward(x, make(), loss_fn=torch.sum)  # another one each time
    pipe.forward_backward(x, given, loss_fn=torch.sum)
    with pytest.raises(
        StateError, match=r"has set .* of an argument of type (list|dict|Memory).*:\d+"
    ):
        pipe.forward_backward(x, given, loss_fn=torch.sum)
    pipe.forward_backward(x, given, loss_fn=torch.sum)
    put(given, torch.ones(8, 4))  # as the caller does
    pipe.forward_backward(x, given, loss_fn=torch.sum)
    assert copy.deepcopy(pipe)(x, given).shape == (8, 4)


def test_a_container_whose_entries_the_forward_only_adds_to_may_be_passed_again() -> None:
    def adds(given: Any, h: Tensor) -> Tensor:
        given["doubled"] = given["x"] * 2
        return h + given["doubled"]

    pipe, x = bp.Pipeline(Uses(adds), devices=stages(2), chunks=4), torch.randn(8, 4)
    given = {"x": x}
    for _ in range(2):
        pipe.forward_backward(x, given, loss_fn=torch.sum)
    assert [*given] == ["x"]
