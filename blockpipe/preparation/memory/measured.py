"""The memory of a step, measured: by the accelerators' allocators, or by counting live tensors."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..._common.nested import tensors
from ..._torch.modes import DispatchMode
from ..._torch.tensors import storage_id
from ...costs.work import size_of
from ...devices.devices import is_asynchronous
from ...stages.cursor import current_stage


class LiveBytes(DispatchMode):
    """Counts the bytes of the storages that operations make, as long as they live, by stage.

    It is for the CPU, whose allocator counts nothing. It goes with a step into its threads.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now: dict[int, int] = {}
        self.peak: dict[int, int] = {}
        self._lock = threading.RLock()
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {storage_id(t.untyped_storage()) for t in tensors((args, kwargs)) if _is_plain(t)}
        result = func(*args, **kwargs)
        stage = current_stage() or 0
        for tensor in tensors(result):
            if _is_plain(tensor):
                storage = tensor.untyped_storage()
                key = storage_id(storage)
                if key not in given and key not in self._known:
                    self._count(storage, stage)
        return result

    def _count(self, storage: torch.UntypedStorage, stage: int) -> None:
        key, size = storage_id(storage), storage.nbytes()
        with self._lock:
            self._known.add(key)
            self.now[stage] = self.now.get(stage, 0) + size
            self.peak[stage] = max(self.peak.get(stage, 0), self.now[stage])
        weakref.finalize(storage, self._gone, key, size, stage)

    def _gone(self, key: int, size: int, stage: int) -> None:
        with self._lock:
            self._known.discard(key)
            self.now[stage] -= size


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta"


@contextmanager
def measured(
    model: nn.Module,
    devices: Sequence[torch.device],
    stage_of: Mapping[int, int],
    optimizer: object = None,
) -> Iterator[dict[int, int]]:
    """Measure the peaks of the code that runs inside.

    An accelerator's allocator is asked, which knows devices and not stages. On the CPU
    :class:`LiveBytes` counts what is made, beside the bytes that are there already.

    Args:
        model: the model; its parameters, buffers and gradients are there already.
        devices: the device of each stage.
        stage_of: from the ``id`` of a parameter or buffer to its stage.
        optimizer: an optimizer whose state is there already; other values are ignored.

    Yields:
        From a stage to its peak in bytes; filled in at the end.
    """
    peaks: dict[int, int] = {}
    accelerators = {d for d in devices if is_asynchronous(d)}
    for device in accelerators:
        torch.accelerator.synchronize(device)
        # At an allocation the allocator notices which blocks are free again.
        torch.empty(1, device=device)
        torch.accelerator.reset_peak_memory_stats(device)
    there = dict.fromkeys(range(len(devices)), 0)
    for tensor in (*model.parameters(), *model.buffers()):
        stage = stage_of.get(id(tensor), 0)
        state = optimizer.state.get(tensor, {}) if isinstance(optimizer, Optimizer) else {}
        gradient = [] if tensor.grad is None else [tensor.grad]
        there[stage] += sum(map(size_of, (tensor, *gradient, *tensors(dict(state)))))
    live = LiveBytes()
    with live:
        yield peaks
    for stage, device in enumerate(devices):
        if device in accelerators:
            # Not what is allocated: what was freed, but is still used on another stream, is memory
            # that nothing else can have.
            peaks[stage] = torch.accelerator.memory_stats(device)["active_bytes.all.peak"]
        else:
            peaks[stage] = there[stage] + live.peak.get(stage, 0)
