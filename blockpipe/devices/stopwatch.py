"""Time on a device: by its events if it queues work, else by the host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from .devices import is_asynchronous


class Stopwatch:
    """A clock of a device, in seconds: stamped as work is issued, read when it is done.

    Args:
        device: the device. On an accelerator a host clock would time the launches, and not the
            work.
        clock: the host's clock, in seconds.
    """

    def __init__(
        self, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.device = device
        self.is_asynchronous = is_asynchronous(device)
        self._clock = clock

    def now(self) -> Any:
        """Return a stamp of the work issued so far."""
        if not self.is_asynchronous:
            return self._clock()
        return torch.accelerator.current_stream(self.device).record_event(
            torch.Event(self.device, enable_timing=True)
        )

    def wait(self) -> None:
        """Wait until all issued work is done."""
        if self.is_asynchronous:
            torch.accelerator.synchronize(self.device)

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the time between two stamps, after :meth:`wait`."""
        if self.is_asynchronous:
            return float(begin.elapsed_time(end)) / 1e3
        return float(end - begin)
