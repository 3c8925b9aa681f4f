"""The columns that a summary can show of a module: their names, headings and cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..._common.callsite import users_line
from ..._common.checks import expected
from ..._common.text import bytes_text, flops_text, milliseconds_text, stages_text
from ...errors import UsageError
from .rows import ModuleRow


class Column(NamedTuple):
    """A column: its heading, and the cell of a module."""

    head: str
    cell: Callable[[ModuleRow], str]


def _count(number: int) -> str:
    return f"{number:,}" if number else "-"


def _size(number: int) -> str:
    return bytes_text(number) if number else "-"


def _star(shared: int) -> str:
    """Return the mark of a cell whose number an earlier row has too."""
    return "*" if shared else ""


def _output(row: ModuleRow) -> str:
    if not row.outputs:
        return "-"
    first = "×".join(map(str, row.outputs[0])) or "scalar"
    return first + (" …" if len(row.outputs) > 1 else "")


COLUMNS = {
    "stage": Column("Stage", lambda row: stages_text(row.stages)),
    "device": Column("Device", lambda row: row.device or "-"),
    "parameters": Column(
        "Parameters", lambda row: _star(row.shared_parameters) + _count(row.parameters)
    ),
    "trainable": Column(
        "Trainable", lambda row: _star(row.shared_parameters) + _count(row.trainable)
    ),
    "bytes": Column("Size", lambda row: _star(row.shared_bytes) + _size(row.bytes)),
    "activations": Column("Activations", lambda row: _size(row.activation_bytes)),
    "flops": Column("Flops", lambda row: flops_text(row.flops) if row.flops else "-"),
    "forward_ms": Column("Forward ms", lambda row: milliseconds_text(row.forward_seconds)),
    "backward_ms": Column("Backward ms", lambda row: milliseconds_text(row.backward_seconds)),
    "share": Column("Share", lambda row: "-" if row.share is None else f"{100 * row.share:.0f} %"),
    "output": Column("Output", _output),
}
STARRED = ("parameters", "trainable", "bytes")
_USUAL = ("stage", "device", "parameters", "activations", "share")  # fit 100 characters


def chosen(columns: Iterable[str] | None, *, has_devices: bool) -> list[str]:
    """Return the names of the columns to show.

    Args:
        columns: the names that a user asked for; ``None`` takes the usual ones.
        has_devices: whether devices are known.

    Raises:
        UsageError: a name is unknown; or it is ``"device"``, and no devices are known.
    """
    if columns is None:
        return [name for name in _USUAL if name != "device" or has_devices]
    names = list(columns) if isinstance(columns, Iterable) else []
    if isinstance(columns, str) or not isinstance(columns, Iterable):
        problem: object = columns
    else:
        problem = [name for name in names if not isinstance(name, str) or name not in COLUMNS]
    if problem != []:
        contract = f"names out of {', '.join(COLUMNS)}"
        fix = f"leave it out for {', '.join(_USUAL)}"
        raise UsageError(expected(contract, problem, for_="columns", fix=fix))
    if "device" in names and not has_devices:
        raise UsageError(
            f"the column 'device' needs the stages' devices, but none are known ({users_line()}); "
            "pass devices=[…], one for each stage"
        )
    return list(dict.fromkeys(names))
