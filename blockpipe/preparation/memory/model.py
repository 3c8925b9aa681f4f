"""The memory of a step, predicted from a recording.

A stage holds its parameters, their gradients, the optimizer's state of each, and the activations of
the micro-batches that the schedule has in flight there. The recording knows which storages autograd
saves, and the schedule how long each is kept; so the peak is played out, not computed by a formula
for each schedule. The memory of operations while they run is not known before: ``working`` is a
guess from the largest result of one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor
from torch.optim import Optimizer

from ..._common.checks import expected, is_integer, is_number
from ..._common.nested import tensors
from ...costs.work import size_of
from ...devices.devices import is_asynchronous
from ...errors import UsageError
from ...schedules.builders import ScheduleOption
from ...schedules.schedule import Schedule
from ..prepared import Prepared
from .report import MemoryReport, StageMemory
from .suggestions import suggestions

# By the name of an optimizer: how many copies of each parameter it keeps.
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


def predict(
    prepared: Prepared,
    schedule: ScheduleOption,
    microbatches: int,
    *,
    optimizer: object = None,
    limit: int | None = None,
) -> MemoryReport:
    """Predict the memory of a step.

    Args:
        prepared: the recording, prepared for steps.
        schedule: the step's schedule.
        microbatches: the number of micro-batches in the step.
        optimizer: the optimizer that trains the model; see :func:`copies_of`.
        limit: the bytes of a device, for suggestions.
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
    """Raise :class:`UsageError` for a limit that is no number of bytes."""
    if limit is not None and not is_integer(limit, 1):
        raise UsageError(
            expected("a number of bytes", limit, for_="limit", fix="pass 16 * 2**30, for example")
        )


def copies_of(optimizer: object) -> float:
    """Return how many copies of each parameter an optimizer keeps.

    Args:
        optimizer: a name ("adam", "sgd", "momentum" …), a number of copies, an optimizer of the
            parameters, or ``None`` for no optimizer.

    Raises:
        UsageError: it is neither a known name, nor a number, nor an optimizer whose copies are
            known.
    """
    if optimizer is None:
        return 0.0
    if is_number(optimizer) and 0 <= optimizer < float("inf"):
        return float(optimizer)
    if isinstance(optimizer, str) and optimizer.lower() in _STATES:
        return _STATES[optimizer.lower()]
    if isinstance(optimizer, Optimizer):
        if optimizer.state:
            states = [tensors(dict(state)) for state in optimizer.state.values()]
            kept = sum(size_of(t) for state in states for t in state)
            return kept / (sum(size_of(p) for p in tensors(list(optimizer.state))) or 1)
        name = type(optimizer).__name__.lower()
        if name == "sgd" and optimizer.defaults.get("momentum"):
            name = "momentum"
        options = optimizer.defaults
        more = bool(options.get("amsgrad")) + (name == "rmsprop" and bool(options.get("momentum")))
        if name in _STATES:
            return _STATES[name] + more
    raise UsageError(
        expected(
            "a known optimizer",
            optimizer,
            for_="optimizer",
            fix=f"pass one of {', '.join(map(repr, _STATES))}, the number of copies that it keeps "
            "of each parameter, or an optimizer that has made a step",
        )
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
    """Return the most bytes that some hops keep at once, and of how many micro-batches.

    Args:
        schedule: the step's schedule, with its recomputations.
        sizes: by hop and micro-batch, the bytes that are kept, and those after recomputation.
        hops: the hops of one stage: they are on one lane, so that its order is all that counts.
        gradients: by hop, the bytes that are also kept between the two parts of a backward.
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
