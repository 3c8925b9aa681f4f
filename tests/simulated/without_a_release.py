"""Steps with one release of a lock left out: ends with 1 if they hang or fail then, with 0 if not,
and with 2 if they do already as they are.

    python -m tests.simulated.without_a_release NUMBER
"""

import os
import sys
import threading
import time
from collections.abc import Callable

import torch
from torch import nn

import blockpipe as bp
from blockpipe._common.threads.thread_state import waiting_for_device

from ..models import square
from . import set_delay
from .mutants import RELEASES, mutants, without

LOCKING = ["execution.lanes.lane_threads", "devices.rng_streams", "_common.threads.thread_state"]
DEVICES = ["simulated:0", "simulated:1"]
CHUNKS = 3


class Noisy(nn.Module):
    """Draws, and asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.layer(x), 0.1)
        return x if float(x.detach().sum()) < 1e9 else x * 2


class Tells(nn.Linear):
    """Says when the last micro-batch comes to it: those before it are at their next border."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.last_is_here = threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bp.current_microbatch() == CHUNKS - 1:
            self.last_is_here.set()
        return super().forward(x)


def steps() -> None:
    """Some that succeed, one that fails while others wait, and some more, from several threads."""
    net = bp.begin_blocks(nn.Sequential(Noisy(), Noisy()), {"1": 1})
    pipe = bp.Pipeline(net, devices=DEVICES, chunks=CHUNKS, checkpoint="always")
    x = torch.randn(6, 8)

    def step() -> None:
        pipe.forward_backward(x, loss_fn=square)

    step(), step()
    fail_while_others_wait()
    step()
    other = threading.Thread(target=step, daemon=True)
    other.start()
    other.join()
    step()


def fail_while_others_wait() -> None:
    """Micro-batch 0 fails in its loss, when micro-batch 1 waits for its turn there."""
    first = Tells()
    net = bp.begin_blocks(nn.Sequential(first, nn.Linear(8, 8)), {"1": 1})
    pipe = bp.Pipeline(net, devices=DEVICES, chunks=CHUNKS, schedule="gpipe")
    x = torch.randn(6, 8)
    pipe.forward_backward(x, loss_fn=square)
    first.last_is_here.clear()

    def fails(output: torch.Tensor) -> torch.Tensor:
        with waiting_for_device():
            first.last_is_here.wait()
        raise ValueError("not this one")

    try:
        pipe.forward_backward(x, loss_fn=fails)
    except ValueError:
        return
    raise AssertionError("it did not fail")


def ends(function: Callable[[], None], seconds: float) -> bool:
    """Whether it returns within so many seconds."""
    done = []
    thread = threading.Thread(target=lambda: done.append(function()), daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(done)


def main() -> int:
    set_delay(0, 200, 0.2, 0)
    begun = time.perf_counter()
    if not ends(steps, 120):
        return 2
    took = time.perf_counter() - begun
    with without(mutants(LOCKING, RELEASES)[int(sys.argv[1])]):
        return 0 if ends(steps, 3 + 3 * took) else 1


if __name__ == "__main__":
    status = main()
    os._exit(status)  # threads that hang are not waited for
