"""A summary as text: a table of modules, one of stages, their bars, and what crosses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..._common.text import (
    bar,
    bytes_text,
    flops_text,
    milliseconds_text,
    one_line,
    short,
    text_table,
)
from .columns import COLUMNS
from .rows import ModuleRow

if TYPE_CHECKING:  # a summary can print itself
    from .data import SummaryData

_MOST_CROSSINGS = 12


def as_text(summary: SummaryData) -> str:
    """Return the tables, one below the other."""
    parts = [
        _modules(summary),
        text_table(*stage_table(summary), left=3 if _has_devices(summary) else 2),
        _bars(summary),
        "\n".join(predicted(summary)),
        _crossings(summary),
        "\n".join(f"note: {one_line(note)}" for note in summary.notes),
    ]
    return "\n\n".join(part for part in parts if part)


def _modules(summary: SummaryData) -> str:
    head = ["Module (type)", *(COLUMNS[name].head for name in summary.columns)]
    table = [
        [
            "  " * row.depth + label(row, summary),
            *(COLUMNS[name].cell(row) for name in summary.columns),
        ]
        for row in summary.modules
    ]
    left = 1
    while summary.columns[left - 1 : left] in (["stage"], ["device"]):
        left += 1
    return text_table(head, table, left=left)


def label(row: ModuleRow, summary: SummaryData) -> str:
    """Return a module's name and class, the number of modules of a run, and of calls if several."""
    count = len(row.paths)
    kind = f"{count} × {row.kind}" if count > 1 else row.kind
    calls = "" if row.calls <= count else f", {row.calls} calls"
    if row.kind == "function" and " (" in row.name:  # its key has the file and line
        name, _, where = row.name.partition(" (")
        return f"{name} ({kind}{calls}, {short(where.rstrip(')'))})"
    return f"{row.name or summary.model} ({kind}{calls})"


def _has_devices(summary: SummaryData) -> bool:
    return any(stage.device is not None for stage in summary.stages)


def stage_table(summary: SummaryData) -> tuple[list[str], list[list[str]]]:
    """Return the heading and a row for each stage; the last row is the total."""
    head = ["Stage", "Begins at", "Hops", "Parameters", "Size", "Activations", "Flops"]
    table = []
    for stage in summary.stages:
        begins = "never reached" if stage.begins is None else short(stage.begins)
        table.append(
            [
                str(stage.stage),
                (f"{stage.name!r}, " if stage.name else "") + begins,
                ", ".join(map(str, stage.hops)),
                f"{stage.parameters:,}",
                bytes_text(stage.bytes),
                bytes_text(stage.activation_bytes),
                flops_text(stage.flops),
            ]
        )
    table.append(
        [
            *("all", "", ""),
            f"{summary.parameters:,}",
            bytes_text(summary.bytes),
            bytes_text(sum(stage.activation_bytes for stage in summary.stages)),
            flops_text(sum(stage.flops for stage in summary.stages)),
        ]
    )
    if _has_devices(summary):
        head.insert(1, "Device")
        for stage, line in zip(summary.stages, table, strict=False):
            line.insert(1, stage.device or "")
        table[-1].insert(1, "")
    return head, table


def _bars(summary: SummaryData) -> str:
    longest = max(stage.seconds for stage in summary.stages) or 1
    most = max(stage.memory_bytes for stage in summary.stages) or 1
    total = sum(stage.seconds for stage in summary.stages) or 1
    recomputes = any(stage.restore_seconds for stage in summary.stages)
    table = [
        [
            str(stage.stage),
            f"{bar(stage.seconds / longest)} {100 * stage.seconds / total:3.0f} %",
            f"{bar(stage.memory_bytes / most)} {bytes_text(stage.memory_bytes):>10}",
            milliseconds_text(stage.forward_seconds),
            milliseconds_text(stage.backward_seconds),
            *([milliseconds_text(stage.restore_seconds)] if recomputes else []),
        ]
        for stage in summary.stages
    ]
    head = ["Stage", "Time", memory_head(summary), "Forward ms", "Backward ms"]
    return text_table([*head, *(["Recompute ms"] if recomputes else [])], table, left=3)


def memory_head(summary: SummaryData) -> str:
    """Return the heading of the memory bars."""
    return "Peak memory" if summary.prediction is not None else "Size and activations"


def predicted(summary: SummaryData) -> list[str]:
    """Return lines on the predictions for all stages together."""
    lines = [f"Of one micro-batch; times are predicted by rates {summary.rates}."]
    if summary.imbalance is not None and len(summary.stages) > 1:
        lines.append(f"Imbalance: the slowest stage takes {summary.imbalance:.2f} times the mean.")
    found = summary.prediction
    if found is not None:
        several = "micro-batches" if found.microbatches > 1 else "micro-batch"
        how = "in one thread" if found.one_thread else f"under {found.schedule}"
        lines.append(
            f"A step of {found.microbatches} {several} {how}: predicted "
            f"{milliseconds_text(found.step_seconds)} ms, {100 * found.bubble:.0f} % bubble."
        )
    return lines


def crossing_table(summary: SummaryData) -> tuple[list[str], list[list[str]]]:
    """Return the heading and a row for each crossing; of many, the largest, in their order."""
    crossings = shown = summary.crossings
    if len(crossings) > _MOST_CROSSINGS:
        by_size = sorted(range(len(crossings)), key=lambda i: -crossings[i]["bytes"])
        shown = [crossings[i] for i in sorted(by_size[: _MOST_CROSSINGS - 1])]
    table = [_crossing(crossing) for crossing in shown]
    if len(shown) < len(crossings):
        left = sum(c["bytes"] for c in crossings) - sum(c["bytes"] for c in shown)
        more = f"… {len(crossings) - len(shown)} more"
        table.append([more, "", bytes_text(left), "", ""])
    total = sum(c["bytes"] for c in crossings if c["from_stage"] != c["to_stage"])
    head = ["Crossing", f"Tensor ({bytes_text(total)} a micro-batch)", "Size", "Gradient"]
    return [*head, "Read at"], table


def _crossing(crossing: Mapping[str, Any]) -> list[str]:
    what = f" {crossing['what']}" if crossing["what"] else ""
    return [
        f"{crossing['from_stage']} → {crossing['to_stage']}",
        f"{crossing['dtype']} {crossing['shape']}{what}",
        bytes_text(crossing["bytes"]),
        "and back" if crossing["needs_grad"] else "one way",
        short(crossing["where"]),
    ]


def _crossings(summary: SummaryData) -> str:
    return text_table(*crossing_table(summary), left=2) if summary.crossings else ""
