"""The rows of a summary's tables: one for each module that is shown, and one for each stage.

The figures of a module include the modules inside of it, so rows add up to the one around them,
together with its own operations. The tree is that of the calls and not of the paths: a module is
below the one that calls it, which is where its time goes, and below each if there are several. Only
parameters and buffers can be in two rows at once; the later row then says how many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from ..._common.modules import paths_around
from ...costs.rates import Rates

if TYPE_CHECKING:  # a recording can summarize itself; its rows need only its fields
    from ...recording.calls import Call
    from ...recording.entries import TensorInfo
    from ...recording.recording import Recording


@dataclass
class ModuleRow:
    """A module, or a run of modules that are alike.

    Attributes:
        paths: the paths of the modules.
        name: the path from the row above it.
        kind: the modules' class.
        depth: the depth in the tree of calls.
        calls: the number of calls of all of ``paths`` in the row above.
        stages: the stages that they run on.
        parameters: the number of elements of the parameters, tied ones counted once.
        trainable: the number of these that need a gradient.
        bytes: the size of the parameters and buffers.
        shared_parameters: the number of ``parameters`` that an earlier row beside it has too: of
            tied weights, or of a module that is called in several places. The row above counts
            them once.
        shared_bytes: the same for ``bytes``.
        activation_bytes: the bytes that autograd saves in the calls, for one micro-batch. A tensor
            that an earlier call of the hop has saved counts there.
        flops: the floating-point operations of one micro-batch's forward.
        forward_seconds: the predicted time of the forward.
        backward_seconds: the predicted time of the backward.
        share: the share of the stage's predicted time; ``None`` on several stages.
        outputs: the shapes that the calls return, each once.
        where: the line of the first call.
        device: the stages' devices; ``None`` if they are not known.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> row = bp.record(net, torch.ones(8, 4)).summary().modules[1]
        >>> row.name, row.kind, row.stages, row.parameters, row.flops
        ('0', 'Linear', [0], 20, 256.0)
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
    """A stage: its parameters, and the cost of a micro-batch on it.

    Attributes:
        stage: the stage's number.
        device: its device; ``None`` if it is not known.
        name: the name of the block that begins it.
        begins: the line of the mark that begins it; ``None`` if no call is on it.
        hops: the visits of the route.
        operations: the number of torch functions that the forward calls.
        parameters: the number of elements of the parameters that live here.
        trainable: the number of these that need a gradient.
        bytes: the size of the parameters and buffers.
        activation_bytes: the bytes that autograd saves of one micro-batch, each storage of a hop
            once.
        flops: the floating-point operations of one micro-batch's forward.
        forward_seconds: the predicted time of the forward.
        backward_seconds: the predicted time of the backward.
        restore_seconds: the predicted time of recomputation.
        peak_bytes: the predicted peak of memory in a step; ``None`` if no step is known.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> row = bp.record(net, torch.ones(8, 4)).summary().stages[1]
        >>> row.stage, row.hops, row.parameters, row.bytes, row.flops
        (1, [1], 10, 40, 128.0)
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
        """The time of one micro-batch: forward, backward and recomputation."""
        return self.forward_seconds + self.backward_seconds + self.restore_seconds

    @property
    def memory_bytes(self) -> int:
        """The predicted peak, or else parameters, buffers and one micro-batch's activations."""
        return self.bytes + self.activation_bytes if self.peak_bytes is None else self.peak_bytes


def stage_rows(
    recording: Recording, devices: list[str] | None, rates: Sequence[Rates]
) -> list[StageRow]:
    """Return a row for each stage.

    Args:
        recording: the recording.
        devices: the name of each stage's device.
        rates: the rates of each stage's device, which times are predicted by.
    """
    rows = []
    for stage in range(recording.num_stages):
        hops = [hop for hop in recording.hops if hop.stage == stage]
        parameters = [p for p in recording.parameters if p.stage == stage]
        buffers = [b for b in recording.buffers if b.stage == stage]
        rows.append(
            StageRow(
                stage=stage,
                device=None if devices is None else devices[stage],
                name=next((hop.name for hop in hops if hop.name), None),
                begins=next((hop.where for hop in hops), None),
                hops=[hop.index for hop in hops],
                operations=sum(hop.operations for hop in hops),
                parameters=sum(p.elements for p in parameters),
                trainable=sum(p.elements for p in parameters if p.trainable),
                bytes=sum(info.bytes for info in (*parameters, *buffers)),
                activation_bytes=sum(hop.never.bytes for hop in hops),
                flops=sum(hop.flops for hop in hops),
                forward_seconds=sum(rates[stage].forward(hop.work) for hop in hops),
                backward_seconds=sum(rates[stage].backward(hop.work) for hop in hops),
            )
        )
    return rows


