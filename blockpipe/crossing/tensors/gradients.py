"""The way back of one run: each hop's graph, its backward, and the gradients that it sends on.

Every (hop, micro-batch) has a small graph of its own, which begins at the crossings that it
imported and ends at its roots: the loss, or gradients that later hops have sent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ...devices.copies import PendingCopy
from ...devices.ownership import copying
from ..hop_backward import WeightPart, run_input_part, run_whole
from ..offload import Offload
from ..recompute import RecomputedCall
from ..step_context import StepContext
from ..tags import Crossing, GradientSlot, HopGraph, edge_of, enter_graph
from .hop_copies import HopCopies
from .place import Place


class Gradients:
    """The graphs of one run's hops, and the gradients between them.

    Args:
        step: what the run shares with the other runs of its step.
        place: where the run is.
        copies: the copies between its hops.

    Attributes:
        graphs: the graph of each hop whose backward has not run.
        input_gradients: by the index of an input, its gradient.
        hooked: hops whose graphs have hooks on activations, which a split backward would call
            twice.
        recomputed_calls: by hop, the calls whose activations are recomputed.
        offload: keeps saved tensors in host memory, if some of the hops are offloaded.
    """

    def __init__(self, step: StepContext, place: Place, copies: HopCopies) -> None:
        self._step = step
        self._place = place
        self._copies = copies
        self.graphs: dict[int, HopGraph] = {}
        self.input_gradients: dict[int, Tensor] = {}
        self.hooked: set[int] = set()
        self.recomputed_calls: dict[int, list[RecomputedCall]] = {}
        self.offload: Offload | None = None
        self._weights: dict[int, WeightPart] = {}

    # --- in the forward

    def enter(self, value: Tensor, source: Tensor, to_hop: int, *, on_host: bool) -> Tensor:
        """Make a copy an entry of this hop's graph.

        Args:
            value: the copy.
            source: the tensor that gets its gradient.
            to_hop: the hop whose graph has ``source``.
            on_host: whether the tensor is on the host wherever it is read.
        """
        if value.is_conj():  # autograd has no views of an entry that is conjugated itself
            with copying(), torch.enable_grad():
                entered = self.enter(value.conj(), source.conj(), to_hop, on_host=on_host)
                return entered.conj()
        if value.is_neg():
            value = value.resolve_neg()
        slot = GradientSlot()
        value = enter_graph(slot, value)
        entry = edge_of(value) if self._step.graphs.split else None
        crossing = Crossing(entry, slot, to_hop, edge_of(source), on_host)
        self._graph(self._place.hop).crossings.append(crossing)
        return value

    def enter_input(self, value: Tensor, hop: int, index: int) -> Tensor:
        """Make an input of the caller's an entry of a hop's graph; its gradient goes to
        ``input_gradients[index]``."""
        slot = GradientSlot()
        value = enter_graph(slot, value)
        edge = edge_of(value)  # stands for the caller: -1 - index
        self._graph(hop).crossings.append(Crossing(edge, slot, -1 - index, edge))
        return value

    def add_root(self, hop: int, edge: GradientEdge, gradient: Tensor | None) -> None:
        """Start the backward of a hop from here, too."""
        self._graph(hop).roots.append((edge, gradient))

    def add_sent_root(self, hop: int, edge: GradientEdge, gradient: PendingCopy) -> None:
        """Start the backward of a hop also from here, with a gradient that is on its way; the
        backward waits for it as it begins."""
        graph = self._graph(hop)
        graph.roots.append((edge, gradient.value))
        graph.arriving.append(gradient)

    def _graph(self, hop: int) -> HopGraph:
        graph = self.graphs.get(hop)
        if graph is None:
            graph = self.graphs[hop] = HopGraph()
        return graph

    def keep(self, tensor: Tensor, hop: int) -> None:
        """Keep a tensor that retains its gradient until the backward of its hop is over: torch ends
        the process if another thread drops it while the engine comes to it."""
        self._graph(hop).kept.append(tensor)

    # --- in the backward

    def restore(self, hop: int) -> None:
        """Bring back what a hop has saved, or recompute it, before the gradient is there."""
        recomputed_calls = self.recomputed_calls.get(hop, [])
        for at, recomputed in enumerate(recomputed_calls):
            for following in recomputed_calls[at : at + 2]:
                following.fetch()
            recomputed.recompute()
        if self.offload is not None:
            self.offload.fetch(hop)

    def backward(
        self, hop: int, *, split: bool = False, before_whole: Callable[[], None] | None = None
    ) -> None:
        """Run one hop's backward and send the gradients of its crossings home.

        Args:
            hop: the index of the hop.
            split: leave the gradients of the parameters to :meth:`finish_backward`, if they can
                be told apart.
            before_whole: called before all gradients are computed at once.
        """
        self._copies.settle(hop)
        graph = self.graphs.pop(hop, None)
        if graph is not None:
            self._run_backward(hop, graph, split=split, before_whole=before_whole)
            graph.roots.clear()
            graph.arriving.clear()
        if hop not in self._weights:
            self._copies.give_back(hop)

    def _run_backward(
        self, hop: int, graph: HopGraph, *, split: bool, before_whole: Callable[[], None] | None
    ) -> None:
        for sent in graph.arriving:
            self._copies.receive(hop, sent)
        rest = None
        if split and graph.roots and hop not in self.hooked:
            self._keep_recomputed(hop, True)
            rest = run_input_part(graph)
        if rest is not None:
            self._weights[hop] = rest
        else:
            if before_whole is not None:
                before_whole()
            self._keep_recomputed(hop, False)
            run_whole(graph)
            self._drop_saved(hop)
        self._step.sent_back.settle(hop)  # of the micro-batch before
        if hop in self._step.known.code_in_backward:
            _copy_each(graph)
        after = self._step.mark(self._step.route[hop]) if graph.crossings else None
        for crossing in graph.crossings:
            slot = crossing.slot
            if slot.gradient is not None:
                gradient, slot.gradient = slot.gradient, None
                self._send_home(crossing, gradient, hop, after)

    def finish_backward(self, hop: int) -> None:
        """Compute the gradients of a hop's parameters, where its backward is in two parts."""
        rest = self._weights.pop(hop, None)
        if rest is not None:
            rest.run()
        self._drop_saved(hop)
        self._copies.give_back(hop)

    def _drop_saved(self, hop: int) -> None:
        self.recomputed_calls.pop(hop, None)
        if self.offload is not None:
            self.offload.forget(hop)

    def _keep_recomputed(self, hop: int, keeps: bool) -> None:
        for recomputed in self.recomputed_calls.get(hop, ()):
            recomputed.keeps = keeps or hop in self._step.known.hops_rerunning_forward
        if keeps and self.offload is not None:
            self.offload.keep(hop)

    def _send_home(
        self, crossing: Crossing, gradient: Tensor, hop: int, after: torch.Event | None
    ) -> None:
        if crossing.to_hop < 0:
            self.input_gradients[-1 - crossing.to_hop] = gradient
            return
        step = self._step
        watch = step.watch(gradient, hop, crossing.to_hop, self._place.microbatch)
        stage = step.route[crossing.to_hop]
        on_host = crossing.on_host
        sent = step.send(gradient, stage, after=after, back=True, watch=watch, on_host=on_host)
        step.sent_back.add(hop, sent)
        self.add_sent_root(crossing.to_hop, crossing.to_edge, sent)

    def abandon(self) -> None:
        """Release everything: the step has failed, or is over."""
        self.recomputed_calls.clear()
        self.offload = None
        self.graphs.clear()
        self._weights.clear()


def _copy_each(graph: HopGraph) -> None:
    """Put a copy in the place of each gradient that will be sent: the user's code that autograd has
    called may keep its memory, and write there for the next micro-batch."""
    for crossing in graph.crossings:
        if crossing.slot.gradient is not None:
            crossing.slot.gradient = crossing.slot.gradient.clone()
