"""A summary as HTML for notebooks: the tables of the text, with a colour for each stage.

It is one element with its own styles and no script, so that a saved notebook shows it too.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from ..._common.text import bytes_text, milliseconds_text, one_line
from .columns import COLUMNS
from .rows import StageRow
from .text import crossing_table, label, memory_head, predicted, stage_table

if TYPE_CHECKING:  # a summary can show itself
    from .data import SummaryData

_STYLE = """
.blockpipe-summary { font-size: 90%; overflow-x: auto }
.blockpipe-summary table { border-collapse: collapse; margin: 0 0 1em 0 }
.blockpipe-summary th, .blockpipe-summary td { padding: 2px 10px 2px 0; text-align: right;
  white-space: nowrap; font-variant-numeric: tabular-nums }
.blockpipe-summary th { border-bottom: 1px solid currentColor }
.blockpipe-summary .left { text-align: left }
.blockpipe-summary .stage { border-left: 6px solid; padding-left: 6px }
.blockpipe-summary .bar { display: inline-block; height: .8em; margin-right: 6px }
"""


def as_html(summary: SummaryData) -> str:
    """Return the tables in one ``div``."""
    notes = "".join(f"<li>{_text(note)}</li>" for note in summary.notes)
    parts = [
        f"<style>{_STYLE}</style>",
        _modules(summary),
        _stages(summary),
        f"<p>{'<br>'.join(map(escape, predicted(summary)))}</p>",
        _crossings(summary),
        f"<ul>{notes}</ul>" if notes else "",
    ]
    return f'<div class="blockpipe-summary">{"".join(parts)}</div>'


def _modules(summary: SummaryData) -> str:
    lines = []
    for row in summary.modules:
        colour = _colour(row.stages[0]) if len(row.stages) == 1 else "transparent"
        title = _text(", ".join(path or summary.model for path in row.paths))
        name = (
            f'<td class="left stage" style="border-color: {colour}" title="{title}">'
            f'<span style="padding-left: {1.5 * row.depth:g}em">{_text(label(row, summary))}'
            "</span></td>"
        )
        cells = "".join(_cell(COLUMNS[column].cell(row)) for column in summary.columns)
        lines.append(name + cells)
    return _table(["Module (type)", *(COLUMNS[name].head for name in summary.columns)], lines)


def _stages(summary: SummaryData) -> str:
    head, rows = stage_table(summary)
    longest = max(stage.seconds for stage in summary.stages) or 1
    most = max(stage.memory_bytes for stage in summary.stages) or 1
    lines = []
    for cells, stage in zip(rows, [*summary.stages, None], strict=True):
        line = "".join(map(_cell, cells))
        if stage is not None:
            seconds = f"{milliseconds_text(stage.seconds)} ms"
            line += _bar(stage, stage.seconds / longest, seconds)
            line += _bar(stage, stage.memory_bytes / most, bytes_text(stage.memory_bytes))
        lines.append(line)
    return _table([*head, "Time", memory_head(summary)], lines)


def _crossings(summary: SummaryData) -> str:
    if not summary.crossings:
        return ""
    head, rows = crossing_table(summary)
    return _table(head, ["".join(map(_cell, cells)) for cells in rows])


def _table(head: Iterable[str], lines: Iterable[str]) -> str:
    first, *others = head
    top = f'<th class="left">{escape(first)}</th>' + "".join(
        f"<th>{escape(h)}</th>" for h in others
    )
    return f"<table><tr>{top}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _cell(text: str) -> str:
    return f"<td>{_text(text)}</td>"


def _text(text: str) -> str:
    return escape(one_line(text))


def _bar(stage: StageRow, share: float, text: str) -> str:
    style = f"width: {8 * share:.2f}em; background: {_colour(stage.stage)}"
    return f'<td class="left"><span class="bar" style="{style}"></span>{escape(text)}</td>'


def _colour(stage: int) -> str:
    """Return a stage's colour, by the golden angle: neighbours differ whatever their number."""
    return f"hsl({stage * 137.5 % 360:g}, 60%, 55%)"
