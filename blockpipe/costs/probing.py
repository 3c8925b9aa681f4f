"""A device's rates, found by probes: small operations of each kind, forward and backward.

Nothing is measured before somebody asks for a prediction, and then only the kinds of operations
that it is about, once a process. A probe grows until it takes some milliseconds, so that its sizes
suit any device, and all kinds together take less than a second. Of several runs the shortest
counts: whatever disturbs a run makes it longer.

Probes run in a thread of their own. The caller's has modes, autocast, a grad mode and a stream, all
of which would be measured with them.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import ceil, prod
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .._common.threads.thread_state import intra_operation_threads
from ..devices.copies import carry
from ..devices.devices import check_device, is_asynchronous
from ..devices.stopwatch import Stopwatch
from ..errors import DeviceError
from .meter import Meter
from .rates import STATED_ACCELERATOR, STATED_COPY, STATED_CPU, Line, Pair, Rates
from .work import (
    ADDITION,
    CONVOLUTION,
    FUNCTION,
    GROUPS,
    PASS,
    PRODUCT,
    RANDOM,
    STATISTICS,
    WINDOW,
    Operation,
    Work,
)

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_LONG = 1e-3  # seconds: a probe that takes longer is the last of its kind
_SHORT = 2e-4  # so many are run at once that they take this long, for clocks tick
_MOST_AT_ONCE = 16
_SIZES = 7  # of a probe, at most
_LARGEST = 2**27  # bytes of its operands
_ENOUGH = 0.1  # seconds: after so many a probe does not grow any more
_REPEATS = 7
_DTYPES = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_COPIED = (2**12, 2**18, 2**24)  # bytes

Shapes = list[tuple[int, ...]]


class _Probe(NamedTuple):
    """The operation that is timed for a kind.

    Attributes:
        run: what is done to the operands.
        shapes: of these; they grow with a number.
        wide: of operands that are large for the arithmetic; for products.
    """

    run: Callable[..., Tensor]
    shapes: Callable[[int], Shapes]
    wide: Shapes | None = None


def _square(size: int) -> Shapes:
    width = (32, 96, 256, 512, 1024, 2048, 4096)[size]
    return [(width, width)] * 2


def _images_and_kernels(size: int) -> Shapes:
    channels = (16, 48, 128, 256, 512, 1024, 2048)[size]
    return [(4, channels, 16, 16), (channels, channels, 3, 3)]


def _rows(size: int) -> Shapes:
    return [(16 << 3 * size, 256)]


def _images(size: int) -> Shapes:
    return [(4, 16 << size, 8 << size, 8 << size)]


def _batch_norm(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def _drawn(x: Tensor) -> Tensor:
    """Return numbers of a generator that is nobody else's."""
    return torch.empty_like(x).bernoulli_(0.5, generator=torch.Generator(x.device))


_PROBES = {
    PRODUCT: _Probe(torch.mm, _square, [(16, 1024), (1024, 1024)]),
    CONVOLUTION: _Probe(
        functools.partial(F.conv2d, padding=1),
        _images_and_kernels,
        [(4, 16, 64, 64), (16, 16, 3, 3)],
    ),
    ADDITION: _Probe(lambda x, y: x.detach().add_(y.detach()), lambda size: 2 * _rows(size)),
    PASS: _Probe(torch.relu, _rows),
    GROUPS: _Probe(functools.partial(F.group_norm, num_groups=4), _images),
    FUNCTION: _Probe(functools.partial(F.layer_norm, normalized_shape=(256,)), _rows),
    STATISTICS: _Probe(_batch_norm, _images),
    WINDOW: _Probe(functools.partial(F.max_pool2d, kernel_size=2), _images),
    RANDOM: _Probe(_drawn, _rows),
}


def rates_of(device: torch.device | str, threads: int | None = None) -> Rates:
    """Return how fast a device works; measured the first time, and then remembered.

    Devices of one name (eight alike GPUs) are one: the first of them that is asked for is measured.

    Args:
        device: of this machine; of another one, for ``"meta"``, and for what is only a name, rates
            are stated.
        threads: of the CPU, for each operation; ``None``: as many as torch uses now.
    """
    try:
        found = check_device(device)
    except DeviceError as error:
        _log.info("%s is not measured: %s", device, error)
        is_far = not str(device).startswith("meta")
        known = STATED_ACCELERATOR if is_far else STATED_CPU
        what = "is not there" if is_far else "computes nothing"
        return Rates(f"{known.source}: {device} {what}", known.find)
    threads = 0 if is_asynchronous(found) else max(1, threads or torch.get_num_threads())
    with _lock:
        key = name_of(found), threads, torch.get_float32_matmul_precision()
        if key not in _known:
            _known[key] = _measured(found, threads)
        return _known[key]


