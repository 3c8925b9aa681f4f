"""State that two stages come to share between steps, or by its memory alone."""

import gc
import random
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, is_simulated, stages


class Part(nn.Module):
    """Uses a state of its own, as a test says."""

    def __init__(self, state: Any, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(4, 4), use
        if isinstance(state, Tensor):
            self.register_buffer("state", state)
        else:
            self.state = state

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.state, self.layer(x))


def _averages(mean: Tensor, x: Tensor) -> Tensor:
    mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return x - mean


def _counts(state: Any, x: Tensor) -> Tensor:
    state.count += 1
    return x * state.count


def _collects(state: Any, x: Tensor) -> Tensor:
    state.append(len(state))
    return x * len(state)


def _draws(state: Any, x: Tensor) -> Tensor:
    return x * state.random()


def _draws_tensors(state: Any, x: Tensor) -> Tensor:
    return x * torch.rand(4, generator=state).to(x.device)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor]]] = {
    "buffer": (lambda: torch.zeros(4), _averages),
    "namespace": (lambda: SimpleNamespace(count=0), _counts),
    "list": (list, _collects),
    "deque": (deque, _collects),
    "random": (lambda: random.Random(0), _draws),
    "generator": (torch.Generator, _draws_tensors),
}


def _net(kind: str) -> nn.Sequential:
    make, use = KINDS[kind]
    return bp.begin_blocks(nn.Sequential(Part(make(), use), Part(make(), use)), {"1": 1})


def _step(pipe: bp.Pipeline) -> Any:
    x = torch.ones(8, 4)
    return pipe.forward_backward(x, target=x, loss_fn=mse_loss)


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_that_two_stages_come_to_share_is_refused(kind: str) -> None:
    """The model is recorded again: nothing but the identity of what an attribute holds tells."""
    net = _net(kind)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    _step(pipe)
    net[1].state = net[0].state
    with pytest.raises(StateError, match="under way at once|lives on stage|depend on timing"):
        _step(pipe)


def _averages_an_entry(state: Any, x: Tensor) -> Tensor:
    return _averages(state["mean"].to(x.device), x)


def _averages_an_element(state: Any, x: Tensor) -> Tensor:
    return _averages(state[0].to(x.device), x)


def _counts_in_an_entry(state: Any, x: Tensor) -> Tensor:
    state["of"]["counts"][0] += 1
    return x * state["of"]["counts"][0]


WITHIN: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor], Any]] = {
    "an entry": (lambda: {"mean": torch.zeros(4)}, _averages_an_entry, "mean"),
    "an element": (lambda: [torch.zeros(4)], _averages_an_element, 0),
    "a deep entry": (lambda: {"of": {"counts": [0]}}, _counts_in_an_entry, "of"),
}


@pytest.mark.skipif(is_simulated(), reason="a plain tensor is on one device")
@pytest.mark.parametrize("kind", WITHIN)
def test_what_a_container_holds_when_two_stages_come_to_share_it_is_refused(kind: str) -> None:
    make, use, key = WITHIN[kind]
    parts = Part(make(), use), Part(make(), use)
    net = bp.begin_blocks(nn.Sequential(*parts), {"1": 1})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    for _ in range(2):
        _step(pipe)
    parts[1].state[key] = parts[0].state[key]
    with pytest.raises(StateError, match="under way at once"):
        _step(pipe)


SHARED: dict[str, Callable[[Tensor], Tensor]] = {
    "a view": lambda mean: mean[:],
    "a detached one": lambda mean: mean.detach(),
    "a part": lambda mean: mean.expand(4, 4)[0],
    "an array": lambda mean: torch.from_numpy(mean.numpy()),
}


@pytest.mark.skipif(is_simulated(), reason="each device has a memory of its own")
@pytest.mark.parametrize("how", SHARED)
@pytest.mark.parametrize("is_late", [False, True])
def test_tensors_of_one_memory_on_two_stages_are_refused(how: str, is_late: bool) -> None:
    """Each is written on its own stage, and the other one's with it."""
    net = _net("buffer")
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    if is_late:
        _step(pipe)
    net[1].state = SHARED[how](net[0].state)
    with pytest.raises(StateError, match=r"'0\.state' and '1\.state' have the same memory.*clone"):
        _step(pipe)


@pytest.mark.skipif(is_simulated(), reason="each device has a memory of its own")
def test_buffers_that_are_given_one_memory_by_data_between_steps_are_refused() -> None:
    net = _net("buffer")
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    _step(pipe)
    net[1].state.data = net[0].state.data
    with pytest.raises(StateError, match="have the same memory"):
        _step(pipe)


@pytest.mark.skipif(is_simulated(), reason="each device has a memory of its own")
def test_batch_norms_that_were_given_each_others_state_are_refused() -> None:
    layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict(), assign=True)
    net = bp.begin_blocks(nn.Sequential(*layers), {"1": 1})
    with pytest.raises(StateError, match="have the same memory"):
        _step(bp.Pipeline(net, devices=stages(2), chunks=4))


def test_slices_of_one_memory_that_lie_side_by_side_are_each_their_own() -> None:
    """And what is only read may be shared."""
    flat, table = torch.zeros(8), torch.ones(4)

    def net() -> nn.Sequential:
        parts = [Part(flat.clone()[:4], _averages), Part(torch.zeros(4), _averages)]
        parts[1].state = parts[0].state.new_zeros(8)[4:]
        for part in parts:
            part.register_buffer("table", table[:], persistent=False)
        return bp.begin_blocks(nn.Sequential(*parts), {"1": 1})

    one, plain = net(), net()
    plain.load_state_dict(one.state_dict())
    pipe = bp.Pipeline(one, devices=stages(2), chunks=4)
    for _ in range(2):
        x = torch.ones(8, 4)
        assert_close(_step(pipe).loss, plain_step(plain, (x,), {}, x, mse_loss, 4))
    assert_same_gradients(one, plain)


def _moves(memory: Any, x: Tensor) -> Tensor:
    return x + torch.as_tensor(memory, dtype=x.dtype).to(x.device).sum()


def test_state_that_is_replaced_in_each_step_is_recorded_once() -> None:
    """Places that hold other objects, none of them twice, are the same pattern."""
    parts = [Part(numpy.ones(2), _moves), Part(numpy.ones(2), _moves)]
    net = bp.begin_blocks(nn.Sequential(*parts), {"1": 1})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    _step(pipe)
    first = pipe.recording
    for _ in range(3):
        for part in parts:
            part.state = numpy.ones(2)
        _step(pipe)
    assert pipe.recording is first


class Caches(nn.Module):
    """Leaves a tensor with its graph in a dictionary of its own, which each forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.entry: dict[str, Any] = {"h": None}
        self.table: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.entry["h"], self.table = h, {"h": h.sin()}
        return h.tanh()


def test_what_a_forward_has_replaced_is_not_kept() -> None:
    """To look for shared places kept the tensors that were there when the model was recorded, or
    at the step before, with their graphs."""
    net = bp.begin_blocks(nn.Sequential(Caches(), Caches()), {"1": 1})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    kept: list[list[weakref.ref[Tensor]]] = []
    for step in range(4):
        _step(pipe)
        if step == 1:  # another recording, with these tensors in reach
            with torch.no_grad():
                pipe.eval()(torch.ones(8, 4))
                pipe.train()
        gc.collect()
        assert not any(ref() is not None for refs in kept for ref in refs)
        kept.append([weakref.ref(net[0].entry["h"]), weakref.ref(net[0].table["h"])])