def module_rows(
    recording: Recording, stages: list[StageRow], depth: int | None, rates: Sequence[Rates]
) -> list[ModuleRow]:
    """Return the modules' rows in the order of their calls, with repeated modules in one row.

    Args:
        recording: the recording.
        stages: the rows of its stages.
        depth: the depth above which modules are opened; ``None`` opens those that span stages.
        rates: as for :func:`stage_rows`.
    """
    return list(_Rows(recording, stages, depth, rates).below([], None, 0))


@dataclass(eq=False)
class _Node:
    """A module with all its calls in the one above, in the place of the first call."""

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
        self._infos = [*recording.parameters, *recording.buffers]
        self._inside = _by_module(self._infos)
        self._roots: dict[str, _Node] = {}
        nodes: dict[int, _Node] = {}  # by the id of a call
        for call in recording.calls:
            outer = _outer_of_same(call)
            if outer is not None:  # a function that calls itself: the outer call counts for both
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
        """Iterate over the row of alike nodes, and the rows inside; for no node, over the roots'.

        Args:
            nodes: nodes that are alike.
            name: the name of their row.
            level: the depth of the rows inside.
            counted: the parameters and buffers that rows beside it have so far; filled in.
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
        """Return a key that is equal for repeated blocks.

        These are numbered, of one class, on one stage and alike inside. Where the name is more than
        a number (``layer_3``), they also have the same size.
        """
        parent, prefix, number = _numbered(node.path)
        if not number:
            return node
        size = sum(self._infos[key].elements for key in self._keys(node)) if prefix else 0
        return parent, prefix, size, self._shape(node, level)

    def _shape(self, node: _Node, level: int) -> tuple[object, ...]:
        shown = node.children.values() if self._is_open(node, level) else ()
        inside = tuple((_name(c.path, node.path), self._shape(c, level + 1)) for c in shown)
        return node.kind, tuple(sorted(node.stages)), inside

    def _row(self, nodes: list[_Node], name: str, level: int, counted: set[int]) -> ModuleRow:
        keys = set().union(*map(self._keys, nodes))
        shared = [self._infos[key] for key in keys & counted]
        counted |= keys
        infos = [self._infos[key] for key in keys]
        parameters = [info for info in infos if not info.is_buffer]
        calls = [call for node in nodes for call in node.calls]
        stages = sorted(set().union(*(node.stages for node in nodes)))
        work = [(self._rates[stage], work) for call in calls for stage, work in call.work.items()]
        forward = sum(rates.forward(done) for rates, done in work)
        backward = sum(rates.backward(done) for rates, done in work)
        stage = self._stages[stages[0]]
        whole = stage.forward_seconds + stage.backward_seconds if len(stages) == 1 else 0.0
        devices = [self._stages[s].device or "" for s in stages]
        return ModuleRow(
            paths=[node.path for node in nodes],
            name=name,
            kind=nodes[0].kind,
            depth=level,
            calls=len(calls),
            stages=stages,
            parameters=sum(p.elements for p in parameters),
            trainable=sum(p.elements for p in parameters if p.trainable),
            bytes=sum(info.bytes for info in infos),
            shared_parameters=sum(info.elements for info in shared if not info.is_buffer),
            shared_bytes=sum(info.bytes for info in shared),
            activation_bytes=sum(call.saved_bytes for call in calls),
            flops=sum(call.flops for call in calls),
            forward_seconds=forward,
            backward_seconds=backward,
            share=(forward + backward) / whole if whole else None,
            outputs=list(dict.fromkeys(shape for call in calls for shape in call.outputs)),
            where=calls[0].where,
            device=", ".join(dict.fromkeys(devices)) or None,
        )

    def _keys(self, node: _Node) -> set[int]:
        """Return the parameters and buffers of a module, and of those that it calls.

        A function has none of its own.
        """
        inside = self._inside.get(node.path, set())
        return inside.union(*(self._keys(child) for child in node.children.values()))


def _by_module(infos: list[TensorInfo]) -> dict[str, set[int]]:
    """Return the parameters and buffers inside of each module, under any of their names."""
    found: dict[str, set[int]] = {}
    for key, info in enumerate(infos):
        for name in info.names:
            for path in paths_around(name):
                found.setdefault(path, set()).add(key)
    return found


def _stages_of(call: Call, route: list[int]) -> set[int]:
    """Return the stages that a call visits; one is enough where it computes nothing."""
    return {route[hop] for hop in call.hops} or {call.stage}


def _outer_of_same(call: Call) -> Call | None:
    """Return the call of the same module, or function, that this one is inside of."""
    outer = call.parent
    while outer is not None and outer.path != call.path:
        outer = outer.parent
    return outer


def _numbered(path: str) -> tuple[str, str, str]:
    """Return the path of the module around a module, its name, and the number at its end."""
    parent, _, name = path.rpartition(".")
    prefix = name.rstrip("0123456789")
    return parent, prefix, name[len(prefix) :]


def _name(path: str, above: str) -> str:
    return path.removeprefix(f"{above}.") if above else path