def copy_line(source: torch.device, target: torch.device) -> Line:
    """Return the time of a copy from one device to another, over its bytes; nothing where they are
    one."""
    if source == target:
        return Line(((0.0, 0.0),))
    try:
        source, target = check_device(source), check_device(target)
    except DeviceError:
        return STATED_COPY
    with _lock:
        key = name_of(source), name_of(target)
        if key not in _copies:
            try:
                _copies[key] = _in_a_thread(lambda: _time_copies(source, target))
            except Exception as error:
                _log.info("copies from %s to %s are not measured: %s", source, target, error)
                _copies[key] = STATED_COPY
        return _copies[key]


def name_of(device: torch.device) -> str:
    """Return the kind of a device, as exactly as torch names it."""
    module = getattr(torch, device.type, None)
    name = getattr(module, "get_device_name", None)
    return device.type if name is None else f"{device.type} {name(device)}"


_lock = threading.RLock()
_known: dict[tuple[str, int, str], Rates] = {}
_copies: dict[tuple[str, str], Line] = {}


def _measured(device: torch.device, threads: int) -> Rates:
    of = name_of(device).partition(" ")[2]
    where = f"{device} ({of})" if of else f"{device}"
    if threads:
        where += f", {threads} thread{'s' if threads > 1 else ''}"
    return Rates(f"measured on {where}", functools.partial(_find, device, threads))


def _find(device: torch.device, threads: int, kind: str, dtype: str) -> Pair:
    """Return a kind's lines; where its probe does not run, those of the most similar one that
    does."""
    known = getattr(torch, dtype, torch.float32)
    computed = known if known in _DTYPES else torch.float32
    others = [(kind, computed), (kind, torch.float32), (PASS, torch.float32)]
    for name, in_dtype in dict.fromkeys(others):
        begun = time.perf_counter()
        try:
            with _lock:
                found = _in_a_thread(lambda: _probed(device, threads, name, in_dtype))  # noqa: B023
        except Exception as error:
            _log.info("%s in %s is not measured on %s: %s", name, in_dtype, device, error)
            continue
        took = 1e3 * (time.perf_counter() - begun)
        _log.info("measured %s in %s on %s, in %.0f ms: %s", name, in_dtype, device, took, found)
        return found
    known_rates = STATED_ACCELERATOR if is_asynchronous(device) else STATED_CPU
    return known_rates.find(kind, dtype)


def _in_a_thread(run: Callable[[], _T]) -> _T:
    """Return the result of a function in a thread that has no modes."""
    found: list[_T] = []
    failed: list[BaseException] = []

    def catch() -> None:
        try:
            found.append(run())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=catch, name="blockpipe probe", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def _probed(device: torch.device, threads: int, kind: str, dtype: torch.dtype) -> Pair:
    """Time a kind's probe, at growing sizes."""
    probe = _PROBES[kind]
    with intra_operation_threads(threads or None):
        hold = _Hold(device) if is_asynchronous(device) else None
        found: list[_Sample] = []
        begun = time.perf_counter()
        for shapes in map(probe.shapes, range(_SIZES)):
            if sum(map(prod, shapes)) * dtype.itemsize > _LARGEST:
                break
            try:
                found.append(_Sample(shapes, probe.run, dtype, device, hold))
            except RuntimeError:  # out of memory: what is known is enough
                if not found:
                    raise
                break
            # Launches alone may take that long: a line needs to see more work take longer.
            if found[-1].forward > max(_LONG, 2 * found[0].forward):
                break
            if len(found) > 2 and time.perf_counter() - begun > _ENOUGH:
                break
        wide = probe.wide and _Sample(probe.wide, probe.run, dtype, device, hold)
    forward = _line([(one.forward, one) for one in found], (wide.forward, wide) if wide else None)
    backward = _line(
        [(one.backward, one) for one in found], (wide.backward, wide) if wide else None
    )
    # An addition is a part of backwards, and has none.
    return Pair(forward, forward if kind == ADDITION else backward)


def _line(timed: Sequence[tuple[float, _Sample]], wide: tuple[float, _Sample] | None) -> Line:
    """Return a line through samples; the time that a wide one takes beyond it is that of its
    bytes."""
    line = Line(_ascending([(one.amount, seconds) for seconds, one in timed]))
    if wide is None:
        return line
    seconds, sample = wide
    for _ in range(4):  # the others have bytes too: to and fro between both, until they agree
        per_byte = max(0.0, seconds - line.seconds(sample.amount)) / sample.bytes
        # Not all of a small sample's time: its bytes may be in a cache.
        points = [(one.amount, max(s / 2, s - per_byte * one.bytes)) for s, one in timed]
        line = Line(_ascending(points), per_byte)
    return line


