"""Where memory goes: predicted from a recording, and measured beside it.

What a stage holds is its parameters, their gradients, what the optimizer keeps of each, and the
activations of the micro-batches that the schedule has in flight there. The recording knows which
storages autograd saves, the schedule knows how long each is kept; so the peak is played out, not
guessed from a formula for each schedule. What operations need while they run is not known before:
``working`` takes the largest results of one operation for it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._common.nested import tensors
from .._common.text import bytes_text, text_table
from .._torch.modes import DispatchMode
from .._torch.tensors import storage_id
from ..devices.devices import is_asynchronous
from ..errors import UsageError
from ..schedules.builders import ScheduleOption
from ..schedules.schedule import Schedule
from ..stages.cursor import current_stage
from .prepared import Prepared

# Copies of a parameter that an optimizer keeps, by its name.
_STATES = {
    "sgd": 0.0,
    "momentum": 1.0,
    "adagrad": 1.0,
    "rmsprop": 1.0,
    "lion": 1.0,
    "muon": 1.0,
    "adadelta": 2.0,
    "adam": 2.0,
    "adamw": 2.0,
    "adamax": 2.0,
    "nadam": 2.0,
    "radam": 2.0,
    "amsgrad": 3.0,
}
Bytes = TypeVar("Bytes", int, Tensor)  # of one stage, or of many at once


@dataclass
class StageMemory:
    """One stage's memory, in bytes.

    Attributes:
        parameters: and buffers.
        gradients: of what is trainable.
        optimizer: what it keeps of each parameter.
        kept: activations of one micro-batch, from its forward to its backward.
        in_flight: the most micro-batches whose activations are there at once.
        activations: at the peak, under the schedule.
        glue: of ``kept``, what is outside of sealed calls, and never recomputed.
        crossings: what a micro-batch brings from other stages; as much goes back as gradients.
        working: what operations need while they run; and between accelerators a micro-batch's
            copies that come before they are read, and the gradients that go back.
        measured: the peak that was measured; ``None``: nothing was.
    """

    stage: int
    device: str
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    kept: int = 0
    in_flight: int = 0
    activations: int = 0
    glue: int = 0
    crossings: int = 0
    working: int = 0
    measured: int | None = None

    @property
    def peak(self) -> int:
        """The most that is there at once."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.working


@dataclass
class MemoryReport:
    """Memory by stage, and what to do about it; ``str()`` is a table.

    Attributes:
        stages: one for each.
        schedule: the name of what was played out.
        microbatches: how many there are.
        suggestions: what would lower the highest peak, in words.
    """

    stages: list[StageMemory]
    schedule: str
    microbatches: int
    suggestions: list[str] = field(default_factory=list)

    @property
    def by_device(self) -> dict[str, int]:
        """The predicted peak of each device: its stages' together."""
        found: dict[str, int] = {}
        for stage in self.stages:
            found[stage.device] = found.get(stage.device, 0) + stage.peak
        return found

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        head = ["Stage", "Device", "Parameters", "Gradients", "Optimizer", "A micro-batch"]
        head += ["In flight", "Activations", "Working", "Peak", "Received"]
        has_measured = any(s.measured is not None for s in self.stages)
        rows = []
        for s in self.stages:
            sizes = [s.parameters, s.gradients, s.optimizer, s.kept]
            row = [str(s.stage), s.device, *map(bytes_text, sizes), str(s.in_flight)]
            row += [bytes_text(n) for n in (s.activations, s.working, s.peak, s.crossings)]
            if has_measured:
                row.append("-" if s.measured is None else bytes_text(s.measured))
            rows.append(row)
        text = text_table(head + ["Measured"] * has_measured, rows, left=2)
        notes = [f"{self.schedule}, {self.microbatches} micro-batches"]
        glue = [f"{bytes_text(s.glue)} on stage {s.stage}" for s in self.stages if s.glue]
        if glue:
            notes.append(f"of a micro-batch, glue keeps {', '.join(glue)}: never recomputed")
        if len(self.by_device) < len(self.stages):
            devices = (f"{d}: {bytes_text(n)}" for d, n in self.by_device.items())
            notes.append(f"peaks of devices with several stages: {', '.join(devices)}")
        notes += self.suggestions
        return text + "\n\n" + "\n".join(f"note: {note}" for note in notes)


def predict(
    prepared: Prepared,
    schedule: ScheduleOption,
    microbatches: int,
    *,
    optimizer: object = None,
    limit: int | None = None,
) -> MemoryReport:
    """What a step will need, from the recording.

    Args:
        prepared: of the recording.
        schedule: as the step will have it.
        microbatches: how many the batch makes.
        optimizer: see :func:`copies_of`.
        limit: bytes that a device has, for suggestions.
    """
    check_limit(limit)
    copies = copies_of(optimizer)
    made = prepared.schedule(schedule, microbatches)
    split = made.split()
    sizes = [
        [
            prepared.kept(hop, m, microbatches, is_split=(hop, m) in split)
            for m in range(microbatches)
        ]
        for hop in range(len(prepared.route))
    ]
    gradients = [hop.weight_bytes for hop in prepared.recording.hops]
    stages = []
    for stage in range(prepared.recording.num_stages):
        memory = _static(prepared, stage, copies)
        hops = {hop for hop, on in enumerate(prepared.route) if on == stage}
        memory.activations, memory.in_flight = _peak(made, sizes, hops, gradients)
        stages.append(memory)
    report = MemoryReport(stages, made.name, microbatches)
    report.suggestions = suggestions(prepared, report, copies, limit)
    return report


