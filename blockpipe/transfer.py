"""A tensor from device to device, and whose storage is whose.

Written against the device-generic ``torch.accelerator``, ``torch.Stream`` and ``torch.Event``, so
that every accelerator torch knows works. ``Tensor.to`` alone would run on the source's compute
stream, behind whatever is queued there; here the copy has streams of its own on both sides, and
the compute streams wait for it only where its data is used.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .errors import DeviceError
from .observer import Watch


class _CopyStreams(threading.local):
    """One copy stream for each (thread, device); streams are the process's and are reused."""

    def __init__(self) -> None:
        self.streams: dict[torch.device, torch.Stream] = {}

    def of(self, device: torch.device) -> torch.Stream:
        stream = self.streams.get(device)
        if stream is None:
            stream = self.streams[device] = torch.Stream(device)
        return stream


_copy_streams = _CopyStreams()


def is_on_meta(model: nn.Module) -> bool:
    """Whether a model is without values, as a whole or in part."""
    return any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def is_asynchronous(device: torch.device) -> bool:
    """Whether work on this device is queued on streams: an accelerator, not CPU or meta."""
    return device.type not in ("cpu", "meta")


def check_device(device: Any) -> torch.device:
    """A device with its index, checked to be there.

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
    if accelerator is None or accelerator.type != found.type or (found.index or 0) >= count:
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


def carry(
    tensor: Tensor,
    device: torch.device | None,
    *,
    copy: bool = False,
    watch: Watch | None = None,
) -> Tensor:
    """The same values on a device, cut off from autograd.

    Args:
        tensor: what to carry; it stays as it is.
        device: where to; ``None``: where it is.
        copy: a real copy even on the same device (the stage sanitizer's wish), strides and all.
        watch: told when it is under way.

    Returns:
        An alias where no copy is needed. An expanded tensor stays expanded: the copy holds each
        stored element once.
    """
    if watch is not None:
        return _watched(tensor, device, copy, watch)
    if not copy and (device is None or tensor.device == device) and torch.is_grad_enabled():
        return tensor.detach()
    # With grad on, also where the user's code has it off: autograd would forbid a later write
    # to an alias made without. What is detached gets no graph either way.
    with copying(), torch.enable_grad():
        return _carried(tensor.detach(), device, copy, None)


def _watched(tensor: Tensor, device: torch.device | None, copy: bool, watch: Watch) -> Tensor:
    """As :func:`carry`. Copies that have streams of their own tell of them; others are timed
    where they run: on the device's compute stream, or, from and to the host, by the host."""
    with copying(), torch.enable_grad():
        if device is not None and tensor.device != device and is_asynchronous(device):
            return _carried(tensor.detach(), device, copy, watch)
        stays = device is None or tensor.device == device
        here = current_stream(tensor.device) if stays else None
        watch("sends", here)
        if not stays:  # to the host: it waits for the device
            watch("waits", None)
        moved = _carried(tensor.detach(), device, copy, None)
        if not stays:
            watch("goes on", None)
        watch("arrives", here)
        return moved


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream that computes on a device; ``None``: the host."""
    return torch.accelerator.current_stream(device) if is_asynchronous(device) else None


def _carried(
    source: Tensor, device: torch.device | None, copy: bool, watch: Watch | None
) -> Tensor:
    if device is None or source.device == device:
        return _same_strides(source) if copy else source
    compact, expand = _compacted(source)
    if isinstance(source, FakeTensor):
        moved = compact.to(device)  # of a device that need not be there: no streams
    elif is_asynchronous(source.device) and is_asynchronous(device):
        moved = _across(compact, device, watch)
    elif is_asynchronous(device) and compact.layout is torch.strided:
        moved = _from_host(compact, device, watch)
    else:
        moved = compact.to(device)  # to the host: waits, for the host may read it at once
    return moved.expand(source.shape) if expand else moved


def _across(source: Tensor, device: torch.device, watch: Watch | None) -> Tensor:
    """Between two accelerators, on copy streams; compute streams wait by events only."""
    produced = torch.accelerator.current_stream(source.device)
    consumed = torch.accelerator.current_stream(device)
    sending, receiving = _copy_streams.of(source.device), _copy_streams.of(device)
    sending.wait_event(produced.record_event())
    with sending, receiving:
        if watch is not None:
            watch("sends", sending)
        moved = source.to(device, non_blocking=True)
        arrived = receiving.record_event()
    _receive(consumed, receiving, arrived, watch)
    # `source` was allocated on `produced` and is read on `sending`; `moved` was allocated on
    # `receiving` and is read on `consumed`: neither may be reused before the other has done.
    source.record_stream(sending)
    moved.record_stream(consumed)
    return moved


def _from_host(source: Tensor, device: torch.device, watch: Watch | None) -> Tensor:
    """From the host, on the device's copy stream, through pinned memory: a copy of pageable memory
    would wait until all that is queued on the device is done. The pinned memory is torch's cache,
    which keeps it until the copy is over; memory that the caller has pinned is copied as well, for
    the caller may fill it anew as soon as the step returns."""
    consumed = torch.accelerator.current_stream(device)
    receiving = _copy_streams.of(device)
    pinned = torch.empty_like(source, pin_memory=True).copy_(source)
    with receiving:
        if watch is not None:
            watch("sends", receiving)
        moved = pinned.to(device, non_blocking=True)
        arrived = receiving.record_event()
    _receive(consumed, receiving, arrived, watch)
    moved.record_stream(consumed)
    return moved


def _receive(
    consumed: torch.Stream, receiving: torch.Stream, arrived: torch.Event, watch: Watch | None
) -> None:
    """Have the compute stream wait for what arrives on the copy stream."""
    if watch is None:
        consumed.wait_event(arrived)
        return
    watch("arrives", receiving)
    watch("waits", consumed)
    consumed.wait_event(arrived)
    watch("goes on", consumed)


def _compacted(tensor: Tensor) -> tuple[Tensor, bool]:
    """The tensor with every expanded dimension narrowed to one, and whether there was one."""
    if tensor.layout is not torch.strided or 0 not in tensor.stride():
        return tensor, False
    expanded = [
        d
        for d, (n, s) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if s == 0 and n > 1
    ]
    for dim in expanded:
        tensor = tensor.narrow(dim, 0, 1)
    return tensor, bool(expanded)


def _same_strides(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return tensor.clone()
    compact, expand = _compacted(tensor)
    new = torch.empty_strided(
        compact.shape, compact.stride(), dtype=compact.dtype, device=compact.device
    ).copy_(compact)
    return new.expand(tensor.shape) if expand else new


# --- whose storage: the stage sanitizer's book, kept on the storages themselves, so that an entry
# --- lives exactly as long as what it speaks of.

_OWNER = "_blockpipe_owner"


@dataclass(frozen=True, slots=True)
class Owner:
    """A stage of one pipeline."""

    pipeline: int
    stage: int


def owner_of(tensor: Tensor) -> Owner | None:
    """Who owns a tensor's storage, if anybody does."""
    if tensor.layout is not torch.strided:
        return None
    return getattr(tensor.untyped_storage(), _OWNER, None)


def set_owner(tensor: Tensor, owner: Owner) -> None:
    """Give a tensor's storage to a stage."""
    if tensor.layout is torch.strided:
        setattr(tensor.untyped_storage(), _OWNER, owner)


class _Carrying(threading.local):
    active = False


_carrying = _Carrying()


def edge_of(tensor: Tensor) -> GradientEdge:
    """A tensor's place in the autograd graph, whatever grad mode is, and however its stage."""
    node = tensor.grad_fn
    if node is not None and not isinstance(node, torch._C._FunctionBase):
        return GradientEdge(node, tensor.output_nr)
    # A custom function's node does not keep its own graph alive: torch adds what does.
    # torch finds a leaf's place through a view of it: no read, but the sanitizer would see one.
    with copying(), torch.enable_grad():
        return get_gradient_edge(tensor)


@contextmanager
def copying() -> Iterator[None]:
    """While entered, this thread may touch any stage's tensors: it copies."""
    before, _carrying.active = _carrying.active, True
    try:
        yield
    finally:
        _carrying.active = before


def is_carrying() -> bool:
    """Whether this thread is copying between stages, which alone may touch two stages' tensors."""
    return _carrying.active
