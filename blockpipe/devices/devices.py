"""The devices of this machine, and what a user calls them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .._common.thread_state import as_ours
from ..errors import DeviceError, PlanError


def is_on_meta(model: nn.Module) -> bool:
    """Whether a model is without values, as a whole or in part."""
    return any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def is_asynchronous(device: torch.device) -> bool:
    """Whether work on this device is queued on streams: an accelerator, not CPU or meta."""
    return device.type not in ("cpu", "meta")


@as_ours
def check_device(device: Any) -> torch.device:
    """A device with its index, checked to be there; without one it is the current device.

    Raises:
        DeviceError: no such device on this machine.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(
            f"a device is a torch.device or a name such as 'cpu' or 'cuda:0', but {device!r} came"
        ) from error
    if found.type == "meta":
        raise DeviceError(
            "a stage computes, but device 'meta' holds no values; record(model, args) and its "
            "summary work without devices"
        )
    if not is_asynchronous(found):
        return torch.device(found.type)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator is not None else 0
    is_kind = accelerator is not None and accelerator.type == found.type
    if found.index is None and is_kind and count:  # as torch has it
        return torch.device(found.type, torch.accelerator.current_device_index())
    if not is_kind or (found.index or 0) >= count:
        have = f"{accelerator.type}:0..{count - 1}" if accelerator is not None else "only the CPU"
        raise DeviceError(
            f"device {str(found)!r} is not there: this machine has {have}; "
            "pass devices that exist, or devices=['cpu'] * stages to try without"
        )
    return torch.device(found.type, found.index or 0)


def default_devices() -> list[torch.device] | None:
    """Every accelerator device of the machine, or ``None`` where there is only the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    return [torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())]


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream that computes on a device; ``None``: the host."""
    return torch.accelerator.current_stream(device) if is_asynchronous(device) else None


def mark(device: torch.device) -> torch.Event | None:
    """An event behind what is queued on a device so far; ``None``: nothing ever is."""
    stream = current_stream(device)
    return None if stream is None else stream.record_event()


def checked_devices(devices: Sequence[Any] | None) -> list[torch.device] | None:
    """A list of devices, one for each stage, each checked; ``None`` stays.

    Raises:
        PlanError: it is no such list.
        DeviceError: one is not there.
    """
    if devices is None:
        return None
    if isinstance(devices, str | torch.device | int):
        if isinstance(devices, int) and not isinstance(devices, bool):
            raise PlanError(
                "devices is a list with one device for each stage, but a number came; write "
                f"devices={[*range(devices)]} for the first {devices} accelerators, or "
                f"devices=['cpu'] * {devices}"
            )
        name = str(devices) if isinstance(devices, torch.device) else devices
        raise PlanError(
            f"devices is a list with one device for each stage, but {name!r} came; "
            f"write devices=[{name!r}, …]"
        )
    if not isinstance(devices, Sequence):
        raise PlanError(
            f"devices is a list with one device for each stage, but {type(devices).__name__} came; "
            "write devices=[…], in the order of the stages"
        )
    checked = [check_device(device) for device in devices]
    if not checked:
        raise PlanError("devices is empty; pass one for each stage, or None for all there are")
    kinds = {device.type for device in checked if is_asynchronous(device)}
    if len(kinds) > 1:
        raise PlanError(f"stages are on accelerators of one kind, but {sorted(kinds)} came")
    return checked
