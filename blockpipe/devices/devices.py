"""The devices of this machine, and the names by which a user passes them."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from .._common.checks import expected, is_integer
from .._common.threads.thread_state import as_ours
from ..errors import DeviceError, PlanError

Devices = Sequence[Any] | int | Literal["auto"] | None
"""A device for each stage, a number of devices, or all that there are."""


def is_on_meta(model: nn.Module) -> bool:
    """Return whether a model, or a part of it, has no values."""
    return any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def is_asynchronous(device: torch.device) -> bool:
    """Return whether work on this device is queued on streams: an accelerator, not CPU or meta."""
    return device.type not in ("cpu", "meta")


@as_ours
def check_device(device: Any) -> torch.device:
    """Return a device with its index, and check that it exists.

    An accelerator without an index is the current device.

    Raises:
        DeviceError: this machine has no such device.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        contract = "a torch.device or a name such as 'cpu' or 'cuda:0'"
        raise DeviceError(expected(contract, device, for_="a device")) from error
    if found.type == "meta":
        contract = "a device that computes"
        fix = "for a summary without devices call record(model, args).summary()"
        raise DeviceError(expected(contract, "meta", for_="a stage", fix=fix))
    if not is_asynchronous(found):
        return torch.device(found.type)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator is not None else 0
    is_kind = accelerator is not None and accelerator.type == found.type
    if found.index is None and is_kind and count:  # as torch has it
        return torch.device(found.type, torch.accelerator.current_device_index())
    if not is_kind or (found.index or 0) >= count:
        have = f"{accelerator.type}:0..{count - 1}" if accelerator is not None else "only the CPU"
        contract = f"a device of this machine, which has {have},"
        fix = "pass devices that exist, or devices=['cpu'] * stages to try without"
        raise DeviceError(expected(contract, str(found), fix=fix))
    return torch.device(found.type, found.index or 0)


def is_same_device(asked: torch.device, device: torch.device) -> bool:
    """Return whether a device that a user named is one of this machine's: an accelerator without an
    index is the current one."""
    if asked.type != device.type or not is_asynchronous(device):
        return asked.type == device.type
    index = torch.accelerator.current_device_index() if asked.index is None else asked.index
    return index == device.index


def default_devices() -> list[torch.device] | None:
    """Return every accelerator device of the machine; ``None``: it has only the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    return [torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())]


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream that computes on a device; ``None``: the host computes."""
    return torch.accelerator.current_stream(device) if is_asynchronous(device) else None


def mark(device: torch.device) -> torch.Event | None:
    """Return an event behind all work queued on a device so far; ``None``: it has no queue."""
    stream = current_stream(device)
    return None if stream is None else stream.record_event()


def named_devices(devices: Devices) -> Sequence[Any] | None:
    """Return a list of devices in the place of a number of them, and ``None`` for ``"auto"``.

    A number counts the machine's accelerator devices; without accelerators, threads of the CPU.

    Raises:
        DeviceError: this machine has fewer.
    """
    if isinstance(devices, str) and devices == "auto":
        return None
    if not is_integer(devices, 1):
        return devices  # type: ignore[return-value]
    found = default_devices()
    if found is None:
        return ["cpu"] * devices
    if devices > len(found):
        contract = f"at most {len(found)}, which is how many devices this machine has,"
        fix = f"name devices several times for more stages: devices=[{str(found[0])!r}] * {devices}"
        raise DeviceError(expected(contract, devices, for_="devices", fix=fix))
    return found[:devices]


def checked_devices(devices: Devices) -> list[torch.device] | None:
    """Return a list of devices, one for each stage, each checked; all that there are are ``None``.

    Raises:
        PlanError: it is not such a list, nor a number of devices.
        DeviceError: this machine does not have one of them.
    """
    devices = named_devices(devices)
    if devices is None:
        return None
    if not isinstance(devices, Sequence) or isinstance(devices, str):
        contract, got = "a list with one device for each stage", devices
        fix = "write devices=[…] in the order of the stages, devices=2 for the first two, or 'auto'"
        if isinstance(devices, str | torch.device):
            got = str(devices)
            fix = f"write devices=[{got!r}, …], or devices='auto' for all that there are"
        raise PlanError(expected(contract, got, for_="devices", fix=fix))
    checked = [check_device(device) for device in devices]
    if not checked:
        contract, fix = "at least one device", "pass one for each stage, or None for all there are"
        raise PlanError(expected(contract, [], for_="devices", fix=fix))
    kinds = {device.type for device in checked if is_asynchronous(device)}
    if len(kinds) > 1:
        raise PlanError(expected("accelerators of one kind", sorted(kinds), for_="devices"))
    return checked
