"""The public methods of a pipeline that report something about it: a summary, memory, times.

They only pass their arguments on to the modules of this folder, and are apart from the other
methods of :class:`blockpipe.Pipeline` because their documentation is long.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .._common.callsite import remembers_caller, users_line
from ..batches.step_arguments import StepArguments
from ..devices.observer import Observer, Observers
from ..errors import UsageError
from ..execution.step_runner import StepRunner, runs_model
from ..preparation.memory.report import MemoryReport
from ..preparation.options import PipelineOptions, check_loss, joined_kwargs
from ..preparation.prepared import Prepared
from ..preparation.preparer import Preparer
from ..recording.recording import Recording
from ..schedules.builders import ScheduleOption
from ..schedules.schedule import Schedule
from .entered import only_entered
from .find_chunks import ChunksReport, SearchOptions, find_chunks
from .inspector import Inspector
from .summary.summary import Summary
from .timeline.profiling import Profile, collected
from .timeline.timeline import Timeline
from .verify.result import Verification
from .verify.run import Verifier
from .verify.verdict import check_tolerances, verify


class ReportMethods:
    """The part of :class:`blockpipe.Pipeline` that reports. Its attributes are the pipeline's."""

    _preparer: Preparer
    _options: PipelineOptions
    _profile: Profile | None = None
    _observes: Callable[[Prepared, int], Observer] | None = None

    @property
    def _inspector(self) -> Inspector:
        return Inspector(self._preparer, self._options)

    @property
    def _runner(self) -> StepRunner:
        return StepRunner(self._preparer, self._options, self._observed)

    # --- what is where

    def recorded(
        self,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        call: str = "recorded((x,))",
    ) -> Recording:
        """Return a recording on some arguments, or the newest one. Nothing is placed.

        Args:
            args: the model's arguments.
            kwargs: the model's keyword arguments; without any argument, the newest recording is
                returned.
            call: the call as a user writes it, for the error.

        Raises:
            UsageError: no arguments were given, and nothing has been recorded yet.
        """
        prepared, _ = self._inspector.seen(call, args, kwargs or {})
        return prepared.recording

    @remembers_caller
    def summary(
        self,
        *args: Any,
        depth: int | None = None,
        columns: Iterable[str] | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Summary:
        """Summarize which module is on which stage, and predict the cost of a step.

        This records the model on the arguments, but places nothing.

        Args:
            *args: the model's arguments, for the whole batch; without any, the latest recording
                is summarized.
            depth: as for :meth:`Recording.summary`.
            columns: as for :meth:`Recording.summary`.
            model_kwargs: as for :meth:`forward_backward`.
            **kwargs: the model's keyword arguments.

        Returns:
            A :class:`blockpipe.reports.Summary`; ``str()`` is a table,
            ``to_dict()`` data.

        Raises:
            UsageError: no arguments were given before the first call, a column is unknown, or the
                depth is no positive integer.

        Example:
            >>> import torch, blockpipe as bp
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
            >>> net[1] = bp.BeginBlock(net[1], stage=1)
            >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
            >>> summary = pipe.summary(torch.ones(4, 4))
            >>> summary.parameters, summary.prediction.microbatches
            (49, 2)
        """
        kwargs = joined_kwargs(kwargs, model_kwargs)
        return self._inspector.summary(args, kwargs, depth, columns)

    @remembers_caller
    def explain(
        self,
        path: str,
        *args: Any,
        model_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """Explain why a module, or a parameter, is on its stage; see :meth:`Recording.explain`.

        Args:
            path: the path of a module, a parameter or a buffer.
            *args: the model's arguments, to record it on; without any, the latest recording is
                explained.
            model_kwargs: as for :meth:`forward_backward`.
            **kwargs: the model's keyword arguments.

        Raises:
            UsageError: the model has nothing of that name, or no arguments were given before the
                first call.

        Example:
            >>> import torch, blockpipe as bp
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
            >>> net[1] = bp.BeginBlock(net[1], stage=1)
            >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
            >>> print(pipe.explain("1", torch.ones(4, 4)).splitlines()[0])
            1 (Linear) is on stage 1 (cpu)
        """
        return self._inspector.explain(path, args, joined_kwargs(kwargs, model_kwargs))

    @remembers_caller
    def memory(
        self,
        *args: Any,
        optimizer: object = None,
        limit: int | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> MemoryReport:
        """Predict the memory of a step, stage by stage.

        This records the model on the arguments, but places nothing.

        Args:
            *args: the model's arguments, for the whole batch.
            optimizer: the optimizer that trains the model: a name such as ``"adamw"``, the number
                of copies that it keeps of each parameter, or the optimizer itself; ``None`` for no
                optimizer.
            limit: the bytes of a device; ``None`` takes what the accelerators have.
            model_kwargs: as for :meth:`forward_backward`.
            **kwargs: the model's keyword arguments.

        Returns:
            A :class:`blockpipe.reports.MemoryReport`, with suggestions; printed,
            it is a table.

        Raises:
            UsageError: the optimizer is not known.

        Example:
            >>> import torch, blockpipe as bp
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
            >>> net[1] = bp.BeginBlock(net[1], stage=1)
            >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
            >>> report = pipe.memory(torch.ones(4, 4), optimizer="adam")
            >>> report.stages[0].parameters, report.stages[0].optimizer  # 40 numbers
            (160, 320)
        """
        kwargs = joined_kwargs(kwargs, model_kwargs)
        return self._inspector.memory(args, kwargs, optimizer, limit)

    @only_entered("with pipe.measured_memory() as report: …")
    def measured_memory(self, optimizer: object = None) -> Iterator[MemoryReport]:
        """Measure the peak memory of the steps that run inside, beside the prediction.

        On an accelerator its allocator is asked, and a device's peak is shown at each of its
        stages. On the CPU the bytes of live tensors are counted, which makes a step slower.

        Args:
            optimizer: the optimizer, as for :meth:`memory`.

        Yields:
            A :class:`blockpipe.reports.MemoryReport`, filled in at the end.

        Raises:
            UsageError: the model is not placed yet.

        Example:
            >>> import torch, blockpipe as bp
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
            >>> net[1] = bp.BeginBlock(net[1], stage=1)
            >>> x = torch.ones(4, 4)
            >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2, sample=(x,))
            >>> with pipe.measured_memory() as report:
            ...     _ = pipe.forward_backward(x, loss_fn=torch.sum)
            >>> report.stages[0].measured > report.stages[0].parameters
            True
        """
        with self._inspector.measured_memory(optimizer) as report:
            yield report

    # --- whether it is right, and fast

    @remembers_caller
    @runs_model
    def verify(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        rtol: float | None = None,
        atol: float = 0.0,
        device: Any = None,
        whole: bool = True,
        model_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Verification:
        """Run a small batch pipelined and as a plain loop, and compare the results.

        Outputs, loss, gradients of parameters and inputs, and buffers are compared. Where they
        differ, both are run again with every module call watched, and the first module and stage
        where they diverge is named. The model, its gradients and buffers and the random generators
        are left as they were; nothing is trained. Under ``no_grad`` the forward alone is compared.
        Then outputs, loss and gradients are compared with those of the whole batch in one forward,
        up to rounding: only this shows a wrong split or a wrong weighting.

        The schedule runs on its lanes even where operations are so small that a step would take one
        thread. With ``deferred_batch_norm`` the plain loop defers as well. Random numbers are drawn
        from the same streams; where stages on different devices draw, the reference is one uncut
        graph over the stages.

        Args:
            *args: the model's arguments, for the whole batch.
            target: the target, as for :meth:`forward_backward`.
            loss_fn: the loss, as for :meth:`forward_backward`; ``None`` takes the model's own loss,
                or the mean square of its outputs if it has none.
            rtol: the tolerance where bitwise equality is not promised (anything on an accelerator,
                or compiled), relative to the norm of the plain run's values; for gradients relative
                to the norm of all of them. ``None`` is 1e-5, for single precision.
            atol: the absolute tolerance.
            device: the device of the plain run, which needs room for the whole model. ``None`` is
                the first stage's; ``"stages"`` is one uncut graph over the stages, for a model that
                does not fit on one device.
            whole: also compare with the whole batch in one forward. A note says so where that does
                not fit, or draws random numbers in evaluation mode too. A model that draws, or
                has batch norm, is put into evaluation mode for this.
            model_kwargs: as for :meth:`forward_backward`.
            **kwargs: the model's keyword arguments.

        Returns:
            A :class:`blockpipe.reports.Verification`, which is true if all is well; printed, it is
            a table.

        Raises:
            UsageError: there is a target without a loss_fn, or a tolerance is no number.
            The first exception of either run.

        Example:
            >>> import torch, blockpipe as bp
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
            >>> net[1] = bp.BeginBlock(net[1], stage=1)
            >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
            >>> found = pipe.verify(torch.ones(4, 4))
            >>> found.ok, found.verdict
            (True, 'exact')
        """
        check_loss(loss_fn, target)
        check_tolerances(rtol, atol)
        kwargs = joined_kwargs(kwargs, model_kwargs)
        verifier = Verifier(self._runner, args, kwargs, target, loss_fn, device)
        return verify(verifier, rtol=rtol, atol=atol, whole=whole)

    @remembers_caller
    @runs_model
    def find_chunks(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        candidates: Iterable[int] | None = None,
        schedules: Iterable[ScheduleOption] | ScheduleOption | None = None,
        repeats: int = 5,
        optimizer: object = None,
        limit: int | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> ChunksReport:
        """Benchmark numbers of micro-batches on a batch, side by side, and report the fastest.

        The pipeline's own ``chunks`` and ``schedule`` stay as they are, and so do the parameters,
        gradients, buffers and random generators.

        Args:
            *args: the model's arguments, for a whole batch of the size that is trained on.
            target: the target, as for :meth:`forward_backward`.
            loss_fn: the loss, as for :meth:`forward_backward`.
            candidates: the numbers of micro-batches to try; ``None`` tries powers of two up to
                eight for each stage, and the pipeline's own. A batch of fewer samples makes fewer
                micro-batches; each number that results is tried once.
            schedules: the schedules to try; ``None`` is the pipeline's own.
            repeats: the number of steps of each; the median counts.
            optimizer: the optimizer, for the memory; as for :meth:`memory`.
            limit: the bytes of a device; candidates that are predicted to need more are not tried.
                ``None`` takes what the accelerators have; on the CPU there is no limit.
            model_kwargs: as for :meth:`forward_backward`.
            **kwargs: the model's keyword arguments.

        Returns:
            A :class:`blockpipe.reports.ChunksReport`; ``report.best`` is its fastest
            trial.

        Raises:
            UsageError: a candidate is no positive integer.
            The first exception of a step, if every candidate fails. The report names a candidate
            that fails alone (because of batch norm of a single sample, say).

        Example:
            >>> import torch, blockpipe as bp
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
            >>> net[1] = bp.BeginBlock(net[1], stage=1)
            >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
            >>> report = pipe.find_chunks(torch.ones(4, 4), loss_fn=torch.sum, repeats=1)
            >>> [trial.microbatches for trial in report.trials]
            [1, 2, 4]
        """
        check_loss(loss_fn, target)
        kwargs = joined_kwargs(kwargs, model_kwargs)
        batch = StepArguments(args, kwargs, target, loss_fn)
        options = SearchOptions(candidates, schedules, repeats, optimizer, limit)
        return find_chunks(self._runner, batch, options)

    @only_entered("with pipe.profile() as timeline: …")
    def profile(self) -> Iterator[Timeline]:
        """Record the times of actions, copies and waits in the steps that run inside.

        Calls under ``no_grad`` are steps too, and ``pipe(x)`` with its backward is one. On an
        accelerator times are those of events on its streams. Run a step before: the first one
        records the model, and is slower.

        Yields:
            A :class:`blockpipe.Timeline`, filled in at the end; if a step fails, with the events
            until then.

        Raises:
            UsageError: the pipeline is being profiled already.

        Example:
            >>> import torch, blockpipe as bp
            >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
            >>> net[1] = bp.BeginBlock(net[1], stage=1)
            >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
            >>> with pipe.profile() as t:
            ...     _ = pipe.forward_backward(torch.ones(4, 4), loss_fn=torch.sum)
            >>> sorted(map(str, t.actions()))
            ['B0.0', 'B0.1', 'B1.0', 'B1.1', 'F0.0', 'F0.1', 'F1.0', 'F1.1']
        """
        if self._profile is not None:
            raise UsageError(
                f"this pipeline is being profiled already ({users_line()}), and a step has one "
                "timeline; leave the outer profile() first, or use its timeline"
            )
        self._profile = Profile(Timeline(title=_title(self._options.schedule)))
        try:
            with collected(self._profile) as timeline:
                yield timeline
        finally:
            self._profile = None

    @contextmanager
    def observed_by(self, observes: Callable[[Prepared, int], Observer]) -> Iterator[None]:
        """While entered, each step has another observer, besides the one of a profile.

        Args:
            observes: returns the observer of a step, given what is prepared and the number of
                micro-batches.
        """
        before, self._observes = self._observes, observes
        try:
            yield
        finally:
            self._observes = before

    def _observed(self, prepared: Prepared, microbatches: int) -> Observer | None:
        found: list[Observer] = []
        if self._profile is not None:
            found.append(self._profile.step(prepared, microbatches))
        if self._observes is not None:
            found.append(self._observes(prepared, microbatches))
        return Observers(found) if len(found) > 1 else next(iter(found), None)


def _title(schedule: ScheduleOption) -> str:
    if isinstance(schedule, str):
        return schedule
    return schedule.name if isinstance(schedule, Schedule) else "the user's own schedule"
