"""A trace as text: a Gantt chart of one step, and a table of the lanes' times."""

from collections.abc import Mapping

from ..._common.text import bytes_text, text_table
from ...schedules.schedule import KINDS
from .trace import Event, LaneTotals, Trace


def gantt(trace: Trace, step: int, width: int) -> str:
    """Return for each lane a row of kinds and one of micro-batches; see :meth:`Timeline.gantt`."""
    actions = trace.actions(step)
    if not actions:
        return ""
    begin, span = min(e.start for e in actions), trace.span(step)
    names = [_short(trace, lane, width // 4) for lane in range(len(trace.lanes))]
    left = max(map(len, names)) + 2
    cells = width - left
    if not trace.unit and span == int(span) and 1 <= span <= cells:
        cells -= cells % int(
            span
        )  # with costs in whole units, a unit is a whole number of characters
    lines = []
    for lane, name in enumerate(names):
        row = _row([e for e in actions if e.lane == lane], begin, span, cells)
        kinds = "".join("·" if e is None else e.kind for e in row)
        digits = "".join(" " if e is None else str(e.microbatch % 10) for e in row)
        lines += [f"{name:<{left}}{kinds}", f"{'':<{left}}{digits}".rstrip()]
    return "\n".join(lines)


def _short(trace: Trace, lane: int, width: int = 24) -> str:
    name = trace.lanes[lane].name
    return name if len(name) <= width else f"lane {lane}"


def _row(actions: list[Event], begin: float, span: float, cells: int) -> list[Event | None]:
    """Return for each cell the action that takes the most of it, if any takes half."""
    best: list[tuple[float, Event | None]] = [(0.5, None)] * cells
    for event in actions:
        first, last = ((t - begin) / (span or 1) * cells for t in (event.start, event.end))
        for cell in range(int(first), min(cells, int(last) + 1)):
            share = min(last, cell + 1) - max(first, cell)
            if share > best[cell][0] - 1e-9 and share > 0:
                best[cell] = share, event
    return [event for _, event in best]


def table(trace: Trace, predictions: Mapping[str, Trace | None]) -> str:
    """Return a table of the lanes' mean times, and one of a step's time beside predictions."""
    totals = trace.totals()
    kinds = [kind for kind in KINDS if any(lane.by_kind[kind] for lane in totals)]
    extra = [name for name in ("copies", "waits", "stalls") if any(vars(t)[name] for t in totals)]
    head = ["Lane", "Busy", "Bubble", *kinds, *(name.capitalize() for name in extra)]
    sent = any(lane.copied for lane in totals)

    def row(name: str, lane: LaneTotals) -> list[str]:
        times = [lane.by_kind[kind] for kind in kinds] + [vars(lane)[name] for name in extra]
        cells = [_time(trace, t) for t in times]
        return [name, _time(trace, lane.busy), f"{100 * lane.idle:.1f} %", *cells] + (
            [bytes_text(round(lane.copied))] if sent else []
        )

    whole = LaneTotals(
        busy=sum(lane.busy for lane in totals),
        idle=trace.bubble(),
        by_kind={kind: sum(lane.by_kind[kind] for lane in totals) for kind in KINDS},
        copies=sum(lane.copies for lane in totals),
        copied=sum(lane.copied for lane in totals),
        waits=sum(lane.waits for lane in totals),
        stalls=sum(lane.stalls for lane in totals),
    )
    rows = [row(_short(trace, n), lane) for n, lane in enumerate(totals)] + [row("all", whole)]
    parts = [text_table(head + (["Crossed"] if sent else []), rows, left=1)]
    parts.append(_comparison(trace, predictions))
    parts.append("\n".join(f"note: {note}" for note in _notes(trace)))
    return "\n\n".join(part for part in parts if part)


def _comparison(trace: Trace, predictions: Mapping[str, Trace | None]) -> str:
    time = trace.step_time
    measured = "measured" if predictions else trace.steps[0].schedule.name
    rows = [[measured, *_figures(trace)]]
    for name, prediction in predictions.items():
        if prediction is not None:
            ratio = f"{time / prediction.step_time:.2f}" if prediction.step_time else "-"
            rows.append([f"predicted {name}", *_figures(prediction), ratio])
    head = ["", "Step", "Bubble", "Imbalance"]
    if len(rows) > 1:
        head.append("Measured / predicted")
        rows[0].append("")
    return text_table(head, rows, left=1)


def _figures(trace: Trace) -> list[str]:
    return [
        _time(trace, trace.step_time),
        f"{100 * trace.bubble():.1f} %",
        f"{trace.imbalance():.2f}",
    ]


def _notes(trace: Trace) -> list[str]:
    notes = []
    if len(trace.steps) > 1:
        notes.append(f"the figures are means of {len(trace.steps)} steps; the chart is the last")
    if any(info.inline for info in trace.steps) and len(trace.lanes) > 1:
        notes.append("one thread ran all lanes in turns: nothing overlaps")
    if any(info.failed for info in trace.steps):
        notes.append("a step has failed: the means leave it out, unless all have")
    return notes


def _time(trace: Trace, value: float) -> str:
    return f"{1e3 * value:.2f} ms" if trace.unit else f"{value:.4g}"
