"""Tensors of a recording that are alive after it."""

import pytest
import torch

from blockpipe.errors import RecordingError
from blockpipe.restoring.leaked_tensors import TrackedFakes


class Held:
    """Holds tensors in dictionaries, as what watches a forward does."""


class OfBlockpipe(Held):
    """One of Blockpipe's own."""

    __module__ = "blockpipe.recording"


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
