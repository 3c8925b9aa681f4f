"""The methods of a pipeline over processes that report something."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..._common.callsite import remembers_caller, users_line
from ...batches.batch_dims import BatchDims
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
from ...reports.verify.result import Verification
from ...reports.verify.verdict import check_tolerances
from ..agreement import Agreement, Kind
from ..engines import Engines
from ..microbatches.batch_norm import StageBatchNorm
from ..replicas import StageReplicas
from ..stage_values import StageValues
from ..step import Run
from .plain_step import StepOptions
from .profile import StageProfile
from .verify import Call, StageVerifier, VerifiedStep


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

    def _runs(self, microbatches: list[Microbatch]) -> list[Run]:
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
        whole: bool = True,
        **kwargs: Any,
    ) -> Verification:
        """Run a small batch over the processes and as a plain loop in one; compare the results.

        All processes call it together. The first stage's process runs the plain loop on its host,
        which needs room for the whole model, and compares outputs, loss, gradients and buffers.
        With replicas, that of the first one does so for the shares of all. Then outputs, loss and
        gradients are compared with those of the whole batch in one forward, up to rounding. The
        model and the random generators are left as they were.

        Args:
            *args: the model's arguments, for the replica's whole share of the batch; the same
                values in every process of a pipeline.
            target: the target, as for :meth:`forward_backward`.
            loss_fn: the loss, as for :meth:`Pipeline.verify`.
            rtol: the tolerance, as for :meth:`Pipeline.verify`.
            atol: the absolute tolerance.
            whole: also compare with the whole batch in one forward, as for
                :meth:`Pipeline.verify`. A note says so where replicas' shares do not make one
                batch, or their buffers differ.
            **kwargs: the model's keyword arguments.

        Returns:
            A :class:`blockpipe.reports.Verification`, the same in every process.

        Raises:
            UsageError: stages on accelerators draw random numbers, or an argument of replicas
                cannot be pickled.
        """
        with self._agreement.at_end(lambda: Kind({"call": "verify"})):
            check_loss(loss_fn, target)
            check_tolerances(rtol, atol)

        def run(call: Call) -> StepResult:
            args, kwargs, target = call
            given = {"target": target, "loss_fn": options.loss, "return_outputs": True}
            return self.forward_backward(*args, **given, **kwargs)

        def sources() -> list[Source]:
            return self._drawn(args, kwargs, target, loss_fn)

        deferred = self._batch_norm.is_deferred
        how = (self.loss_reduction, self.batch_dims)
        options = StepOptions(self.chunks, loss_fn, *how, is_deferred=deferred)
        step = VerifiedStep((args, kwargs, target), run, sources, options)
        held = (self.module, self._values, self._engines.places, self._replicas, self._agreement)
        verification: Verification = StageVerifier(*held, step).verify(
            rtol, atol, f"over processes, {self._described()}", whole=whole
        )
        return verification

    def _drawn(
        self, args: Any, kwargs: dict[str, Any], target: Any, loss_fn: object
    ) -> list[Source]:
        """Return the generators that a step draws from, in the model's present modes.

        Raises:
            UsageError: no process can draw the same numbers again.
        """
        found: dict[Source, None] = {}

        def kind() -> Kind:
            same = self._kind(args, kwargs, loss_fn)
            return Kind({**same.common, "random numbers": str(bool(found))}, same.own)

        with self._agreement.at_end(kind):
            for engine, _ in self._runs(self._split(args, kwargs, target)):
                found.update(dict.fromkeys(engine.sources))
            if found and is_asynchronous(self._device):
                raise UsageError(
                    "expected a forward without random numbers to verify on accelerators, whose "
                    f"numbers no other device draws ({users_line()}); set dropout to 0, or call "
                    "eval()"
                )
        return [*found]