def _ascending(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return times that do not fall as the work grows, whatever was measured."""
    seconds = accumulate((seconds for _, seconds in points), max)
    return tuple(zip((amount for amount, _ in points), seconds, strict=True))


class _Sample:
    """A probe of one size, timed.

    Attributes:
        amount: of work: arithmetic, or bytes where there is none.
        bytes: read and written.
        forward: seconds.
        backward: seconds, for one operand.
    """

    def __init__(
        self,
        shapes: Shapes,
        run: Callable[..., Tensor],
        dtype: torch.dtype,
        device: torch.device,
        hold: _Hold | None,
    ) -> None:
        self.run, self.hold = run, hold
        # A thread that works alone has a clock which stands still while others are on its core.
        alone = torch.get_num_threads() == 1
        self.watch = Stopwatch(device, time.thread_time if alone else time.perf_counter)
        self.shapes, self.dtype, self.device = shapes, dtype, device
        self.amount, self.bytes = _amount(run, self.operands())
        self.forward, self.backward = self._seconds()

    def operands(self) -> list[Tensor]:
        """Return new operands. They are not random, as numbers would be drawn from the user's
        generator."""
        made = (
            torch.full(shape, 0.5, dtype=self.dtype, device=self.device) for shape in self.shapes
        )
        return [tensor.requires_grad_() for tensor in made]

    def _seconds(self) -> tuple[float, float]:
        """Return the seconds of one forward, and of its backward for one operand; the least of
        several runs."""
        operands = [self.operands()]
        self._timed(operands, 0.0)  # what is only done once
        first, host = self._timed(operands, 0.0)
        count = min(_MOST_AT_ONCE, max(1, ceil(_SHORT / max(sum(first), 1e-7))))
        operands += [self.operands() for _ in range(count - 1)]
        runs = []
        begun = time.perf_counter()
        for repeat in range(_REPEATS):
            times, host = self._timed(operands, 1.5 * host * count if repeat == 0 else 1.5 * host)
            runs.append(times)
            if repeat and time.perf_counter() - begun > 15 * _LONG:
                break
        forward, backward = (min(times) / count for times in zip(*runs, strict=True))
        return forward, backward / len(operands[0])

    def _timed(self, operands: list[list[Tensor]], held: float) -> tuple[list[float], float]:
        """Return the times of forward and backward, and of the host while it issues them.

        Args:
            operands: of each.
            held: seconds that the device is busy with other work first, so that it never waits for
                the host.
        """
        watch = self.watch
        watch.wait()
        if self.hold is not None:
            self.hold.seconds(held)
        issued = time.perf_counter()
        begin = watch.now()
        results = [self.run(*given) for given in operands]
        turned = middle = watch.now()
        has_backward = results[0].requires_grad
        if has_backward:
            gradients = [torch.ones_like(result) for result in results]
            needy = [tensor for given in operands for tensor in given]
            turned = watch.now()
            torch.autograd.grad(results, needy, gradients)
        end = watch.now()
        host = time.perf_counter() - issued
        watch.wait()
        back = watch.seconds(turned, end) if has_backward else 0.0
        return [watch.seconds(begin, middle), back], host


class _Hold:
    """A load that keeps a device busy for a while."""

    def __init__(self, device: torch.device) -> None:
        watch = Stopwatch(device)
        self._matrix = torch.zeros(64, 64, device=device)
        self._took = 0.0
        while self._took < _SHORT and len(self._matrix) < 4096:
            self._matrix = torch.zeros(2 * len(self._matrix), 2 * len(self._matrix), device=device)
            for _ in range(2):
                watch.wait()
                begin = watch.now()
                torch.mm(self._matrix, self._matrix)
                end = watch.now()
                watch.wait()
                self._took = watch.seconds(begin, end)

    def seconds(self, seconds: float) -> None:
        """Issue work that takes this long."""
        for _ in range(ceil(seconds / max(self._took, 1e-6))):
            torch.mm(self._matrix, self._matrix)


def _amount(run: Callable[..., Tensor], operands: list[Tensor]) -> tuple[float, float]:
    """Return how much a probe does, and with how many bytes, counted as a recording counts it."""
    done: list[Operation] = []

    def spent(work: Work, _: int) -> None:
        done.extend(work.forward)

    with Meter(spent):
        run(*operands)
    moved = float(sum(one.bytes for one in done))
    return sum(one.flops for one in done) or moved, moved


def _time_copies(source: torch.device, target: torch.device) -> Line:
    points = []
    watches = [Stopwatch(source), Stopwatch(target)]
    for size in _COPIED:
        tensor = torch.zeros(size, dtype=torch.uint8, device=source)
        times = []
        for _ in range(_REPEATS):
            for watch in watches:
                watch.wait()
            begun = time.perf_counter()
            carry(tensor, target)
            for watch in watches:
                watch.wait()
            times.append(time.perf_counter() - begun)
        points.append((float(size), min(times)))
    return Line(_ascending(points))
