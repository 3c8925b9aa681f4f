"""Add up the work of a recorded forward and of its backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..._common.nested import tensors
from ...costs.meter import HostSync
from ...costs.work import Work, addition
from ...crossing.hop_backward import Root, entries_of, kept_for_weights, why_whole
from ...crossing.microbatch_run import MicrobatchRun
from ...crossing.tags import HopGraph, edge_of
from ..recording import Recording
from ..segments import Segments
from .calls import CallsUnderWay, is_made_by


class RecordedWork:
    """The work of each hop, segment and call, added up.

    Args:
        run: the run that is watched.
        result: the recording that the work is added to.
        segments: the segments; the current one counts the work too.
        calls: the calls under way.

    Attributes:
        kernels: the number of kernels that have run.
        function: the name of the torch function that is running.
    """

    def __init__(
        self, run: MicrobatchRun, result: Recording, segments: Segments, calls: CallsUnderWay
    ) -> None:
        self.kernels = 0
        self.function = ""
        self._run = run
        self._result = result
        self._segments = segments
        self._calls = calls

    def spent(self, work: Work, made: int) -> None:
        """Add what an operation below autograd did.

        Args:
            work: the work.
            made: the bytes that it made.
        """
        kernels = work.forward.total()
        self.kernels += kernels
        if self._run.hop < 0:
            return
        hop, segment = self._result.hops[self._run.hop], self._segments.current
        flops = sum(operation.flops for operation in work.forward)
        for part in (hop, segment):
            part.kernels += kernels
            part.largest_bytes = max(part.largest_bytes, made)
            part.flops += flops
            part.work.add(work)
        for call in self._calls:
            call.flops += flops
            call.work.setdefault(hop.stage, Work()).add(work)

    def add_gradient(self, tensor: Tensor) -> None:
        """Add that in the backward a gradient of a tensor is added to another one."""
        if tensor.requires_grad and torch.is_grad_enabled():
            self.spent(Work(backward=Counter([addition(tensor)])), 0)

    def waited(self, sync: HostSync) -> None:
        """Note that the host would wait for a device here."""
        self._result.waiting.add(self.function)
        for call in self._calls:
            call.waits = True
        if sync not in self._result.host_syncs:
            self._result.host_syncs.append(sync)


def roots_of(run: MicrobatchRun, output: Any) -> dict[int, list[Root]]:
    """Return by hop where the backwards begin, by the graphs after the forward.

    Args:
        run: the run that was watched.
        output: the forward's result.
    """
    roots: dict[int, list[Root]] = {}
    for graph in run.gradients.graphs.values():
        for crossing in graph.crossings:
            roots.setdefault(crossing.to_hop, []).append((crossing.to_edge, None))
    for tensor in map(run.newest, tensors(output)):
        if tensor.requires_grad and is_made_by(tensor, run.key):
            roots.setdefault(run.hop_of(tensor), []).append((edge_of(tensor), None))
    return roots


def note_split_backwards(
    run: MicrobatchRun, result: Recording, roots: Mapping[int, list[Root]]
) -> None:
    """Note which hops' backwards cannot be split.

    Args:
        run: the run that was watched.
        result: the recording that is changed.
        roots: by hop, where the backwards begin.
    """
    for hop in result.hops:
        graph = run.gradients.graphs.get(hop.index, HopGraph())
        entries = [entry.node for entry in entries_of(graph)]
        why = why_whole(roots.get(hop.index, []), entries)
        hop.weight_bytes = kept_for_weights(roots.get(hop.index, []), entries)
        hop.whole = hop.whole if why is None else why
