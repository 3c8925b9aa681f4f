"""The methods of a pipeline over processes that report something."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..._common.callsite import remembers_caller, users_line
from ..._common.nested import map_tensors
from ...batches.batch_dims import BatchDims
from ...batches.class_weights import reduction_for
from ...batches.losses import own_or_mean_square
from ...batches.microbatch import LossReduction, Microbatch
from ...costs.probing import rates_of
from ...devices.devices import is_asynchronous
from ...devices.rng_streams import Source
from ...errors import UsageError
from ...execution.step_result import StepResult
from ...preparation.options import check_loss
from ...recording.recording import Recording
from ...reports.summary.summary import Summary, summarize
from ...reports.timeline.timeline import Timeline
from ...reports.verify.reference_loop import ReferenceLoop
from ...reports.verify.result import Verification
from ...reports.verify.verdict import check_tolerances
from ..agreement import Agreement, Kind
from ..engines import Engines
from ..microbatches.batch_norm import StageBatchNorm
from ..replicas import StageReplicas
from ..stage_values import StageValues
from .profile import StageProfile
from .verify import StageVerifier, plain_outcome, verdict


class StageReportMethods:
    """The part of :class:`DistributedPipeline` that reports. Its attributes are the pipeline's."""

    module: nn.Module
    chunks: int
    schedule: str
    checkpoint: str
    batch_dims: BatchDims
    loss_reduction: LossReduction
    _agreement: Agreement
    _batch_norm: StageBatchNorm
    _device: torch.device
    _engines: Engines
    _replicas: StageReplicas | None
    _values: StageValues
    _profile: StageProfile | None = None

    @property
    def recording(self) -> Recording:
        """The recording of the sample."""
        return self._engines.first.recording

    def forward_backward(self, *args: Any, **kwargs: Any) -> StepResult:
        """Run a step."""
        raise NotImplementedError

    def _kind(self, args: Any, kwargs: Any, loss_fn: object) -> Kind:
        raise NotImplementedError

    def _split(self, args: Any, kwargs: dict[str, Any], target: Any) -> list[Microbatch]:
        raise NotImplementedError

    @remembers_caller
    def summary(self, *, depth: int | None = None, columns: Iterable[str] | None = None) -> Summary:
        """Summarize which module is in which process, of the sample; the same in every process.

        All processes call it together. Times are predicted by the rates of the first stage's
        process.

        Args:
            depth: as for :meth:`Recording.summary`.
            columns: as for :meth:`Recording.summary`.
        """
        places, found = self._engines.places, None
        devices: list[str] = [""] * dist.get_world_size(places.group)
        dist.all_gather_object(devices, str(self._device), group=places.group)
        with self._agreement.at_end(lambda: Kind({"call": "summary"})):
            if places.is_own(0):
                recording = self.recording
                rank_of = dict(zip(recording.route, places.ranks, strict=True))
                ranks = [rank_of[stage] for stage in range(recording.num_stages)]
                found = summarize(
                    recording,
                    depth=depth,
                    columns=columns,
                    devices=[f"rank {rank}, {devices[rank]}" for rank in ranks],
                    rates=[rates_of(self._device)] * len(ranks),
                    notes=[self._described()],
                )
        summary: Summary = places.shared(found, 0)
        return summary

    def _described(self) -> str:
        return f"{self.schedule}, {self.chunks} micro-batches, checkpoint={self.checkpoint!r}"

    @contextmanager
    def profile(self) -> Iterator[Timeline]:
        """Record the times of the actions in the steps that run inside, in all processes.

        All processes enter it together. Times are on the first process's clock. On an accelerator
        the host waits around each action, so that a step is slower.

        Yields:
            A :class:`blockpipe.Timeline` with a lane for each process, filled in at the end: the
            same one in each.

        Raises:
            UsageError: the pipeline is being profiled already.
        """
        if self._profile is not None:
            raise UsageError(
                f"this pipeline is being profiled already ({users_line()}); leave the outer "
                "profile() first, or use its timeline"
            )
        places, route = self._engines.places, self.recording.route
        timeline = Timeline(title=self.schedule)
        self._profile = StageProfile(timeline, self._device, places.ranks, route, places.group)
        try:
            yield timeline
            self._profile.gather()
        finally:
            self._profile = None

    @remembers_caller
    def verify(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        rtol: float | None = None,
        atol: float = 0.0,
        **kwargs: Any,
    ) -> Verification:
        """Run a small batch over the processes and as a plain loop in one; compare the results.

        All processes call it together. The first stage's process runs the plain loop on its host,
        which needs room for the whole model, and compares outputs, loss, gradients and buffers. The
        model and the random generators are left as they were.

        Args:
            *args: the model's arguments, for the whole batch; the same values in every process.
            target: the target, as for :meth:`forward_backward`.
            loss_fn: the loss, as for :meth:`Pipeline.verify`.
            rtol: the tolerance, as for :meth:`Pipeline.verify`.
            atol: the absolute tolerance.
            **kwargs: the model's keyword arguments.

        Returns:
            A :class:`blockpipe.reports.Verification`, in every process.

        Raises:
            UsageError: there are replicas, or stages on accelerators draw random numbers.
        """
        check_loss(loss_fn, target)
        check_tolerances(rtol, atol)
        cut, places = self._engines.first, self._engines.places
        with self._agreement.at_end(lambda: self._kind(args, kwargs, loss_fn)):
            self._check_verifiable(cut.sources)
            microbatches = self._split(args, kwargs, target)
        loss_fn = loss_fn or own_or_mean_square
        verifier = StageVerifier(self.module, self._values, places, cut.sources)
        whole, found = verifier.whole_model(), None
        with self._agreement.at_end(lambda: Kind({"call": "the plain run of verify"})):
            if whole is not None:
                loop = ReferenceLoop(
                    map_tensors(lambda t: t.detach().to("cpu", copy=True), microbatches),
                    loss_fn,
                    reduction_for(loss_fn, self.loss_reduction),
                    self.batch_dims,
                    cut.sources,
                    is_deferred=self._batch_norm.is_deferred,
                )
                plain = plain_outcome(loop, whole, cut.sources)
        given = {"target": target, "loss_fn": loss_fn, "return_outputs": True}
        piped = verifier.pipelined(lambda: self.forward_backward(*args, **given, **kwargs))
        if whole is not None:
            found = verdict(plain, piped, rtol, atol, f"over processes, {self._described()}")
        verification: Verification = places.shared(found, 0)
        return verification

    def _check_verifiable(self, sources: Iterable[Source]) -> None:
        if self._replicas is not None:
            raise UsageError(
                f"expected one pipeline to verify, got one of several replicas ({users_line()}); "
                "make one without mesh= for it"
            )
        if any(sources) and is_asynchronous(self._device):
            raise UsageError(
                "expected a forward without random numbers to verify on accelerators, whose "
                f"numbers no other device draws ({users_line()}); set dropout to 0, or call eval()"
            )
