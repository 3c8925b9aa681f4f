"""A tensor's way from device to device.

It is written against the device-generic ``torch.accelerator``, ``torch.Stream`` and
``torch.Event``, so that every accelerator torch knows works. ``Tensor.to`` alone would run on the
source's compute stream, behind all work that is queued there; here the copy has streams of its own
on both sides. It begins when the source is there (after an event, which may be older than the work
that is queued by now), and its reader waits for it only where it begins to read.
"""

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._common.threads.thread_state import waiting_for_device
from .._torch.modes import without_torch_functions
from .._torch.tensors import FakeTensor, is_ragged, turning
from .devices import current_stream, is_asynchronous
from .observer import Watch
from .ownership import copying, disown_offsets

_LINE = 64  # bytes of the processor's cache, at a multiple of which torch allocates


class PendingCopy:
    """A tensor's values on their way to a device.

    Attributes:
        value: the tensor on that device; not to be read before :meth:`receive`.
        source: the tensor that is being read for it, cut off from autograd; ``None``: none is.
        arrived: the event after which all of it is there, and the source may be written or freed.
        owner: the stream that the value was allocated on, where it is not the reader's.
        is_awaited: whether nobody has received it yet.
    """

    __slots__ = ("_watch", "arrived", "is_awaited", "owner", "source", "value")

    def __init__(
        self,
        value: Tensor,
        source: Tensor | None = None,
        arrived: torch.Event | None = None,
        owner: torch.Stream | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.value = value
        self.source = source
        self.arrived = arrived
        self.owner = owner
        self.is_awaited = arrived is not None
        self._watch = watch

    def receive(self, *, keeps: bool = False) -> Tensor:
        """Return the values, for the device's current stream to read, or for the host, which waits.

        Args:
            keeps: whether the caller keeps their memory until they are read.
        """
        if not self.is_awaited:
            return self.value
        assert self.arrived is not None
        self.is_awaited = False
        reader = current_stream(self.value.device)
        if self._watch is not None:
            self._watch("waits", reader)
        if reader is None:
            if not self.arrived.query():
                with waiting_for_device():
                    self.arrived.synchronize()
        else:
            reader.wait_event(self.arrived)
            if not keeps:
                with copying(), without_torch_functions():
                    self.value.record_stream(reader)  # allocated on the copy stream
        if self._watch is not None:
            self._watch("goes on", reader)
        return self.value


def send(
    tensor: Tensor,
    device: torch.device | None,
    *,
    copy: bool = False,
    after: torch.Event | None = None,
    back: bool = False,
    watch: Watch | None = None,
) -> PendingCopy:
    """Begin to copy a tensor's values to a device, cut off from autograd.

    Args:
        tensor: the tensor to copy. Until :attr:`PendingCopy.arrived` it must be neither written
            nor freed: see :class:`blockpipe.devices.copy_lifetimes.CopySources`.
        device: the target; ``None``: the tensor's own device.
        copy: whether to make a real copy even on the same device, with the same strides; the stage
            sanitizer needs it.
        after: the event after which the tensor is there; ``None``: when all work that is queued on
            its device is done.
        back: whether it is a gradient on its way back, which does not queue behind activations.
        watch: called at the moments of the copy.

    Returns:
        An alias where no copy is needed. An expanded tensor stays expanded: the copy holds each
        stored element once.
    """
    stays = device is None or tensor.device == device
    if stays and not copy and watch is None and torch.is_grad_enabled():
        return PendingCopy(tensor.detach())
    if (turn := turning(tensor)) is not None:
        with copying(), torch.inference_mode(False), torch.enable_grad():
            in_memory = turn(tensor.detach())
            sent = send(in_memory, device, copy=copy, after=after, back=back, watch=watch)
            sent.value = turn(sent.value)
        return sent
    # Grad is on, also where the user's code has it off: autograd would forbid a later write to an
    # alias made without it. A detached tensor gets no graph either way.
    # Inference mode is off: its tensors do not count the writes to them.
    with copying(), torch.inference_mode(False), torch.enable_grad():
        source = _counting(tensor) if tensor.is_inference() else tensor.detach()
        if stays:
            here = current_stream(tensor.device) if watch is not None else None
            if watch is not None:
                watch("sends", here)
            value = _same_strides(source) if copy else source
            if watch is not None:
                watch("arrives", here)
            return PendingCopy(value)
        assert device is not None
        compact, expand = _compacted(source)
        if isinstance(source, FakeTensor) or not _has_streams(compact, device):
            if watch is not None:
                watch("sends", None)
            moved = PendingCopy(compact.to(device))
            if watch is not None:
                watch("arrives", None)
        elif not is_asynchronous(device):
            moved = _to_host(compact, device, after, back, watch)
        elif is_asynchronous(compact.device):
            moved = _across(compact, device, after, back, watch)
        else:
            moved = _from_host(compact, device, back, watch)
        if expand:
            moved.value = moved.value.expand(source.shape)
        return moved


def _counting(tensor: Tensor) -> Tensor:
    """Return an alias of a tensor of inference mode that counts the writes to it. Of a sparse one,
    whose values a write replaces, it is a copy."""
    if tensor.is_sparse:
        return tensor.clone()
    is_plain = tensor.layout is torch.strided and type(tensor) is Tensor
    if not is_plain or tensor.is_quantized or is_ragged(tensor):
        return tensor.detach()
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return made.set_(tensor.untyped_storage(), *place)


def _has_streams(tensor: Tensor, device: torch.device) -> bool:
    is_queued = is_asynchronous(tensor.device) or is_asynchronous(device)
    return is_queued and tensor.layout is torch.strided


def carry(tensor: Tensor, device: torch.device | None, *, copy: bool = False) -> Tensor:
    """Return a tensor's values on a device, ready to be read; the arguments are those of `send`."""
    return send(tensor, device, copy=copy).receive()


def _across(
    source: Tensor,
    device: torch.device,
    after: torch.Event | None,
    back: bool,
    watch: Watch | None,
) -> PendingCopy:
    """Copy between two accelerators, on copy streams; compute streams wait by events only."""
    streams = _copy_streams.between(source.device, device, back)
    sending, receiving = streams.sending, streams.receiving
    assert sending is not None
    assert receiving is not None
    with streams.lock:
        sending.wait_event(after or torch.accelerator.current_stream(source.device).record_event())
        with sending, receiving:
            if watch is not None:
                watch("sends", sending)
            moved = source.to(device, non_blocking=True)
            arrived = receiving.record_event()
            if watch is not None:
                watch("arrives", sending)  # by the same device's clock
    return PendingCopy(moved, source, arrived, receiving, watch)


def _from_host(
    source: Tensor, device: torch.device, back: bool, watch: Watch | None
) -> PendingCopy:
    """Copy from the host, on the device's copy stream, through pinned memory.

    A copy of pageable memory would wait until all work that is queued on the device is done. The
    pinned memory is that of torch's cache, which keeps it until the copy is over. Memory that the
    caller has pinned is copied as well: the caller may refill it as soon as the step returns.
    """
    streams = _copy_streams.between(source.device, device, back)
    receiving = streams.receiving
    assert receiving is not None
    pinned = torch.empty_like(source, pin_memory=True).copy_(source)
    with streams.lock, receiving:
        if watch is not None:
            watch("sends", receiving)
        moved = pinned.to(device, non_blocking=True)
        arrived = receiving.record_event()
        if watch is not None:
            watch("arrives", receiving)
    return PendingCopy(moved, None, arrived, receiving, watch)


def _to_host(
    source: Tensor,
    device: torch.device,
    after: torch.Event | None,
    back: bool,
    watch: Watch | None,
) -> PendingCopy:
    """Copy to the host, on the device's copy stream, into pinned memory: the host waits for this
    copy alone, where it begins to read, and not for all work that is queued on the device."""
    streams = _copy_streams.between(source.device, device, back)
    sending = streams.sending
    assert sending is not None
    moved = torch.empty_like(source, device=device, pin_memory=True)
    with streams.lock:
        sending.wait_event(after or torch.accelerator.current_stream(source.device).record_event())
        with sending:
            if watch is not None:
                watch("sends", sending)
            moved.copy_(source, non_blocking=True)
            arrived = sending.record_event()
            if watch is not None:
                watch("arrives", sending)
    return PendingCopy(moved, source, arrived, None, watch)


@dataclass
class _CopyStream:
    """The copy streams from one device to another, and the lock for queueing a copy there."""

    sending: torch.Stream | None
    receiving: torch.Stream | None
    lock: threading.Lock = field(default_factory=threading.Lock)


class _CopyStreams:
    """The process's copy streams, for each pair of devices and each direction of the step.

    A copy waits for those that are queued on its stream before it, even if its source is ready
    long before: on a shared stream a skip connection, or a gradient, would wait for the
    activations of later micro-batches.
    """

    def __init__(self) -> None:
        self._by_way: dict[tuple[torch.device, torch.device, bool], _CopyStream] = {}

    def between(self, source: torch.device, target: torch.device, back: bool) -> _CopyStream:
        key = source, target, back
        found = self._by_way.get(key)
        if found is None:
            sending, receiving = (torch.Stream(d) if is_asynchronous(d) else None for d in key[:2])
            found = self._by_way.setdefault(key, _CopyStream(sending, receiving))
        return found


_copy_streams = _CopyStreams()


def _compacted(tensor: Tensor) -> tuple[Tensor, bool]:
    """Return the tensor with every expanded dimension narrowed to one, and whether it had any."""
    if tensor.layout is not torch.strided or is_ragged(tensor) or 0 not in tensor.stride():
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
    is_plain = tensor.layout is torch.strided and not (tensor.is_quantized or is_ragged(tensor))
    if tensor.layout is torch.jagged:
        disown_offsets(tensor)  # the clone has the same
    if not is_plain or tensor.is_meta:
        return tensor.clone()
    compact, expand = _compacted(tensor)
    new = _empty_like(compact).copy_(compact)
    return new.expand(tensor.shape) if expand else new


def _empty_like(tensor: Tensor) -> Tensor:
    """Return a tensor with the strides of another one, on the CPU also with its alignment.

    A matrix product's kernel rounds otherwise where its operand, as a part of a batch may, begins
    in the middle of a line of the processor's cache.
    """
    shape, strides, size = tensor.shape, tensor.stride(), tensor.element_size()
    has_memory = tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)
    offset = tensor.data_ptr() % _LINE // size if has_memory else 0
    if not offset:
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory = torch.UntypedStorage((offset + extent) * size)
    return torch.empty(0, dtype=tensor.dtype).set_(memory, offset, shape, strides)
