"""The points in time where the segments of one forward and backward begin.

The forward is stamped in front of the module call that begins a segment. Autograd runs the nodes
of a graph in the reverse order in which they were made, so a segment's backward is one unbroken
stretch too. It begins with the node that was made last in the segment, which gets a hook. Hooks on
every node, or a profiler, would take longer than small segments do; module hooks for the backward
(``register_full_backward_hook``) put nodes of their own into the graph, and do not see the
operations between modules.

On an accelerator stamps are events in its stream: a host clock would time the launches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from ..._torch.graph import nodes_made, sequence_number
from ...devices.stopwatch import Stopwatch


class SegmentStamps:
    """The stamps of one forward and backward.

    Args:
        watch: takes the stamps.
    """

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch
        self.is_forward = True
        self._segments: list[int] = []
        self._forward: list[Any] = []
        self._backward: dict[int, Any] = {}
        self._turn: Any = None  # where the backward begins
        self._nodes_before: list[int] = []  # autograd's count of nodes where each segment begins

    def begin_segment(self, segment: int) -> None:
        """Stamp the beginning of a segment's forward."""
        self._segments.append(segment)
        self._nodes_before.append(nodes_made())
        self._forward.append(self.watch.now())

    def end_forward(self, roots: Sequence[Tensor]) -> None:
        """Stamp the end of the forward, and have each segment's backward stamp its beginning.

        Args:
            roots: the tensors that the backward begins at; none if there is no backward.
        """
        self.is_forward = False
        self._forward.append(self.watch.now())
        newest: dict[int, tuple[int, Node]] = {}
        for node in _nodes(roots):
            made = sequence_number(node)
            at = self._segments[max(0, bisect_right(self._nodes_before, made) - 1)]
            if at not in newest or made > newest[at][0]:
                newest[at] = made, node
        for segment, (_, node) in newest.items():
            node.register_prehook(partial(self._begin_backward, segment))
        self._turn = self.watch.now()

    def _begin_backward(self, segment: int, _: object) -> None:
        self._backward[segment] = self.watch.now()

    def times(self, count: int, end: Any) -> tuple[list[float], list[float]]:
        """Return the seconds of each segment's forward, and of its backward.

        Args:
            count: the number of segments.
            end: the stamp after the backward.
        """
        forward, backward = [0.0] * count, [0.0] * count
        for segment, (begin, until) in zip(self._segments, pairwise(self._forward), strict=True):
            forward[segment] = self.watch.seconds(begin, until)
        # The time before the first node (the roots' gradients) belongs to the last segment, where
        # the loss is. A segment without nodes has no backward, and takes no time.
        order = sorted(self._backward, reverse=True)
        begins = [self._turn, *(self._backward[segment] for segment in order[1:]), end]
        for segment, (begin, until) in zip(order, pairwise(begins), strict=False):
            backward[segment] = self.watch.seconds(begin, until)
        return forward, backward


class StampedForward:
    """A stand-in for a module's ``forward`` that stamps those of its calls that begin a segment.

    Args:
        forward: the module's own.
        segments: the segment that a call begins, by the call's number.
        stamps: the stamps of the run.
    """

    def __init__(
        self, forward: Callable[..., Any], segments: Mapping[int, int], stamps: SegmentStamps
    ) -> None:
        self.forward, self.segments, self.stamps = forward, segments, stamps
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        segment = self.segments.get(self.calls)
        self.calls += 1
        if segment is not None and self.stamps.is_forward:  # a recomputation calls it again
            self.stamps.begin_segment(segment)
        return self.forward(*args, **kwargs)


def _nodes(roots: Sequence[Tensor]) -> Iterator[Node]:
    """Iterate over the nodes that autograd will run, but for leaves.

    A leaf's node runs right after the one that made its gradient.
    """
    waiting = [t.grad_fn for t in roots if t.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                if following.next_functions or not hasattr(following, "variable"):
                    waiting.append(following)
