"""The stage of each module call as the table of IPU Keras, of the same width and columns.

Only a cell that is too long for its column continues in the next line, where Keras cuts it off:
module paths differ at their ends. :func:`blockpipe._common.text.text_table` has no fixed width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

from ..._common.callsite import remembers_caller
from ..._common.checks import expected, is_integer
from ..._common.text import one_line
from ...errors import UsageError
from ...recording.recording import Recording
from ...stages.assignment import Assignment
from .assignment import recording_of

_HEAD = ("Layer (type) (node index)", "Input Layers", "Pipeline Stage")
_ENDS = (0.4, 0.8, 1.0)  # where columns end, as shares of the line
_LEAST = 30  # characters of a line, which the words of the header need


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

    The row of a module whose calls inside are on several stages shows all of them.

    Args:
        model: a recording, a :class:`Pipeline` that was called, or a model with a sample.
        line_length: the characters of a line, 89 by default. Columns end at 40, 80 and 100 % of it.
        print_fn: a function that is called with each line, without its line break.
        args: for a model, the positional arguments of a sample.
        kwargs: the keyword arguments of the sample.

    Raises:
        UsageError: the line is too short; there is no sample of a model whose forward takes
            arguments, or of a pipeline that is not recorded yet.

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
    if not is_integer(length, _LEAST):
        contract = f"an integer from {_LEAST} up"
        is_sample = isinstance(line_length, Tensor | tuple | list | Mapping)
        fix = "pass a sample by name: args=…" if is_sample else ""
        raise UsageError(expected(contract, line_length, for_="line_length", fix=fix))
    write = print if print_fn is None else print_fn
    if not callable(write):
        raise UsageError(expected("a function of a line", write, for_="print_fn"))
    line = "print_pipeline_stage_assignment_summary({}, args=x)"
    recording = recording_of(model, args, kwargs, line)
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
    """Write cells of any number of lines beside each other."""
    ends = [int(length * end) for end in _ENDS]
    widths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    columns = [
        [part for text in cell for part in _parts(text, width - 1)]
        for cell, width in zip(cells, widths, strict=True)
    ]
    for line in zip_longest(*columns, fillvalue=""):
        write("".join(f"{part:<{width}}" for part, width in zip(line, widths, strict=True)))


def _parts(text: str, width: int) -> list[str]:
    """Return a text as lines, broken after a dot or at a space where possible."""
    parts = []
    text = one_line(text)
    while len(text) > width:
        at = max(text.rfind(" ", 0, width + 1), text.rfind(".", 0, width) + 1)
        at = at if at > 0 else width
        parts.append(text[:at].rstrip())
        text = text[at:].lstrip()
    return [*parts, text]
