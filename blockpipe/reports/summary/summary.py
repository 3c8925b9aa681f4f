"""A recording summarized: what is where, what it costs, what crosses, and what to look at.

A module whose call stays on one stage is one row, whatever is inside it; only what spans stages
is opened. So the table of a deep model is about as long as the model has stages, and what matters
for a pipeline is on one screen. ``depth=`` opens more, or less.

A summary is plain data; text and HTML are two views of it (``text.py``,
``html.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..._common.callsite import users_line
from ..._common.text import short
from ...costs.probing import rates_of
from ...costs.rates import Rates, together
from ...errors import UsageError
from .columns import STARRED, chosen
from .data import Prediction, SummaryData
from .html import as_html
from .rows import module_rows, stage_rows
from .text import as_text

if TYPE_CHECKING:  # a recording can summarize itself; that needs only its fields
    from ...recording.recording import Recording


@dataclass(repr=False)
class Summary(SummaryData):
    """What is on which stage, and what it costs: printed, it is a table; in a notebook too.

    Sizes and times are of one micro-batch; times are predicted from what the recording counted and
    what the devices were measured to do.

    Attributes:
        model: the class.
        modules: a row each, in the order of their calls:
            :class:`blockpipe.reports.ModuleRow`.
        stages: a row each: :class:`blockpipe.reports.StageRow`.
        crossings: tensors that are made on one hop and read on another.
        tied: parameters with several names, or read on several stages.
        unused: names of parameters that no call reads.
        unmarked: operations that belong to no mark.
        notes: what else there is to say.
        parameters: how many numbers, in all.
        bytes: of parameters and buffers, in all.
        rates: of which devices, by which times are predicted, and where these are from.
        prediction: of a step; ``None``: it is not known what a step is.
        columns: that are shown of a module.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> summary = bp.record(net, torch.zeros(8, 4)).summary()
        >>> [(row.name, row.stages, row.parameters) for row in summary.modules]
        [('', [0, 1], 30), ('0', [0], 20), ('1', [1], 10)]
    """

    def to_dict(self) -> dict[str, Any]:
        """Every number as plain data, which ``json`` can write; all columns are in it."""
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

    # At a prompt one wants the table, as of a data frame.
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
        recording: of what.
        depth: modules above it in the tree of calls are opened (the model itself is at 0);
            ``None``: those that span stages.
        columns: what to show of a module; see :meth:`Recording.summary`.
        devices: of each stage, or their names; ``None``: not known.
        rates: of each stage's device; ``None``: those of ``devices`` with torch's threads.
        prediction: of a step.
        notes: what there is to say beside the recording.
    """
    if depth is not None and (not isinstance(depth, int) or isinstance(depth, bool) or depth < 0):
        raise UsageError(
            "depth is a whole number from 0 (the model alone) on, or None (what spans stages is "
            f"opened), but {depth!r} came ({users_line()})"
        )
    names = _names(devices, recording.num_stages)
    shown = chosen(columns, has_devices=names is not None)
    if rates is None:
        rates = [rates_of(name) for name in names or ["cpu"] * recording.num_stages]
    stages = stage_rows(recording, names, rates)
    if prediction is not None:
        for stage in stages:
            stage.restore_seconds = prediction.restore_seconds[stage.stage]
            stage.peak_bytes = prediction.peak_bytes[stage.stage]
    modules = module_rows(recording, stages, depth, rates)
    starred = any(row.shared_bytes for row in modules) and not set(STARRED).isdisjoint(shown)
    star = ["*: an earlier row has some of these parameters too; what both are in counts them once"]
    return Summary(
        recording.model,
        modules,
        stages,
        [
            {
                "from_stage": c.from_stage,
                "to_stage": c.to_stage,
                "shape": list(c.shape),
                "dtype": c.dtype,
                "bytes": c.bytes,
                "needs_grad": c.needs_grad,
                "what": c.what,
                "where": c.where,
            }
            for c in recording.crossings
        ],
        [
            {"names": list(h.names), "stage": h.stage, "also_read_on": list(h.also_read_on)}
            for h in recording.tied
        ],
        [held.name for held in recording.unused],
        [_plain(unmarked) for unmarked in recording.unmarked],
        [*(star if starred else ()), *_notes(recording), *notes],
        sum(p.elements for p in recording.parameters),
        sum(held.bytes for held in (*recording.parameters, *recording.buffers)),
        together(of_one.source for of_one in rates),
        prediction,
        shown,
    )


def _names(devices: Sequence[object] | None, stages: int) -> list[str] | None:
    if devices is None:
        return None
    if isinstance(devices, str) or not isinstance(devices, Sequence) or len(devices) < stages:
        raise UsageError(
            f"devices has a device, or its name, for each of {stages} stages, but {devices!r} "
            f"came ({users_line()})"
        )
    return [str(device) for device in devices]


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, dict) else value


def _why_one_stage(recording: Recording) -> str:
    if recording.planned:
        return "the plan has one stage"
    if recording.marks or recording.unreached:
        return "no mark that is reached begins another stage"
    return "nothing is marked"


def _notes(recording: Recording) -> list[str]:
    several = recording.num_stages > 1
    notes = []
    for unmarked in recording.unmarked if several else ():
        after = (
            "before the first mark"
            if unmarked.after is None
            else f"after the block at {short(unmarked.after)} ended"
        )
        count = unmarked.operations
        what, verb = ("operation", "is") if count == 1 else ("operations", "are")
        where = short(unmarked.where)
        notes.append(f"{count} {what} {after} {verb} on stage {unmarked.stage} (from {where})")
    for held in recording.tied:
        where = f", read on {held.also_read_on} too" if held.also_read_on else ""
        notes.append(f"tied: {' = '.join(held.names)} lives on stage {held.stage}{where}")
    for held in recording.shared_state:
        what = "buffer" if held.is_buffer else "parameter"
        notes.append(f"{what} {held.name} is written, and read on several hops: {held.hops}")
    for shared in recording.shared_changes:
        notes.append(f"the forward changes {shared.what}, and {shared.seen} on hops {shared.hops}")
    unused = [p.name for p in recording.unused]
    if unused:
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        notes.append(f"no call reads {', '.join(unused[:3])}{more}")
    notes += recording.unreached
    if not several:
        notes.append(f"{_why_one_stage(recording)}: everything is on stage {recording.route[0]}")
    if len(recording.route) > recording.num_stages:
        notes.append(f"the route returns to a stage: {recording.route}")
    for hop in recording.hops[1:]:  # nobody waits for the first one's gradients: it gains nothing
        if hop.whole:
            notes.append(
                f"zero-bubble schedules leave hop {hop.index}'s backward whole: {hop.whole}"
            )
    for sync in recording.host_syncs if several else ():
        notes.append(f"on an accelerator the host waits at {short(sync.where)}: {sync.operation}")
    if "" in recording.unhookable:
        notes.append(
            "what autograd saves is not known, and nothing can be recomputed: torch.func in the "
            "forward's own code; put it into a module"
        )
    if recording.why_elsewhere:
        notes.append(
            "recorded where the model is, and not on fakes of the stages' devices, whose kernels "
            f"may keep other tensors: {recording.why_elsewhere}"
        )
    if recording.why_real:
        notes.append(f"recorded by a real run: {recording.why_real}")
    return notes
