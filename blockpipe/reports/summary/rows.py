"""What a summary's tables are made of: a row for each module shown, and one for each stage.

Every number of a module includes what is inside of it, and rows add up to the one that they are in,
with what that one does itself. The tree is that of the calls and not of the paths: a module stands
below the one that calls it, which is where its time goes; below each, if there are several. Only
parameters and buffers can be in two rows at once, and the later row says of how many that is so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from ...costs.rates import Rates

if TYPE_CHECKING:  # a recording can summarize itself; its rows need only its fields
    from ...recording.recording import Call, Recording, TensorInfo


@dataclass
class ModuleRow:
    """A module, or a run of alike ones.

    Attributes:
        paths: of the modules; one, or those of a run.
        name: the path from the row above it.
        kind: the class.
        depth: in the tree of calls.
        calls: how many, of all of ``paths``, in the row above.
        stages: where they run.
        parameters: how many numbers, tied ones once.
        trainable: of these, that need a gradient.
        bytes: of parameters and buffers.
        shared_parameters: how many of ``parameters`` an earlier row beside it has too: of tied
            weights, or of a module that is called in several places. They count once above.
        shared_bytes: the same of ``bytes``.
        activation_bytes: that autograd saves in the calls, of one micro-batch. What an earlier call
            of the hop has saved counts there.
        flops: of one micro-batch's forward.
        forward_seconds: predicted.
        backward_seconds: predicted: of what has a backward.
        share: of the stage's predicted time; ``None`` on several stages.
        outputs: the shapes that the calls return, each once.
        where: the line that calls it first.
    """

    paths: list[str]
    name: str
    kind: str
    depth: int
    calls: int
    stages: list[int]
    parameters: int
    trainable: int
    bytes: int
    shared_parameters: int
    shared_bytes: int
    activation_bytes: int
    flops: float
    forward_seconds: float
    backward_seconds: float
    share: float | None
    outputs: list[tuple[int, ...]]
    where: str
    device: str | None = None


@dataclass
class StageRow:
    """A stage: what it holds, and what a micro-batch costs on it.

    Attributes:
        begins: the line of the mark that begins it; ``None``: no call is on it.
        hops: the visits of the route.
        operations: torch functions that the forward calls.
        parameters: how many numbers live here.
        trainable: of these, that need a gradient.
        bytes: of parameters and buffers.
        activation_bytes: that autograd saves of one micro-batch, each storage of a hop once.
        flops: of one micro-batch's forward.
        forward_seconds: predicted.
        backward_seconds: predicted: of what has a backward.
        restore_seconds: predicted, of recomputation.
        peak_bytes: predicted for a step; ``None``: it is not known what a step is.
    """

    stage: int
    device: str | None
    name: str | None
    begins: str | None
    hops: list[int]
    operations: int
    parameters: int
    trainable: int
    bytes: int
    activation_bytes: int
    flops: float
    forward_seconds: float
    backward_seconds: float
    restore_seconds: float = 0.0
    peak_bytes: int | None = None

    @property
    def seconds(self) -> float:
        """Of one micro-batch: forward, backward, and what is recomputed between them."""
        return self.forward_seconds + self.backward_seconds + self.restore_seconds

    @property
    def memory_bytes(self) -> int:
        """The predicted peak; or what it holds, and keeps of one micro-batch."""
        return self.bytes + self.activation_bytes if self.peak_bytes is None else self.peak_bytes


def stage_rows(
    recording: Recording, devices: list[str] | None, rates: Sequence[Rates]
) -> list[StageRow]:
    """A row for each stage.

    Args:
        recording: of what.
        devices: their names, by stage.
        rates: of each stage's device, by which times are predicted.
    """
    rows = []
    for stage in range(recording.num_stages):
        hops = [hop for hop in recording.hops if hop.stage == stage]
        parameters = [p for p in recording.parameters if p.stage == stage]
        buffers = [b for b in recording.buffers if b.stage == stage]
        rows.append(
            StageRow(
                stage,
                None if devices is None else devices[stage],
                next((hop.name for hop in hops if hop.name), None),
                next((hop.where for hop in hops), None),
                [hop.index for hop in hops],
                sum(hop.operations for hop in hops),
                sum(p.elements for p in parameters),
                sum(p.elements for p in parameters if p.trainable),
                sum(held.bytes for held in (*parameters, *buffers)),
                sum(hop.never.bytes for hop in hops),
                sum(hop.flops for hop in hops),
                sum(rates[stage].forward(hop.work) for hop in hops),
                sum(rates[stage].backward(hop.work) for hop in hops),
            )
        )
    return rows


def module_rows(
    recording: Recording, stages: list[StageRow], depth: int | None, rates: Sequence[Rates]
) -> list[ModuleRow]:
    """The modules in the order of their calls, repeated ones in one row.

    Args:
        recording: of what.
        stages: its stages.
        depth: what is above is opened; ``None``: what spans stages.
        rates: as for :func:`stage_rows`.
    """
    return list(_Rows(recording, stages, depth, rates).below([], None, 0))


@dataclass(eq=False)
class _Node:
    """A module, with all its calls in the one above; it stands where the first one is."""

    path: str
    kind: str
    is_function: bool
    calls: list[Call] = field(default_factory=list)
    children: dict[str, _Node] = field(default_factory=dict)  # by path
    stages: set[int] = field(default_factory=set)


class _Rows:
    def __init__(
        self,
        recording: Recording,
        stages: list[StageRow],
        depth: int | None,
        rates: Sequence[Rates],
    ) -> None:
        self._stages = stages
        self._depth = depth
        self._rates = rates
        self._held = [*recording.parameters, *recording.buffers]
        self._inside = _by_module(self._held)
        self._roots: dict[str, _Node] = {}
        nodes: dict[int, _Node] = {}  # by the id of a call
        for call in recording.calls:
            outer = _outer_of_same(call)
            if outer is not None:  # a function that calls itself: the outer call has it all
                nodes[id(call)] = nodes[id(outer)]
                continue
            beside = self._roots if call.parent is None else nodes[id(call.parent)].children
            new = _Node(call.path, call.kind, call.is_function)
            node = nodes[id(call)] = beside.setdefault(call.path, new)
            node.calls.append(call)
            node.stages |= _stages_of(call, recording.route)

    def below(
        self, nodes: list[_Node], name: str | None, level: int, counted: set[int] | None = None
    ) -> Iterator[ModuleRow]:
        """The row of alike nodes, and those of what is in them; the roots' for no node.

        Args:
            nodes: alike ones.
            name: of their row.
            level: of what is in them.
            counted: which parameters and buffers the rows beside have so far; filled in.
        """
        children = [[*node.children.values()] for node in nodes] or [[*self._roots.values()]]
        if name is not None:
            yield self._row(nodes, name, level - 1, set() if counted is None else counted)
            if not self._is_open(nodes[0], level - 1):
                return
        above = nodes[0].path if nodes else ""
        begin = 0
        counted = set()
        for _, same in groupby(children[0], key=lambda node: self._alike(node, level)):
            run = list(same)
            group = [node for of_one in children for node in of_one[begin : begin + len(run)]]
            begin += len(run)
            label = _name(run[0].path, above)
            if len(run) > 1:
                label += f" … {_numbered(run[-1].path)[2]}"
            yield from self.below(group, label, level + 1, counted)

    def _is_open(self, node: _Node, level: int) -> bool:
        return len(node.stages) > 1 if self._depth is None else level < self._depth

    def _alike(self, node: _Node, level: int) -> object:
        """Equal for repeated blocks: numbered, of one class, on one stage, the same inside. Where
        there is more than a number (``layer_3``), they need to be of one size too."""
        parent, prefix, number = _numbered(node.path)
        if not number:
            return node
        size = sum(self._held[key].elements for key in self._keys(node)) if prefix else 0
        return parent, prefix, size, self._shape(node, level)

    def _shape(self, node: _Node, level: int) -> tuple[object, ...]:
        shown = node.children.values() if self._is_open(node, level) else ()
        inside = tuple((_name(c.path, node.path), self._shape(c, level + 1)) for c in shown)
        return node.kind, tuple(sorted(node.stages)), inside

    def _row(self, nodes: list[_Node], name: str, level: int, counted: set[int]) -> ModuleRow:
        keys = set().union(*map(self._keys, nodes))
        shared = [self._held[key] for key in keys & counted]
        counted |= keys
        held = [self._held[key] for key in keys]
        parameters = [h for h in held if not h.is_buffer]
        calls = [call for node in nodes for call in node.calls]
        stages = sorted(set().union(*(node.stages for node in nodes)))
        work = [(self._rates[stage], work) for call in calls for stage, work in call.work.items()]
        forward = sum(rates.forward(done) for rates, done in work)
        backward = sum(rates.backward(done) for rates, done in work)
        stage = self._stages[stages[0]]
        whole = stage.forward_seconds + stage.backward_seconds if len(stages) == 1 else 0.0
        devices = [self._stages[s].device or "" for s in stages]
        return ModuleRow(
            [node.path for node in nodes],
            name,
            nodes[0].kind,
            level,
            len(calls),
            stages,
            sum(p.elements for p in parameters),
            sum(p.elements for p in parameters if p.trainable),
            sum(h.bytes for h in held),
            sum(h.elements for h in shared if not h.is_buffer),
            sum(h.bytes for h in shared),
            sum(call.saved_bytes for call in calls),
            sum(call.flops for call in calls),
            forward,
            backward,
            (forward + backward) / whole if whole else None,
            list(dict.fromkeys(shape for call in calls for shape in call.outputs)),
            calls[0].where,
            ", ".join(dict.fromkeys(devices)) or None,
        )

    def _keys(self, node: _Node) -> set[int]:
        """What a module holds, and what those hold that it calls: a function holds nothing."""
        inside = self._inside.get(node.path, set())
        return inside.union(*(self._keys(child) for child in node.children.values()))


def _by_module(held: list[TensorInfo]) -> dict[str, set[int]]:
    """Which parameters and buffers are inside of each module, under any of their names."""
    found: dict[str, set[int]] = {}
    for key, one in enumerate(held):
        for name in one.names:
            path = name
            while path:
                path = path.rpartition(".")[0]
                found.setdefault(path, set()).add(key)
    return found


def _stages_of(call: Call, route: list[int]) -> set[int]:
    """Those that a call visits; one that does nothing is where the forward is then."""
    if call.hop is None or call.last_hop is None:
        return {call.stage}
    return set(route[call.hop : call.last_hop + 1])


def _outer_of_same(call: Call) -> Call | None:
    """The call of the same module, or function, that this one is in."""
    outer = call.parent
    while outer is not None and outer.path != call.path:
        outer = outer.parent
    return outer


def _numbered(path: str) -> tuple[str, str, str]:
    """The path of the module around a module, its name, and the number at the name's end."""
    parent, _, name = path.rpartition(".")
    prefix = name.rstrip("0123456789")
    return parent, prefix, name[len(prefix) :]


def _name(path: str, above: str) -> str:
    return path.removeprefix(f"{above}.") if above else path
