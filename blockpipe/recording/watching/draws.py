"""Note the hops and calls of a recorded forward that draw random numbers."""

from __future__ import annotations

from typing import Any

import torch

from ..._common.callsite import users_line
from ..._torch.tensors import generator_id
from ...crossing.microbatch_run import MicrobatchRun
from ...devices.rng_streams import current, host_sources, moved
from ..entries import GeneratorUse
from ..recording import Recording
from .calls import CallsUnderWay


class RandomDraws:
    """A record of the calls and hops that draw random numbers.

    Args:
        run: the run that is watched.
        result: the recording that the draws are added to.
        calls: the calls under way.

    Attributes:
        generators: the uses of each generator of the user, by its :data:`generator_id`.
    """

    def __init__(self, run: MicrobatchRun, result: Recording, calls: CallsUnderWay) -> None:
        self.generators: dict[int, GeneratorUse] = {}
        self._kept: list[torch.Generator] = []  # alive, so that no other one gets its number
        self._run = run
        self._result = result
        self._calls = calls
        self._host_states: dict[Any, Any] = {}

    def begin(self) -> None:
        """Note the generators' states when the forward begins."""
        self._host_states = current(host_sources())

    def look(self) -> None:
        """Note whether the hop has drawn from Python's or numpy's generator since the last look,
        which no function mode sees."""
        if self._result.hops:
            draws = self._result.hops[max(self._run.hop, 0)].draws
            draws.update(map(str, moved(self._host_states)))
        self._host_states = current(host_sources())

    def drew(self, generator: torch.Generator | None) -> None:
        """Note that an operation drew random numbers.

        Args:
            generator: the user's generator, if the operation takes one.
        """
        if generator is not None and not _is_the_devices(generator):
            self._calls.refuse(f"it draws from a generator of its own ({line()})")
            self._kept.append(generator)
            key = generator_id(generator)
            drawn = self.generators.setdefault(key, GeneratorUse([], users_line()))
            hop = max(self._run.hop, 0)
            drawn.hops += [] if hop in drawn.hops else [hop]
            return
        self.sets_state("torch")
        for call in self._calls:
            call.draws = True

    def sets_state(self, kind: str) -> None:
        """Note that code gives a generator of the process a state: it draws, even if the state is
        the same in the end."""
        self._result.hops[self._run.arrive()].draws.add(kind)  # perhaps the first of its hop


def _is_the_devices(generator: torch.Generator) -> bool:
    """Return whether a generator is that of a device, from which each operation draws that is given
    none: ``torch.default_generator``."""
    kind = generator.device.type
    found = (
        () if kind == "cpu" else getattr(torch.get_device_module(kind), "default_generators", ())
    )
    return generator_id(generator) in map(generator_id, (torch.default_generator, *found))


def line() -> str:
    """Return the user's file, without its folder, and line."""
    return users_line().rpartition("/")[2]
