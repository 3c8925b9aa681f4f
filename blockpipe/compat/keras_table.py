"""The stage of each module call as the table that Keras users know.

Of the same width and columns as there, line by line; only what is too long for its column goes on
in the next line, where Keras cuts it off: module paths differ at their ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

from torch import nn

from .._common.callsite import remembers_caller, users_line
from .._common.text import one_line
from ..errors import UsageError
from ..recording.recording import Recording
from ..stages.plan import Assignment
from .keras_assignment import recording_of

_HEAD = ("Layer (type) (node index)", "Input Layers", "Pipeline Stage")
_ENDS = (0.4, 0.8, 1.0)  # of the line, where columns end
_LEAST = 30  # of a line: what the header's words take


@remembers_caller
def print_pipeline_stage_assignment_summary(
    model: nn.Module | Recording,
    line_length: int | None = None,
    print_fn: Callable[[str], object] | None = print,
    *,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Print the stage of each module call, in execution order.

    A module that holds calls of several stages has all of them in its row.

    Args:
        model: a recording, a :class:`Pipeline` that was called, or a model with a sample.
        line_length: in characters; 89 by default. Columns end at 40, 80 and 100 % of it.
        print_fn: gets one line a call, without a line break.
        args: a sample, for a model: the forward's positional arguments.
        kwargs: its keyword arguments.

    Raises:
        UsageError: a line that is too short; a pipeline that is not recorded yet, and no sample.

    Source: the layout is that of IPU Keras' ``Model.print_pipeline_stage_assignment_summary``.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> bp.print_pipeline_stage_assignment_summary(net, 60, args=torch.zeros(1, 4))
        Model: "Sequential"
        ____________________________________________________________
        Layer (type) (node      Input Layers            Pipeline
        index)                                          Stage
        ============================================================
        0 (Linear) (0)                                  0
        ____________________________________________________________
        1 (Linear) (0)          0                       1
        ============================================================
    """
    length = 89 if line_length is None else line_length
    if not isinstance(length, int) or isinstance(length, bool) or length < _LEAST:
        raise UsageError(
            f"line_length is a whole number from {_LEAST} on, but {line_length!r} came "
            f"({users_line()})"
        )
    write = print if print_fn is None else print_fn
    if not callable(write):
        raise UsageError(f"print_fn is a function of a line, but {write!r} came ({users_line()})")
    recording = recording_of(model, args, kwargs)
    calls = [call for call in recording.calls if call.is_module]
    write(f'Model: "{recording.model}"')
    write("_" * length)
    _write_row([[name] for name in _HEAD], length, write)
    write("=" * length)
    for row, (call, entry) in enumerate(zip(calls, recording.plan.assignments, strict=True)):
        if row:
            write("_" * length)
        name = f"{call.path} ({call.kind}) ({call.call})"
        inputs = [source.path for source in call.inbound] or [""]
        _write_row([[name], inputs, [_stages(entry)]], length, write)
    write("=" * length)


def _stages(entry: Assignment) -> str:
    return ", ".join(map(str, sorted({e.stage for e in entry.with_inside()})))


def _write_row(cells: list[list[str]], length: int, write: Callable[[str], object]) -> None:
    """Cells of any number of lines beside each other."""
    ends = [int(length * end) for end in _ENDS]
    widths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    columns = [
        [part for text in cell for part in _parts(text, width - 1)]
        for cell, width in zip(cells, widths, strict=True)
    ]
    for line in zip_longest(*columns, fillvalue=""):
        write("".join(f"{part:<{width}}" for part, width in zip(line, widths, strict=True)))


def _parts(text: str, width: int) -> list[str]:
    """A text in lines, broken after a dot or at a space where there is one."""
    parts = []
    text = one_line(text)
    while len(text) > width:
        at = max(text.rfind(" ", 0, width + 1), text.rfind(".", 0, width) + 1)
        at = at if at > 0 else width
        parts.append(text[:at].rstrip())
        text = text[at:].lstrip()
    return [*parts, text]