def check_limit(limit: object) -> None:
    """Raise :class:`UsageError` for what is no number of bytes."""
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise UsageError(f"limit is a number of bytes, such as 16 * 2**30, but {limit!r} came")


def copies_of(optimizer: object) -> float:
    """How many copies of each parameter an optimizer keeps.

    Args:
        optimizer: a name ("adam", "sgd", "momentum" …), a number of copies, an optimizer of the
            parameters, or ``None``: none.

    Raises:
        UsageError: neither a known name, nor a number, nor an optimizer.
    """
    if optimizer is None:
        return 0.0
    if (
        isinstance(optimizer, int | float)
        and not isinstance(optimizer, bool)
        and 0 <= optimizer < float("inf")
    ):
        return float(optimizer)
    if isinstance(optimizer, str) and optimizer.lower() in _STATES:
        return _STATES[optimizer.lower()]
    if isinstance(optimizer, Optimizer):
        if optimizer.state:
            kept = sum(_size(t) for state in optimizer.state.values() for t in tensors(dict(state)))
            return kept / (sum(_size(p) for p in tensors(list(optimizer.state))) or 1)
        name = type(optimizer).__name__.lower()
        if name == "sgd" and optimizer.defaults.get("momentum"):
            name = "momentum"
        options = optimizer.defaults
        more = bool(options.get("amsgrad")) + (name == "rmsprop" and bool(options.get("momentum")))
        if name in _STATES:
            return _STATES[name] + more
    raise UsageError(
        f"optimizer is one of {', '.join(map(repr, _STATES))}, a number of copies of each "
        f"parameter, or an optimizer of one of these classes or with state, but {optimizer!r} came"
    )


def _static(prepared: Prepared, stage: int, copies: float) -> StageMemory:
    recording = prepared.recording
    held = [h for h in (*recording.parameters, *recording.buffers) if h.stage == stage]
    trained = sum(h.bytes for h in held if h.trainable and not h.is_buffer)
    hops = [hop for hop in recording.hops if hop.stage == stage]
    brought = [
        c
        for c in recording.crossings
        if c.to_stage == stage and prepared.devices[c.from_stage] != prepared.devices[stage]
    ]
    on_their_way = 0
    if is_asynchronous(prepared.devices[stage]):
        on_their_way = sum(c.bytes * (1 + c.needs_grad) for c in brought)
    return StageMemory(
        stage,
        str(prepared.devices[stage]),
        parameters=sum(h.bytes for h in held),
        gradients=trained,
        optimizer=round(trained * copies),
        kept=sum(prepared.kept(hop.index, 0, 2)[0] for hop in hops),
        glue=sum(hop.glue_bytes for hop in hops),
        crossings=sum(c.bytes for c in recording.crossings if c.to_stage == stage),
        working=on_their_way
        + working_bytes(
            max((hop.largest_bytes for hop in hops), default=0),
            max((h.bytes for h in held if h.trainable), default=0),
            max,
        ),
    )


def working_bytes(
    largest: Bytes, parameter: Bytes, larger: Callable[[Bytes, Bytes], Bytes]
) -> Bytes:
    """Return a guess at the bytes that a stage's operations work on, beside those that are kept.

    The operation with the largest result needs most of them in its backward: the gradient of its
    result, and that of its input or, before it is added to ``.grad``, of its parameter.
    ``examples/benchmarks/memory.py`` shows how far the guess carries.

    Args:
        largest: the size of the largest result of an operation.
        parameter: the size of the largest trained parameter.
        larger: the maximum of two sizes: ``max``, or ``torch.maximum`` for many stages at once.
    """
    return largest + larger(largest, parameter)


def _peak(
    schedule: Schedule,
    sizes: Sequence[Sequence[tuple[int, int]]],
    hops: set[int],
    gradients: Sequence[int],
) -> tuple[int, int]:
    """The most that these hops keep at once, in bytes, and of how many micro-batches.

    Args:
        schedule: with its R's. The hops of a stage are on one lane, so that its order is all.
        sizes: by hop and micro-batch, what is kept of it, and that with what is made again.
        hops: which.
        gradients: by hop, what is kept besides between the two parts of a backward.
    """
    split = schedule.split()
    held: dict[tuple[int, int], int] = {}
    most = of = 0
    for lane in schedule.lanes:
        for kind, hop, m in lane:
            if hop not in hops:
                continue
            before, full = sizes[hop][m]
            if kind == "W" or (kind == "B" and (hop, m) not in split):
                del held[hop, m]
                continue
            held[hop, m] = before if kind == "F" else full + gradients[hop] * (kind == "B")
            now = sum(held.values())
            if now > most:
                most, of = now, len({m for _, m in held})
    return most, of


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# --- what to do about it


