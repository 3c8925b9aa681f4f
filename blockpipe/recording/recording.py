"""The class ``Recording``: a forward, stage by stage, as data.

It holds no tensor and no module, so that it can be kept, compared, printed and saved. Its lists
hold the classes of ``entries`` and ``calls``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .._common.callsite import remembers_caller
from ..costs.meter import HostSync
from ..crossing.recompute import Recomputable
from ..errors import PlanError
from ..stages.assignment import Assignment
from ..stages.cursor import SKIPPED_MARKS
from ..stages.plan import StagePlan, gaps, too_few_devices
from .calls import Call, Flow, Saved, Segment
from .entries import (
    CarriedValue,
    CrossingInfo,
    GeneratorUse,
    Hop,
    LateBackward,
    Output,
    OutsideTensor,
    SharedChange,
    TensorInfo,
    TurningValue,
    Unmarked,
    UsedAttribute,
)

if TYPE_CHECKING:
    from ..reports.summary.summary import Summary


@dataclass
class Recording:
    """The work of a forward, stage by stage. It is plain data, and holds no tensor and no module.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> recording = bp.record(net, torch.zeros(8, 4))
        >>> recording.route, recording.num_stages, recording.crossings[0].bytes
        ([0, 1], 2, 128)
    """

    model: str
    fake: bool
    hops: list[Hop] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    parameters: list[TensorInfo] = field(default_factory=list)
    buffers: list[TensorInfo] = field(default_factory=list)
    crossings: list[CrossingInfo] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list, repr=False)
    samples: int | None = None  # of the micro-batch that it is of; None: that is not known
    unmarked: list[Unmarked] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list, repr=False)
    flows: list[Flow] = field(default_factory=list, repr=False)
    saved: list[Saved] = field(default_factory=list, repr=False)
    sealed: dict[str, frozenset[int]] = field(default_factory=dict)
    sealed_functions: dict[str, frozenset[int]] = field(default_factory=dict)
    recomputable: dict[str, Recomputable] = field(default_factory=dict)
    unhookable: list[str] = field(default_factory=list)  # calls that use torch.func
    custom_functions: list[str] = field(default_factory=list)
    code_in_backward: set[int] = field(default_factory=set)  # hops with hooks, custom functions
    may_toggle: bool = False  # whether it, or code in reach, sets which parameters are trained
    recomputes: bool = False
    shared_generators: list[GeneratorUse] = field(default_factory=list)  # on several hops
    shared_changes: list[SharedChange] = field(default_factory=list)
    turning: list[TurningValue] = field(default_factory=list, repr=False)
    left_for_loss: list[SharedChange] = field(default_factory=list)  # tensors, by several hops
    read_by_loss: dict[str, int | None] = field(default_factory=dict, repr=False)
    """What the forward sets and the loss reads, in words: the id of its object; None: a tensor that
    a module has registered."""
    late_backwards: list[LateBackward] = field(default_factory=list)
    late_if_packed: list[LateBackward] = field(default_factory=list)  # by hooks around a step
    carried: list[CarriedValue] = field(default_factory=list)
    set_between: list[tuple[str, str]] = field(default_factory=list)  # sealed calls; with lines
    read_between: list[tuple[str, str]] = field(default_factory=list)  # carried ones
    recomputes_otherwise: bool = False  # a step has set what a recomputation reads
    changes_unseen: bool = False  # the forward changes something, and nobody saw who reads it
    outside: list[OutsideTensor] = field(default_factory=list, repr=False)
    changing: set[str] = field(default_factory=set)  # attributes that the forward sets, by name
    collects: bool = False  # several hops add to something of the user's, or a cache keeps that
    settles: bool = False  # modules of several hops make something at the first call, and keep it
    made_once: list[SharedChange] = field(default_factory=list)
    """What these make."""
    turns_by_size: str = ""
    """The line that reads what another hop sets otherwise for a micro-batch of another size."""
    sizes: tuple[Any, ...] = ()  # the shapes in the arguments of the micro-batch that it is of
    unread: set[str] = field(default_factory=set)  # those that look like switches, and are none
    sets: dict[int, str] = field(default_factory=dict, repr=False)
    """The objects that were there before and that it, a hook or the loss sets: by id, in words."""
    changed: set[tuple[int, Any]] = field(default_factory=set, repr=False)
    """The objects that it changes, by id, each with a name or key in it; ``None``: its content."""
    set_beside: set[tuple[int, Any]] = field(default_factory=set, repr=False)
    """The places that a hook or the loss sets, as its code tells: likewise."""
    only_read: dict[tuple[int, Any], list[int]] = field(default_factory=dict, repr=False)
    """The places that it reads and, as far as its code tells, never sets: likewise, with the hops
    that read them."""
    read_in: dict[tuple[int, Any], set[str]] = field(default_factory=dict, repr=False)
    """The places that its calls read: likewise, with the paths of these, the innermost ones."""
    assigned: set[tuple[int, Any]] = field(default_factory=set, repr=False)
    """The places that it sets, if only to what was there."""
    may_set: dict[tuple[int, Any], set[int]] = field(default_factory=dict, repr=False)
    """The places that a branch which was not taken sets, likewise, with its hops."""
    attributes: list[UsedAttribute] = field(default_factory=list, repr=False)
    """What it sets and reads of objects, and on which stages."""
    may_write: dict[str, set[int]] = field(default_factory=dict, repr=False)
    """The tensors that such a branch writes, by their names, with its hops."""
    written_beside: dict[str, set[int]] = field(default_factory=dict, repr=False)
    """The tensors that a hook or the loss writes, likewise, in the forward or the backward."""
    may_rerun: set[int] = field(default_factory=set)
    """The hops on which such a branch, or the loss, calls ``torch.utils.checkpoint``, of functions
    that were looked at."""
    may_use: dict[str, set[int]] = field(default_factory=dict, repr=False)
    """The parameters and buffers that such a branch reads or writes, if data may lead there."""
    switches: bool = False  # whether it sets switches of torch or the process for a while
    changes_process: bool = False  # where it prints to, or what it warns of, for a while
    writes_inputs: bool = False  # whether it writes in place to its arguments
    overwrites_outputs: bool = False  # whether it writes to memory that it also returns
    views_of_inputs: set[int] = field(default_factory=set)  # arguments of which views cross
    input_bytes: int = 0  # of the tensors in the arguments of a micro-batch
    writes_across: bool = False  # whether it writes in place to a tensor of another hop
    host_syncs: list[HostSync] = field(default_factory=list)
    waiting: set[str] = field(default_factory=set)  # names of torch functions that wait, in glue
    moves: bool = False  # whether a mark ever asked for another stage
    planned: bool = False  # whether a plan overrode the marks
    planned_at: str | None = None  # the line that set it on the model; None: it was passed along
    marks: dict[str, Call | None] = field(default_factory=dict, repr=False)
    """The lines of those met, heeded or not, and the innermost call that each was first met in."""
    unreached: list[str] = field(default_factory=list)
    """Marks of ``BeginBlock`` on modules that the forward did not call, and stages that marks name
    and on which nothing ran, in words."""
    given_at: str = ""
    """The line that uses a number as no later step can foresee, in ways that steps ask no more."""
    written_late: str = ""
    """What a step has written that no recording shows, so that micro-batches run one by one."""
    way: Any = field(default=None, repr=False, compare=False)
    """The :class:`~.plain_values.missed.other_ways.Way` that it has gone, for steps that go
    elsewhere; ``None``: nobody has traced it."""
    why_real: str | None = None
    why_elsewhere: str | None = None
    """Why it did not run on fake tensors of the devices that the stages will be on."""

    def __getstate__(self) -> dict[str, Any]:
        state = {key: self.__dict__[key] for key in self.__dataclass_fields__}
        return {**state, "way": None, "read_in": {}, "assigned": set()}  # of this process's objects

    def __repr__(self) -> str:
        elements = sum(held.elements for held in self.parameters)
        return (
            f"<Recording of {self.model}: {self.num_stages} stages, {len(self.hops)} hops, "
            f"{len(self.calls)} calls, {elements:,} parameters>"
        )

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()

    @property
    def route(self) -> list[int]:
        """The stage of each hop."""
        return [hop.stage for hop in self.hops]

    @property
    def is_unmarked(self) -> bool:
        """Whether nothing says where a stage begins: no plan, and no mark, reached or not."""
        return not (self.planned or self.marks or self.unreached)

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return max(self.route, default=0) + 1

    def stage_of(self, hop: int) -> int:
        """Return the stage of a hop. Code of one on which no operation has run yet may set values
        as well: it has a number below zero of its own."""
        return self.hops[hop].stage if hop < len(self.hops) else -1 - hop

    @property
    def leaves_state(self) -> bool:
        """Whether the forward, or a branch that it did not take, changes what outlives it."""
        writes = any(outside.written for outside in self.outside)
        return bool(self.changed or self.may_set or self.may_write or writes)

    @property
    def may_recompute_otherwise(self) -> bool:
        """Whether what a recomputation reads may be another value by then."""
        is_known = self.recomputes_otherwise or self._sets_what_is_read_again
        return is_known or self.leaves_state or bool(self.written_beside)

    @cached_property
    def _sets_what_is_read_again(self) -> bool:
        whole = {owner for owner, key in self.read_again if key is None}
        owners = {owner for owner, _ in self.read_again}
        return any(
            place in self.read_again or place[0] in (owners if place[1] is None else whole)
            for place in self.assigned
        )

    @cached_property
    def read_again(self) -> set[tuple[int, Any]]:
        """The places that calls which may be recomputed read: ids of objects with names or keys."""
        again = tuple(f"{p}." for p, about in self.recomputable.items() if about.is_recomputed)
        if "." in again:  # the model itself
            return {*self.read_in}
        found = self.read_in.items()
        return {place for place, paths in found if any(f"{p}.".startswith(again) for p in paths)}

    @property
    def splits_backward(self) -> list[bool]:
        """For each hop, whether its backward can be split in two parts as zero-bubble schedules
        have it: gradients of what came in, and gradients of parameters."""
        return [hop.whole is None for hop in self.hops]

    @property
    def plan(self) -> StagePlan:
        """The stage of each module call."""
        entries: dict[int, Assignment] = {}
        for call in self.calls:
            if not call.is_module:
                continue
            entry = Assignment(call.path, call.call, call.stage, call.kind)
            entries[id(call)] = entry
            outer = next((c for c in call.ancestors() if c.is_module), None)
            if outer is not None:
                entries[id(outer)].inside.append(entry)
        return StagePlan(list(entries.values()))

    @property
    def tied(self) -> list[TensorInfo]:
        """Parameters that have several names, or are read on several stages."""
        return [p for p in self.parameters if len(p.names) > 1 or p.also_read_on]

    @property
    def shared_state(self) -> list[TensorInfo]:
        """Buffers and parameters that the forward writes and that several hops read: micro-batches
        under way at once would mix in them."""
        return [h for h in (*self.buffers, *self.parameters) if h.written and len(h.hops) > 1]

    @property
    def unused(self) -> list[TensorInfo]:
        """Parameters that no call reads."""
        return [p for p in self.parameters if p.hop is None]

    def check(self, devices: int | None = None, *, in_order: bool = True) -> None:
        """Check the numbers of the stages.

        Args:
            devices: the number of devices, if known.
            in_order: whether the order counts; it does not if another mode has numbered them.

        Raises:
            PlanError: the numbers leave gaps or are not in the order in which the forward first
                reaches the stages, or there are too few devices. One error names all problems.
        """
        problems = gaps(self.route) or (list(self.begun_too_early()) if in_order else [])
        if problems and self.unreached:
            problems[-1] += f"; {self.unreached[0]}: {SKIPPED_MARKS}"
        if devices is not None and self.num_stages > devices:
            problems.append(too_few_devices(self.num_stages, devices))
        if problems:
            begins = [f"stage {h.stage} at {h.begun_by or h.where}" for h in self.hops]
            if self.planned_at is not None:
                begins.append(f"set at {self.planned_at}")
            problems[-1] += f" ({', '.join(begins)})"
        if problems:
            raise PlanError("; ".join(problems))

    def begun_too_early(self) -> Iterator[str]:
        """Yield the stages that begin before the one below, whoever numbers them."""
        highest = -1
        for hop in self.hops:
            if hop.stage > highest + 1:
                at = hop.where if hop.begun_by is None else f"{hop.begun_by}, {hop.where}"
                yield (
                    f"stage {hop.stage} begins ({at}) before stage {highest + 1} has run; "
                    "number stages in the order in which they are reached first (returning to a "
                    "lower one is fine)"
                )
            highest = max(highest, hop.stage)

    @remembers_caller
    def summary(
        self,
        devices: Sequence[object] | None = None,
        *,
        depth: int | None = None,
        columns: Iterable[str] | None = None,
    ) -> Summary:
        """Return what is on which stage, what it costs, what crosses, and what to look at.

        Args:
            devices: of each stage, or their names: a column, and what times are predicted for.
                ``None``: no column, and times are a CPU's.
            depth: modules above it in the tree of calls are opened (the model itself is at 0);
                ``None``: those that span stages.
            columns: what to show of a module, out of ``"stage"``, ``"device"``, ``"parameters"``,
                ``"trainable"``, ``"bytes"`` (of parameters and buffers), ``"activations"`` (bytes
                that autograd saves), ``"flops"`` (of the forward), ``"forward_ms"``,
                ``"backward_ms"``, ``"share"`` (of the stage's time), ``"output"`` (the shape).

        Returns:
            A :class:`blockpipe.reports.Summary`; ``str()`` is a table,
            ``to_dict()`` data.

        Raises:
            UsageError: an unknown column, a depth that is none, too few devices.

        Example:
            >>> import torch, blockpipe as bp
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
            >>> net[1] = bp.BeginBlock(net[1], stage=1)
            >>> recording = bp.record(net, torch.zeros(8, 4))
            >>> recording.summary(columns=["parameters", "output"]).stages[1].parameters
            10
        """
        from ..reports.summary.summary import summarize

        return summarize(self, depth=depth, columns=columns, devices=devices)

    @remembers_caller
    def explain(self, path: str) -> str:
        """Return the reasons why a module, or a parameter, is where it is.

        Args:
            path: of a module, a parameter or a buffer; ``""``: the model.

        Returns:
            For each of a module's calls: what put it on its stage, whether it runs untouched, what
            crosses into it, whether it is recomputed; and where its parameters live, and why.

        Raises:
            UsageError: nothing of that name; the message has near misses.

        Example:
            >>> import torch, blockpipe as bp
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
            >>> print(bp.record(net, torch.zeros(8, 4)).explain("1.weight").splitlines()[0])
            1.weight (parameter, float32 [2, 4], 32 B) lives on stage 0
        """
        from ..reports.summary.explain import explain

        return explain(self, path)
