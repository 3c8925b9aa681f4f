"""One hop's backward: whole, or in two parts.

In two parts, the first computes only the gradients that other hops wait for, and the second those
of the parameters, whenever the lane has time (zero-bubble schedules). The graph is walked once to
find the *frontier*: nodes on the way to what came in that have an edge off that way, to parameters.
The first part keeps the gradients that arrive at the frontier; the second takes one step from each
of its nodes. So nothing is computed twice, and parameters that no incoming tensor leads to (an
embedding, learned queries) get their gradients as well, where ``torch.distributed.pipelining``
loses them: for it, the second part begins at the inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .._common.threads.thread_state import theirs
from .._torch.graph import PythonNode, engine, gradient_hooks, incoming, sequence_number
from .tags import HopGraph

Root = tuple[GradientEdge, Tensor | None]


def run_engine(*arguments: Any) -> Any:
    """Run torch's engine as the user's code, as its hooks and functions are the user's."""
    with theirs():
        return engine(*arguments)


def run_whole(graph: HopGraph) -> None:
    """Compute all gradients of a hop: the parameters' in ``.grad``, the crossings' in their
    slots."""
    if not graph.roots:
        return
    edges, gradients = zip(*graph.roots, strict=True)
    for crossing in graph.crossings:
        crossing.slot.open = True
    run_engine(edges, gradients, False, False, (), True, True)
    for crossing in graph.crossings:
        crossing.slot.open = False


@dataclass(slots=True)
class _FrontierStep:
    """A step from a frontier node to where its edges leave the way to the inputs."""

    node: Node
    edges: list[GradientEdge]
    gradients: tuple[Tensor | None, ...] | None = None


@dataclass(slots=True)
class WeightPart:
    """The rest of a hop's backward, from the frontier to the parameters."""

    roots: list[Root]
    steps: list[_FrontierStep]

    def run(self) -> None:
        """Add the gradients of the parameters to ``.grad``."""
        roots, steps = self.roots, self.steps
        self.roots, self.steps = [], []
        for step in steps:
            if step.gradients is None:
                continue  # no gradient came this way
            given = [(i, g) for i, g in enumerate(step.gradients) if g is not None]
            step.gradients = None
            if not given:
                continue
            starts = tuple(GradientEdge(step.node, i) for i, _ in given)
            values = tuple(g for _, g in given)
            ends = tuple(step.edges)
            found = run_engine(starts, values, False, False, ends, True, False)
            roots += [(e, g) for e, g in zip(ends, found, strict=True) if g is not None]
        if roots:
            # Together, so that a parameter's hooks fire once, with the sum.
            edges, gradients = zip(*roots, strict=True)
            run_engine(edges, gradients, False, False, (), True, True)


def run_input_part(graph: HopGraph) -> WeightPart | None:
    """Compute the gradients of a hop's crossings, in their slots.

    Returns:
        What remains; ``None`` if the graph cannot be split: then nothing was done.
    """
    ends = entries_of(graph)
    split = _split(graph.roots, [entry.node for entry in ends])
    if isinstance(split, str):
        return None
    through, rest = split
    if through:
        handles = [step.node.register_prehook(partial(_keep, step)) for step in rest.steps]
        edges, gradients = zip(*through, strict=True)
        try:
            found = run_engine(edges, gradients, True, False, tuple(ends), True, False)
        finally:
            for handle in handles:
                handle.remove()
        for crossing, gradient in zip(graph.crossings, found, strict=True):
            crossing.slot.gradient = gradient
    return rest


def _keep(step: _FrontierStep, gradients: tuple[Tensor | None, ...]) -> None:
    step.gradients = gradients


def entries_of(graph: HopGraph) -> list[GradientEdge]:
    """Return the places where gradients arrive; they are known where the step splits backwards."""
    return [crossing.entry for crossing in graph.crossings if crossing.entry is not None]


def why_whole(roots: list[Root], entries: list[Node]) -> str | None:
    """Return why a backward from these roots cannot be split; ``None`` if it can.

    Where it is split, two parts are the same as the whole. They would not be, if

    - nobody waits for the first part;
    - a Python function is on the way (a compiled module, a custom function): it computes all its
      gradients at once, and would run twice;
    - a parameter has a hook, which would fire at the end of the first step from the frontier and
      again;
    - a parameter is read twice: the later operation's step would lead through the earlier one.
    """
    split = _split(roots, entries)
    return split if isinstance(split, str) else None


def kept_for_weights(roots: list[Root], entries: list[Node]) -> int:
    """Return the bytes of the gradients that are kept between the two parts of a split backward."""
    split = _split(roots, entries)
    if isinstance(split, str):
        return 0
    _, rest = split
    metadata = [m for step in rest.steps for m in incoming(step.node)]
    # A size that is no number is a nested tensor's ragged one.
    shapes = [[n for n in m.shape if isinstance(n, int)] for m in metadata]
    return sum(math.prod(s) * m.dtype.itemsize for s, m in zip(shapes, metadata, strict=True))


def _split(roots: list[Root], entries: list[Node]) -> tuple[list[Root], WeightPart] | str:
    """Return the roots that lead to entries and the beginning of the second part, or why there is
    none."""
    if not entries or not roots:
        return "no other hop waits for its gradients"
    leads = dict.fromkeys(entries, True)
    following = _following(roots, leads)
    steps = []
    owners: dict[Node, Node | None] = {}
    for node, edges in following.items():
        if not leads[node]:
            continue
        if isinstance(node, PythonNode):
            return f"{type(node).__name__.removesuffix('Backward')} is a Python function"
        off = [(n, i) for n, i in edges if n is not None and not leads[n]]
        if not off:
            continue
        steps.append(_FrontierStep(node, [GradientEdge(n, i) for n, i in dict.fromkeys(off)]))
        for begin, _ in off:
            if not _claim(begin, node, owners, following):
                return "a parameter is read twice, or has a hook"
    direct = [root for root in roots if not leads[root[0].node]]
    for edge, _ in direct:
        if not _claim(edge.node, None, owners, following):
            return "a parameter is read twice, or has a hook"
    # As the engine takes them: what was computed last comes first.
    steps.sort(key=lambda step: -sequence_number(step.node))
    return [root for root in roots if leads[root[0].node]], WeightPart(direct, steps)


def _following(roots: list[Root], leads: dict[Node, bool]) -> dict[Node, Any]:
    """Return the edges of every node that roots lead to, and fill in which nodes lead to an
    entry."""
    following: dict[Node, Any] = {}
    stack = [edge.node for edge, _ in roots]
    while stack:
        node = stack[-1]
        if node in leads:
            stack.pop()
            continue
        known = following.get(node)
        if known is None:
            known = following[node] = node.next_functions
            ahead = [n for n, _ in known if n is not None and n not in leads]
            if ahead:
                stack += ahead
                continue
        leads[node] = any(leads[n] for n, _ in known if n is not None)
        stack.pop()
    return following


def _claim(
    begin: Node, owner: Node | None, owners: dict[Node, Node | None], following: dict[Node, Any]
) -> bool:
    """Return whether one frontier node alone leads to all that this leads to, and nothing there has
    a hook."""
    stack = [begin]
    while stack:
        node = stack.pop()
        if node in owners:
            if owners[node] is not owner:
                return False
            continue
        owners[node] = owner
        stack += [n for n, _ in following[node] if n is not None]
        leaf = getattr(node, "variable", None)
        if leaf is not None and gradient_hooks(leaf):
            return False
    return True
