"""How a step would need less memory, in words: recomputation, smaller micro-batches, other cuts."""

from __future__ import annotations

from collections.abc import Iterator

from ..._common.modules import is_within
from ..._common.text import bytes_text
from ..prepared import Prepared
from .report import MemoryReport, StageMemory


def suggestions(
    prepared: Prepared, report: MemoryReport, copies: float, limit: int | None
) -> list[str]:
    """Return changes that would lower the highest peak, in words.

    Args:
        prepared: the recording, prepared for steps.
        report: the prediction.
        copies: the number of copies that the optimizer keeps of each parameter.
        limit: the bytes of a device; ``None``: only a peak that stands out leads to suggestions.
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
    kept = sum(hop.never.bytes for hop in hops)
    recomputed = sum(hop.always.bytes for hop in hops)
    is_recomputed = any(prepared.activation_bytes(hop.index, 0, 2).calls for hop in hops)
    is_kept = not is_recomputed and worst.stage not in prepared.offload
    if is_kept and 10 * recomputed < 9 * kept and worst.in_flight > 1:
        then = worst.peak - (worst.in_flight - 1) * (kept - recomputed)
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
    """Suggest to move the first or the last module of a stage to a neighbour with a lower peak."""
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
            h.bytes for h in prepared.recording.parameters if is_within(h.name, call.path)
        )
        fixed = round(parameters * (2 + copies))
        come, go = (0 if s.stage in prepared.offload else call.saved_bytes for s in (other, worst))
        there = other.peak + fixed + come * max(1, other.in_flight)
        here = worst.peak - fixed - go * worst.in_flight
        peak = max(here, there)
        if peak < 0.95 * worst.peak and (best is None or peak < best[0]):
            best = (
                peak,
                f"{call.path!r} from stage {worst.stage} to stage {beside}: "
                f"{bytes_text(here)} and {bytes_text(there)} instead of {bytes_text(worst.peak)} "
                f"and {bytes_text(other.peak)}",
            )
    return None if best is None else f"move {best[1]}"
