"""A summary of a recording: where modules are, what they cost, what crosses, and what to look at.

A module whose call stays on one stage is one row, whatever is inside it; only modules that span
stages are opened. So the table of a deep model is about as long as the model has stages, and the
figures that matter for a pipeline fit one screen. ``depth=`` opens more, or less.

A summary is plain data; text and HTML are two views of it (``text.py``, ``html.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..._common.checks import expected, is_integer
from ...costs.probing import rates_of
from ...costs.rates import Rates, together
from ...errors import UsageError
from .columns import STARRED, chosen
from .data import Prediction, SummaryData
from .html import as_html
from .notes import notes_on
from .rows import module_rows, stage_rows
from .text import as_text

if TYPE_CHECKING:  # a recording can summarize itself; that needs only its fields
    from ...recording.entries import CrossingInfo, TensorInfo
    from ...recording.recording import Recording

_STAR = "*: an earlier row has some of these parameters too; the row around both counts them once"


@dataclass(repr=False)
class Summary(SummaryData):
    """The modules of each stage and their costs. Printed, it is a table; in a notebook too.

    Sizes and times are those of one micro-batch. Times are predicted from the operations that the
    recording counted and the rates that were measured on the devices.

    Attributes:
        model: the model's class.
        modules: a :class:`blockpipe.reports.ModuleRow` for each module, in the order of calls.
        stages: a :class:`blockpipe.reports.StageRow` for each stage.
        crossings: the tensors that are made on one hop and read on another.
        tied: the parameters that have several names, or are read on several stages.
        unused: the names of parameters that no call reads.
        unmarked: the operations that belong to no mark.
        notes: further notes.
        parameters: the number of elements of all parameters.
        bytes: the size of all parameters and buffers.
        rates: the devices whose rates times are predicted by, and where the rates come from.
        prediction: the prediction of a step; ``None`` if no step is known.
        columns: the names of the columns that are shown of a module.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> summary = bp.record(net, torch.zeros(8, 4)).summary()
        >>> [(row.name, row.stages, row.parameters) for row in summary.modules]
        [('', [0, 1], 30), ('0', [0], 20), ('1', [1], 10)]
    """

    def to_dict(self) -> dict[str, Any]:
        """Return every number as plain data that ``json`` can write, with all columns."""
        found = _plain(self)
        found["imbalance"] = self.imbalance
        for key in ("modules", "stages"):
            for entry, row in zip(found[key], getattr(self, key), strict=True):
                entry["backward_seconds"] = row.backward_seconds
        for entry, stage in zip(found["stages"], self.stages, strict=True):
            entry["seconds"] = stage.seconds
            entry["memory_bytes"] = stage.memory_bytes
        assert isinstance(found, dict)
        return found

    def __str__(self) -> str:
        return as_text(self)

    # A prompt shows the table, as it does for a data frame.
    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(self)


def summarize(
    recording: Recording,
    *,
    depth: int | None = None,
    columns: Iterable[str] | None = None,
    devices: Sequence[object] | None = None,
    rates: Sequence[Rates] | None = None,
    prediction: Prediction | None = None,
    notes: Iterable[str] = (),
) -> Summary:
    """Summarize a recording.

    Args:
        recording: the recording.
        depth: the depth in the tree of calls above which modules are opened (the model itself is
            at 0); ``None`` opens those that span stages.
        columns: the columns to show of a module; see :meth:`Recording.summary`.
        devices: the stages' devices, or their names; ``None`` if they are not known.
        rates: the rates of each stage's device; ``None`` takes those of ``devices`` with torch's
            threads.
        prediction: the prediction of a step.
        notes: notes beside those on the recording.

    Raises:
        UsageError: the depth, a column or the devices are not what is expected.
    """
    if depth is not None and not is_integer(depth, 0):
        fix = "pass 0 for the model alone, or None to open modules that span stages"
        raise UsageError(expected("an integer from 0 up, or None", depth, for_="depth", fix=fix))
    names = _device_names(devices, recording.num_stages)
    shown = chosen(columns, has_devices=names is not None)
    if rates is None:
        rates = [rates_of(name) for name in names or ["cpu"] * recording.num_stages]
    stages = stage_rows(recording, names, rates)
    if prediction is not None:
        for stage in stages:
            stage.restore_seconds = prediction.restore_seconds[stage.stage]
            stage.peak_bytes = prediction.peak_bytes[stage.stage]
    modules = module_rows(recording, stages, depth, rates)
    has_stars = any(row.shared_bytes for row in modules) and not set(STARRED).isdisjoint(shown)
    return Summary(
        model=recording.model,
        modules=modules,
        stages=stages,
        crossings=[_crossing(crossing) for crossing in recording.crossings],
        tied=[_tied(info) for info in recording.tied],
        unused=[info.name for info in recording.unused],
        unmarked=[_plain(unmarked) for unmarked in recording.unmarked],
        notes=[*([_STAR] if has_stars else []), *notes_on(recording), *notes],
        parameters=sum(info.elements for info in recording.parameters),
        bytes=sum(info.bytes for info in (*recording.parameters, *recording.buffers)),
        rates=together(of_one.source for of_one in rates),
        prediction=prediction,
        columns=shown,
    )


def _crossing(crossing: CrossingInfo) -> dict[str, Any]:
    return {
        "from_stage": crossing.from_stage,
        "to_stage": crossing.to_stage,
        "shape": list(crossing.shape),
        "dtype": crossing.dtype,
        "bytes": crossing.bytes,
        "needs_grad": crossing.needs_grad,
        "what": crossing.what,
        "where": crossing.where,
    }


def _tied(info: TensorInfo) -> dict[str, Any]:
    return {
        "names": list(info.names),
        "stage": info.stage,
        "also_read_on": list(info.also_read_on),
    }


def _device_names(devices: Sequence[object] | None, stages: int) -> list[str] | None:
    if devices is None:
        return None
    if isinstance(devices, str) or not isinstance(devices, Sequence) or len(devices) < stages:
        raise UsageError(
            expected(f"a device, or its name, for each of {stages} stages", devices, for_="devices")
        )
    return [str(device) for device in devices]


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, dict) else value
