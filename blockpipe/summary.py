"""A recording as a table: what is where, what crosses, and what to look at.

A module whose call stays on one stage is one row, whatever is inside it; only what spans stages
is opened. So the table of a deep model is about as long as the model has stages, and what matters
for a pipeline is on one screen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a recording can print itself; its summary needs only its fields
    from .recording import Call, CrossingInfo, Recording


@dataclass
class _Row:
    path: str
    kind: str
    depth: int
    stages: tuple[int, ...]
    elements: int
    bytes: int
    where: str = ""


def summarize(
    recording: Recording, devices: list[str] | None = None, notes: Iterable[str] = ()
) -> str:
    """The table as text.

    Args:
        recording: what to show.
        devices: the name of each stage's device; ``None`` leaves the column out.
        notes: what there is to say beside the recording.
    """
    parts = [
        _modules(recording, devices),
        _stages(recording, devices),
        _crossings(recording),
        "\n".join(f"note: {note}" for note in (*_notes(recording), *notes)),
    ]
    return "\n\n".join(part for part in parts if part)


def _modules(recording: Recording, devices: list[str] | None) -> str:
    rows = _merged(_rows(recording))
    head = ["Module (type)", "Stage", "Parameters", "Size"]
    table = [
        [
            "  " * row.depth + f"{row.path or recording.model} ({row.kind})",
            _range(row.stages),
            f"{row.elements:,}" if row.elements else "-",
            bytes_text(row.bytes) if row.bytes else "-",
        ]
        for row in rows
    ]
    if devices is not None:
        head.insert(2, "Device")
        for line, row in zip(table, rows, strict=True):
            line.insert(2, ", ".join(dict.fromkeys(devices[s] for s in row.stages)))
    return text_table(head, table, left=1 if devices is None else 3)


def _rows(recording: Recording) -> list[_Row]:
    """The calls in order, opened only where a module is on several stages."""
    stages: dict[str, set[int]] = {}
    first: dict[str, Call] = {}
    for call in recording.calls:
        if call.is_function:
            continue
        first.setdefault(call.path, call)
        at = stages.setdefault(call.path, set())
        parent: Call | None = call
        while parent is not None:  # a container is where its parts are
            stages.setdefault(parent.path, set()).add(call.stage)
            parent = parent.parent
        at.add(call.stage)
    closed: list[str] = []
    rows = []
    held = [*recording.parameters, *recording.buffers]
    for path, call in first.items():
        if any(path != c and _is_inside(path, c) for c in closed):
            continue
        on = sorted(stages[path])
        own = path
        if len(on) == 1 or not any(p != path and _is_inside(p, path) for p in first):
            closed.append(path)
            inside = [h for h in held if _is_inside(h.name, path)]
        else:
            inside = [h for h in held if h.name.rpartition(".")[0] == own]
        rows.append(
            _Row(
                path,
                call.kind,
                _depth(path, first),
                tuple(on),
                sum(h.elements for h in inside if not h.is_buffer),
                sum(h.bytes for h in inside),
                call.where,
            )
        )
    return rows


def _is_inside(name: str, path: str) -> bool:
    return path == "" or name.startswith(f"{path}.")


def _depth(path: str, called: dict[str, Call]) -> int:
    parts = path.split(".") if path else []
    return sum(".".join(parts[:i]) in called for i in range(len(parts)))


def _merged(rows: list[_Row]) -> list[_Row]:
    """Repeated blocks of one type on one stage as one row."""
    merged = []

    def alike(row: _Row) -> tuple[str, ...]:
        parent, _, name = row.path.rpartition(".")
        return (parent, row.kind, str(row.stages)) if name.isdigit() else (row.path,)

    for _, group in groupby(rows, key=alike):
        run = list(group)
        first, last = run[0], run[-1]
        if len(run) > 1:
            first = _Row(
                f"{first.path} … {last.path.rpartition('.')[2]}",
                f"{len(run)} × {first.kind}",
                first.depth,
                first.stages,
                sum(r.elements for r in run),
                sum(r.bytes for r in run),
            )
        merged.append(first)
    return merged


def _stages(recording: Recording, devices: list[str] | None) -> str:
    head = ["Stage", "Begins at", "Hops", "Operations", "Parameters", "Size", "Share"]
    total = sum(h.bytes for h in (*recording.parameters, *recording.buffers)) or 1
    table = []
    for stage in range(recording.num_stages):
        hops = [h for h in recording.hops if h.stage == stage]
        parameters = [p for p in recording.parameters if p.stage == stage]
        size = sum(h.bytes for h in (*parameters, *recording.buffers) if h.stage == stage)
        begins = next((_short(h.where) for h in hops), "never reached")
        named = next((f"{h.name!r}, " for h in hops if h.name), "")
        table.append(
            [
                str(stage),
                f"{named}{begins}",
                ", ".join(str(h.index) for h in hops),
                str(sum(h.operations for h in hops)),
                f"{sum(p.elements for p in parameters):,}",
                bytes_text(size),
                f"{100 * size / total:.0f} %",
            ]
        )
        if devices is not None:
            table[-1].insert(1, devices[stage])
    if devices is not None:
        head.insert(1, "Device")
    elements = sum(p.elements for p in recording.parameters)
    table.append(
        ["all", *[""] * (len(head) - 4), f"{elements:,}", bytes_text(total if total > 1 else 0), ""]
    )
    return text_table(head, table, left=2 if devices is None else 3)


def _crossings(recording: Recording) -> str:
    if not recording.crossings:
        return ""
    table = []

    def link(crossing: CrossingInfo) -> tuple[int, int]:
        return crossing.from_stage, crossing.to_stage

    for crossing in recording.crossings:
        table.append(
            [
                f"{crossing.from_stage} → {crossing.to_stage}",
                f"{crossing.dtype} {list(crossing.shape)}"
                + (f" {crossing.what}" if crossing.what else ""),
                bytes_text(crossing.bytes),
                "and back" if crossing.needs_grad else "one way",
                _short(crossing.where),
            ]
        )
    shown = table if len(table) <= 12 else [*table[:11], [f"… {len(table) - 11} more", *[""] * 4]]
    total = sum(c.bytes for c in recording.crossings if link(c)[0] != link(c)[1])
    head = [
        "Crossing",
        f"Tensor ({bytes_text(total)} a micro-batch)",
        "Size",
        "Gradient",
        "Read at",
    ]
    return text_table(head, shown, left=2)


def _notes(recording: Recording) -> list[str]:
    notes = []
    for unmarked in recording.unmarked:
        if recording.num_stages == 1:
            break
        after = (
            "before the first mark"
            if unmarked.after is None
            else (f"after the block at {_short(unmarked.after)} ended")
        )
        notes.append(
            f"{unmarked.operations} operations {after} are on stage {unmarked.stage} "
            f"(from {_short(unmarked.where)})"
        )
    for held in recording.tied:
        where = f", read on {held.also_read_on} too" if held.also_read_on else ""
        notes.append(f"tied: {' = '.join(held.names)} lives on stage {held.stage}{where}")
    for held in recording.shared_state:
        notes.append(f"buffer {held.name} is written, and read on several hops: {held.hops}")
    unused = [p.name for p in recording.unused]
    if unused:
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        notes.append(f"no call reads {', '.join(unused[:3])}{more}")
    if recording.num_stages == 1:
        notes.append("nothing is marked: everything is on stage 0")
    if len(recording.route) > recording.num_stages:
        notes.append(f"the route returns to a stage: {recording.route}")
    for hop in recording.hops:
        if hop.whole and recording.num_stages > 1:
            notes.append(
                f"zero-bubble schedules leave hop {hop.index}'s backward whole: {hop.whole}"
            )
    for sync in recording.host_syncs if recording.num_stages > 1 else ():
        notes.append(f"on an accelerator the host waits at {_short(sync.where)}: {sync.operation}")
    if "" in recording.unhookable:
        notes.append(
            "what autograd saves is not known, and nothing can be recomputed: torch.func in the "
            "forward's own code; put it into a module"
        )
    if recording.why_real:
        notes.append(f"recorded by a real run: {recording.why_real}")
    return notes


def _range(stages: tuple[int, ...]) -> str:
    if len(stages) > 2 and stages == tuple(range(stages[0], stages[-1] + 1)):
        return f"{stages[0]}-{stages[-1]}"
    return ", ".join(map(str, stages))


def _short(where: str) -> str:
    return where.rpartition("/")[2]


def bytes_text(count: int) -> str:
    """A size as people read it."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError  # the loop ends at GiB


def text_table(head: list[str], rows: list[list[str]], left: int) -> str:
    """Columns as wide as they need; the first ``left`` to the left, the rest to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(cells: list[str]) -> str:
        return "  ".join(
            f"{c:<{w}}" if i < left else f"{c:>{w}}"
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([line(head), rule, *(line(row) for row in rows)])
