"""``tpc``: which rank of the pipeline asks, and how many there are."""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed

from ..._common.callsite import users_line
from ..._common.checks import did_you_mean, expected, is_integer
from ..._common.hints import REPLICATED
from ...devices.devices import default_devices
from ...errors import PlanError, UsageError
from .ranks import current_rank, current_ranks

_MODES = ("data", "tensor", "pipe", "model", "global")
_REFUSED = {
    "data": "copies on other devices of this process are blockpipe.replicas.Replicas; with a "
    f"process for each copy {REPLICATED}",
    "tensor": "layers that are split over devices are not part of a pipeline",
}


class ProcessTopology:
    """The ranks of this process: those of the pipeline, and no others.

    There is one, :data:`tpc`. Outside of :func:`launch` the process is every rank at once, so it is
    the first and the last of its pipeline.

    Source: ``torchdistpackage.dist.process_topo.ProcessTopology``.

    Example:
        >>> from blockpipe.compat.torchdistpackage import ProcessTopology
        >>> topology = ProcessTopology()
        >>> topology.setup_process_groups([("data", 1), ("pipe", 4)])
        >>> topology.get_group_size("pipe"), topology.is_first_in_pipeline_group()
        (4, True)
    """

    def __init__(self) -> None:
        self._stages: int | None = None
        self._devices: list[Any] | None = None

    def setup_process_groups(
        self, config: Iterable[tuple[str, int]], devices: Sequence[Any] | None = None
    ) -> None:
        """Say how many stages the pipeline has.

        Args:
            config: pairs of a name and a size; ``("pipe", 4)`` is for four stages. Other sizes
                are 1: they are for other processes.
            devices: what torchdistpackage has no word for: the device of each stage. ``None``: the
                accelerators in their order, or threads on the CPU.

        Raises:
            PlanError: an unknown name, or a size that is not a positive integer; a number of
                devices that is not that of the stages.
            UsageError: a size that needs several processes; several processes.
        """
        refuse_processes()
        stages = 1
        for mode, size in config:
            if mode not in _MODES:
                known = did_you_mean(str(mode), _MODES)
                raise PlanError(f"there is no mode {mode!r} ({users_line()}); {known}")
            if not is_integer(int(size), 1) or int(size) != size:
                raise PlanError(expected("a positive integer", size, for_=f"the size of {mode!r}"))
            if mode == "pipe":
                stages = int(size)
            elif size != 1:
                fix = _REFUSED.get(mode, "leave it out")
                raise UsageError(expected("1 in one process", size, for_=f"{mode!r}", fix=fix))
        ranks = current_ranks()
        if ranks is not None and ranks.size != stages:
            contract = f"{ranks.size}, the number of launched ranks,"
            raise PlanError(expected(contract, stages, for_="the size of 'pipe'"))
        if devices is not None and len(devices) != stages:
            raise PlanError(expected(f"a device for each of {stages} stages", list(devices)))
        self._stages = stages
        self._devices = None if devices is None else list(devices)

    # --- questions

    def get_group_size(self, mode: str) -> int:
        """Return the number of ranks in the group ``mode``."""
        if mode not in ("pipe", "model", "global"):
            return 1
        ranks = current_ranks()
        if ranks is not None:
            return ranks.size
        return self._stages or len(default_devices() or [None])

    def get_group_rank(self, mode: str) -> int:
        """Return the rank in the group ``mode``; outside of :func:`launch` it is 0."""
        return (current_rank() or 0) if mode in ("pipe", "model", "global") else 0

    def get_ranks_in_group(self, mode: str) -> list[int]:
        """Return the ranks of the group ``mode``."""
        if mode in ("pipe", "model", "global"):
            return list(range(self.get_group_size(mode)))
        return [current_rank() or 0]

    def get_group(self, mode: str) -> str:
        """Return a group for ``dist.broadcast``: its name, ``mode``."""
        return mode

    def is_first_in_group(self, mode: str) -> bool:
        """Return whether this is the first rank of the group ``mode``."""
        return self.get_group_rank(mode) == 0

    def is_last_in_group(self, mode: str) -> bool:
        """Return whether this is the last rank of the group ``mode``, or all of them."""
        is_all = mode not in ("pipe", "model", "global") or current_rank() is None
        return is_all or self.get_group_rank(mode) == self.get_group_size(mode) - 1

    def is_first_in_pipeline_group(self) -> bool:
        """Return whether this is the pipeline's first rank."""
        return self.is_first_in_group("pipe")

    def is_last_in_pipeline_group(self) -> bool:
        """Return whether this is the pipeline's last rank, or all of them."""
        return self.is_last_in_group("pipe")

    def is_mode_inited(self, mode: str) -> bool:
        """Return whether the group ``mode`` has several ranks."""
        return self.get_group_size(mode) > 1

    def get_pp_rank(self) -> int:
        """Return the rank in the pipeline."""
        return self.get_group_rank("pipe")

    def get_pp_size(self) -> int:
        """Return the number of stages."""
        return self.get_group_size("pipe")

    def stage_devices(self) -> list[Any]:
        """Return the device of each stage.

        Raises:
            PlanError: the machine has fewer accelerators than there are stages.
        """
        if self._devices is not None:
            return self._devices
        stages, devices = self.get_group_size("pipe"), default_devices()
        if devices is None:  # on the CPU a number is a thread
            return [f"cpu:{stage}" for stage in range(stages)]
        if len(devices) < stages:
            raise PlanError(
                f"expected an accelerator for each of {stages} stages, got {len(devices)} "
                f"({users_line()}); pass devices= to setup_process_groups, in which one may be "
                "named several times"
            )
        return list(devices[:stages])

    def __getattr__(self, name: str) -> NoReturn:
        hint = did_you_mean(name, [each for each in dir(type(self)) if not each.startswith("_")])
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}; {hint}")


tpc = torch_parallel_context = ProcessTopology()


def is_using_pp() -> bool:
    """Return whether the pipeline has several stages.

    Example:
        >>> from blockpipe.compat.torchdistpackage import is_using_pp, launch
        >>> launch(is_using_pp, 2)
        [True, True]
    """
    return tpc.is_mode_inited("pipe")


def refuse_processes() -> None:
    """Raise an error if this process is one of several.

    Raises:
        UsageError: it is.
    """
    is_there = torch.distributed.is_available() and torch.distributed.is_initialized()
    if is_there and torch.distributed.get_world_size() > 1:
        raise UsageError(
            f"expected one process, got one of {torch.distributed.get_world_size()} "
            f"({users_line()}): the stages are devices of one process, and a second one would run "
            "all of them again; start the script without torchrun, and by launch(main, stages) if "
            "it asks for its rank"
        )
