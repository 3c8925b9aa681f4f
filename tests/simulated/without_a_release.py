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
from blockpipe.ambient import waiting_for_device

from . import set_delay
from .mutants import RELEASES, mutants, without

LOCKING = ["lanes", "randomness", "ambient"]


others_wait = threading.Event()


class Noisy(nn.Module):
    """Draws, and asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bp.current_stage() == 0 and bp.current_microbatch() == 2:
            others_wait.set()  # micro-batch 1 has gone on to its border
        x = nn.functional.dropout(self.layer(x), 0.1)
        return x if float(x.detach().sum()) < 1e9 else x * 2


def steps() -> None:
    """Some that succeed, one that fails, and some more, from several threads."""
    net = bp.begin_blocks(nn.Sequential(Noisy(), Noisy()), {"1": 1})
    devices = ["simulated:0", "simulated:1"]
    pipe = bp.Pipeline(net, devices=devices, chunks=3, checkpoint="always", schedule="gpipe")
    x = torch.randn(6, 8)

    def step() -> None:
        pipe.forward_backward(x, loss_fn=lambda output: output.square().mean())

    def fails(output: torch.Tensor) -> torch.Tensor:
        with waiting_for_device():
            others_wait.wait()
        raise ValueError("not this one")

    step(), step()
    others_wait.clear()
    try:
        pipe.forward_backward(x, loss_fn=fails)
    except ValueError:
        pass
    else:
        raise AssertionError("it did not fail")
    step()
    other = threading.Thread(target=step, daemon=True)
    other.start()
    other.join()
    step()


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
