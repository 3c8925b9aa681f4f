"""Threads that a forward itself starts, or gives work."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import blockpipe as bp
from blockpipe.errors import CrossingError

from ..models import Scripted, square
from ..stage_devices import stages


def test_a_branch_that_another_thread_computes_is_refused_by_the_name_of_the_thread() -> None:
    """The error named torch.func alone, which was not there."""
    with ThreadPoolExecutor(1, thread_name_prefix="branches") as pool:

        def forward(s: Any, x: Tensor) -> Tensor:
            with bp.Block(0):
                h = s.a(x)
            with bp.Block(1):
                return pool.submit(torch.sin, h).result() + s.b(h)

        pipe = bp.Pipeline(Scripted(forward), devices=stages(2), chunks=2)
        with pytest.raises(CrossingError, match=r"as in another thread \(there is 'branches_0'\)"):
            pipe.forward_backward(torch.randn(4, 4), loss_fn=square)


def test_a_thread_that_fails_on_fake_tensors_makes_the_recording_real(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its traceback was printed, and the recording went on without what it sets."""
    means: list[float] = []

    def forward(s: Any, x: Tensor) -> Tensor:
        with bp.Block(0):
            h = s.a(x)
            value = h.detach()
            thread = threading.Thread(target=lambda: means.append(float(value.mean())))
            thread.start()
            thread.join()
        with bp.Block(1):
            return s.b(h)

    net = Scripted(forward)
    recording = bp.record(net, torch.randn(2, 4))
    assert not recording.fake
    assert "DataDependent" in (recording.why_real or "")
    bp.Pipeline(net, devices=stages(2), chunks=2).forward_backward(
        torch.randn(4, 4), loss_fn=square
    )
    assert len(means) == 2
    assert "Traceback" not in capfd.readouterr().err
