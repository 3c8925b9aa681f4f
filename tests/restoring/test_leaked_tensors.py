"""Tensors of a recording that are alive after it."""

import sys
import types
from contextvars import ContextVar

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import blockpipe as bp
from blockpipe.errors import RecordingError
from blockpipe.restoring import leaked_tensors
from blockpipe.restoring.leaked_tensors import TrackedFakes

from ..alike import check_trains_alike


class Held:
    """Holds tensors in dictionaries, as what watches a forward does."""


class OfBlockpipe(Held):
    """One of Blockpipe's own."""

    __module__ = "blockpipe.recording"


def test_what_only_a_graph_that_keeps_itself_holds_is_no_leak():
    """A hook that gives a result back as it is makes a cycle that no collector sees, until a
    backward; here the hook reads a tensor."""
    mode = TrackedFakes()

    def computed(kept: list[object]) -> None:
        h = torch.empty(4, requires_grad=True) * 2
        pack = lambda tensor: tensor if tensor.shape == h.shape else tensor.clone()  # noqa: E731
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            h.tanh()
        kept.append(pack)

    with mode:
        computed([])
        mode.check_nothing_is_left()
        computed(elsewhere := [])
        with pytest.raises(RecordingError, match="in a cell, in a tuple, in a function"):
            mode.check_nothing_is_left()
    del elsewhere


@pytest.mark.parametrize("kind", [Held, OfBlockpipe])
def test_what_blockpipe_holds_for_a_waiting_thread_is_no_leak(kind: type[Held]):
    """A recorder that another thread's call holds does not make the user's forward wrong."""
    holder, mode = kind(), TrackedFakes()
    with mode:
        holder.slots = {"b": {"bias": torch.empty(4)}}
    if kind is OfBlockpipe:
        mode.check_nothing_is_left()
    else:
        with pytest.raises(RecordingError, match=r"'bias', in a dict under 'b', in Held\.slots"):
            mode.check_nothing_is_left()


def test_a_tensor_in_a_context_variable_is_said_to_be_in_that():
    """The error named the nodes of a table that no program knows."""
    variables, mode = [ContextVar[object](f"variable {i}") for i in range(40)], TrackedFakes()
    before = [variable.set(None) for variable in variables]
    with mode:
        variables[7].set([torch.empty(4)])
        with pytest.raises(RecordingError, match="in a list, in the context variable 'variable 7'"):
            mode.check_nothing_is_left()
    for variable, token in zip(variables, before, strict=True):
        variable.reset(token)


class SetsAttribute(nn.Module):
    """Sets an attribute of a tensor whose graph leads back to the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            x = x.tanh()
            x.gate = self.a(x).softmax(-1)
            h = x * x.gate
        with bp.Block(stage=1):
            return self.b(h) + x.gate


def test_a_tensor_that_another_one_of_the_recording_has_is_no_leak():
    """Attack 22: the first one's graph keeps the other one."""
    check_trains_alike(SetsAttribute())


@pytest.mark.slow
def test_frames_that_a_profiler_keeps_leave_nothing():
    """A thread that watches others kept what our own calls had in their variables for a moment."""
    kept: list[types.FrameType] = []

    def keep(frame: types.FrameType, *_: object) -> None:
        if frame.f_globals.get("__name__") == leaked_tensors.__name__:
            kept.append(frame)

    sys.setprofile(keep)
    try:
        check_trains_alike(SetsAttribute())
    finally:
        sys.setprofile(None)
    assert any(frame.f_code.co_name == "check_nothing_is_left" for frame in kept)