def suggestions(
    prepared: Prepared, report: MemoryReport, copies: float, limit: int | None
) -> list[str]:
    """What would lower the highest peak, in words.

    Args:
        prepared: of the recording.
        report: the prediction.
        copies: of each parameter, by the optimizer.
        limit: bytes that a device has; ``None``: only what stands out is told.
    """
    found = []
    worst = max(report.stages, key=lambda s: s.peak)
    others = [s.peak for s in report.stages if s is not worst] or [worst.peak]
    over = limit is not None and worst.peak > limit
    if limit is not None:
        fits = "more than" if over else "within"
        found.append(
            f"stage {worst.stage} has the highest peak, {bytes_text(worst.peak)}: {fits} the "
            f"{bytes_text(limit)} of a device"
        )
    if not over and worst.peak < 1.25 * sum(others) / len(others):
        return found
    if 3 * worst.activations > worst.peak:
        found += _about_activations(prepared, report, worst)
    moved = _move(prepared, report, worst, copies)
    return found + ([moved] if moved else [])


def _about_activations(
    prepared: Prepared, report: MemoryReport, worst: StageMemory
) -> Iterator[str]:
    hops = [hop for hop in prepared.recording.hops if hop.stage == worst.stage]
    kept, recompute_spec = (sum(getattr(h, k).bytes for h in hops) for k in ("never", "always"))
    is_recomputed = any(prepared.activation_bytes(hop.index, 0, 2).calls for hop in hops)
    if not is_recomputed and 10 * recompute_spec < 9 * kept and worst.in_flight > 1:
        then = worst.peak - (worst.in_flight - 1) * (kept - recompute_spec)
        yield (
            f"checkpoint=True on the marks of stage {worst.stage}: {bytes_text(then)} instead of "
            f"{bytes_text(worst.peak)}, for one more forward of it"
        )
    if report.schedule == "gpipe" and report.microbatches > len(prepared.route):
        yield "schedule='1f1b' keeps fewer micro-batches than 'gpipe', at the same speed"
    elif worst.in_flight < report.microbatches or worst.in_flight == 1:
        then = worst.peak - (worst.activations + worst.working) // 2
        yield (
            f"twice as many chunks, if the batch allows it: {bytes_text(then)} instead of "
            f"{bytes_text(worst.peak)} on stage {worst.stage}"
        )


def _move(
    prepared: Prepared, report: MemoryReport, worst: StageMemory, copies: float
) -> str | None:
    """The module at an end of a stage that a lighter neighbour could have."""
    best: tuple[int, str] | None = None
    for step in (-1, 1):
        beside = worst.stage + step
        if not 0 <= beside < len(report.stages):
            continue
        calls = [
            c
            for c in prepared.recording.calls
            if c.is_module and c.stage == worst.stage and c.path in prepared.recording.sealed
        ]
        if len(calls) < 2:
            continue
        call, other = calls[0 if step < 0 else -1], report.stages[beside]
        parameters = sum(
            h.bytes for h in prepared.recording.parameters if h.name.startswith(f"{call.path}.")
        )
        fixed = round(parameters * (2 + copies))
        there = other.peak + fixed + call.saved_bytes * max(1, other.in_flight)
        here = worst.peak - fixed - call.saved_bytes * worst.in_flight
        peak = max(here, there)
        if peak < 0.95 * worst.peak and (best is None or peak < best[0]):
            best = (
                peak,
                f"{call.path!r} from stage {worst.stage} to stage {beside}: "
                f"{bytes_text(here)} and {bytes_text(there)} instead of {bytes_text(worst.peak)} "
                f"and {bytes_text(other.peak)}",
            )
    return None if best is None else f"move {best[1]}"


# --- measured


class LiveBytes(DispatchMode):
    """Counts the bytes of the storages that operations make, as long as they live, by stage.

    For the CPU, where no allocator keeps such a book. It goes with a step into its threads.
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
    """Measure the peaks of what runs inside.

    On an accelerator by its allocator, which knows devices and not stages; on the CPU by
    :class:`LiveBytes` and what there is already.

    Args:
        model: whose parameters, buffers and gradients are there.
        devices: of the stages.
        stage_of: from the ``id`` of a parameter or buffer to its stage.
        optimizer: whose state is there, if it is one.

    Yields:
        From a stage to its peak in bytes; filled in at the end.
    """
    peaks: dict[int, int] = {}
    accelerators = {d for d in devices if is_asynchronous(d)}
    for device in accelerators:
        torch.accelerator.synchronize(device)
        # At an allocation the allocator notices what is over, and so free again.
        torch.empty(1, device=device)
        torch.accelerator.reset_peak_memory_stats(device)
    there = dict.fromkeys(range(len(devices)), 0)
    for tensor in (*model.parameters(), *model.buffers()):
        stage = stage_of.get(id(tensor), 0)
        state = optimizer.state.get(tensor, {}) if isinstance(optimizer, Optimizer) else {}
        gradient = [] if tensor.grad is None else [tensor.grad]
        there[stage] += sum(map(_size, (tensor, *gradient, *tensors(dict(state)))))
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
