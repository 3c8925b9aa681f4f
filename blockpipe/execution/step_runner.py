"""Runs steps over whole batches: split, prepare, run the micro-batches, join their results."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from .._common.callsite import users_line
from .._common.checks import expected
from .._common.nested import leaves, map_tensors, tensors
from .._common.threads.model_turns import alone_with
from .._common.threads.thread_state import CallerState, ours, theirs
from .._torch.modes import how_many_dispatch_modes, is_in_forward_mode, is_in_transform
from ..batches.batch_dims import CallDims, dims_of_call
from ..batches.class_weights import reduction_for
from ..batches.cut_off import cut_off, give
from ..batches.input_places import InputPlace, input_places
from ..batches.joining import JoinedLeaf, join, weighted_sum
from ..batches.losses import warn_of_some_without_a_number
from ..batches.microbatch import Microbatch, weights_of, weights_without_target
from ..batches.output_dims import output_dim
from ..crossing.interception import CrossingMode
from ..crossing.step_context import Graphs, KnownForward, StepContext
from ..crossing.uncut_run import UncutRun
from ..crossing.user_checkpoints import intercepting, is_in_checkpoint
from ..devices.devices import is_asynchronous
from ..devices.observer import Observer
from ..errors import UsageError
from ..preparation.after_steps.step_notes import StepNotes
from ..preparation.options import PipelineOptions
from ..preparation.prepared import Prepared
from ..preparation.preparer import Preparer
from ..restoring.restored_thread import leaves_intact
from ..stages.cursor import Cursor, current_cursor, set_cursor
from .autograd_bridge import attach, input_gradients
from .microbatch.container_entries import PassedContainers
from .scaled_gradients import current_scale
from .step import Step
from .step_request import StepRequest
from .step_result import StepLoss, StepResult

P = ParamSpec("P")
R = TypeVar("R")


def runs_model(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method that runs the model in ``self.module``: it is refused inside of another
    run, waits while another thread runs the model, and leaves its thread as it was."""

    @functools.wraps(method)
    @leaves_intact
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        pipe: Any = args[0]
        with ours():
            _check_call()
            with alone_with(pipe.module):
                return method(*args, **kwargs)

    return call


@dataclass(frozen=True)
class StepRunner:
    """Runs steps of a prepared model.

    Args:
        preparer: records, places and prepares the model.
        options: how steps are run.
        observe: returns the observer of a step, given what is prepared and the number of
            micro-batches; ``None``: nobody observes.
        passed: what the user's calls have passed; ``None``: these are no calls of the user's.
    """

    preparer: Preparer
    options: PipelineOptions
    observe: Callable[[Prepared, int], Observer | None] | None = None
    passed: PassedContainers | None = None

    def forward_backward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        loss_fn: Callable[..., Any] | None,
        *,
        return_outputs: bool = False,
    ) -> StepResult:
        """Run a step as :meth:`blockpipe.Pipeline.forward_backward` says."""
        caller = CallerState()
        given = self._passed(args, kwargs)
        pairs: list[tuple[Tensor, Tensor]] = []  # inputs, and what stands for them
        if not self.options.cuts:
            (args, kwargs, target), pairs = cut_off((args, kwargs, target))
        microbatches = self.split(args, kwargs, target)
        parts = _parts_of_whole_leaves(pairs, microbatches[0])
        with theirs():
            reduction = reduction_for(loss_fn, self.options.loss_reduction)
            weights = weights_of(microbatches, reduction)
        prepared = self.preparer.prepare(microbatches[0], self.options, loss_fn)
        if isinstance(loss_fn, nn.Module):
            loss_fn.to(prepared.devices[prepared.route[-1]])
        want = {"loss", "outputs"} if return_outputs else {"loss"}
        step = self._step(prepared, microbatches, weights, caller, want, loss_fn)
        step.run()
        self._note_passed(step, given)
        self._look_again(step, loss_fn)
        if pairs:
            give((tensor, leaf.grad) for tensor, leaf in pairs if id(leaf) not in parts)
            for tensor, leaf in pairs:
                for part in parts.get(id(leaf), ()):
                    give([(tensor, part)])
        elif step.state.inputs_need_grad:
            self._give_input_gradients(step, args, kwargs, target)
        with torch.no_grad():
            loss = _batch_loss(step)
            outputs = self._joined(step)[0] if return_outputs else None
        return StepResult(loss.reshape(()).as_subclass(StepLoss), outputs)

    def _look_again(self, step: Step, loss_fn: Callable[..., Any] | None = None) -> None:
        prepared, batches, state = step.request.prepared, step.request.microbatches, step.state
        notes = StepNotes(
            state.written,
            reached={} if state.uncovered is None else state.uncovered.found,
            mixes=not state.mode.stays,
            compares=state.context.comparisons is not None,
        )
        self.preparer.step_is_over(prepared, batches, self.options, loss_fn, notes)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forwards as :meth:`blockpipe.Pipeline.forward` says."""
        caller = CallerState()
        cut = self.options.cuts
        if cut and torch.is_grad_enabled() and is_in_checkpoint():
            raise UsageError(
                "torch.utils.checkpoint around a pipeline would run all stages again in the "
                f"backward of each ({users_line()}); leave it out, and pass checkpoint='always' to "
                "Pipeline, so that each stage runs its own part again"
            )
        given = self._passed(args, kwargs)
        microbatches = self.split(args, kwargs)
        with theirs():
            weights, problem = weights_without_target(microbatches, self.options.loss_reduction)
        prepared = self.preparer.prepare(microbatches[0], self.options)
        step = self._step(prepared, microbatches, weights, caller, {"outputs"})
        step.run_forward()
        self._note_passed(step, given)
        self._look_again(step)
        step.remember(self.preparer.watched_values)
        output, joints = self._joined(step)
        if problem is not None and any(joint.how == "sum" for joint in joints):
            raise UsageError(
                "the model returns a loss, or another number for each micro-batch, but "
                f"loss_reduction fails without a target ({type(problem).__name__}: {problem}; "
                f"{users_line()}); compute the number from the model's own arguments, or pass the "
                "target to forward_backward"
            ) from problem
        if not cut or not step.state.context.graphs.differentiable:
            return output
        inputs = self._inputs_that_need_grad(step, args, kwargs, None)
        return attach(output, joints, step, inputs)

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function as :meth:`blockpipe.Pipeline.run` says."""
        if not callable(function):
            raise UsageError(
                expected(
                    "a callable",
                    function,
                    for_="run()",
                    fix="pass a method of the model, such as model.generate",
                )
            )
        if not self.preparer.known:
            raise UsageError(
                f"run() needs a model that is placed, and this one is not yet ({users_line()}); "
                "pass sample=… to Pipeline, or call the pipeline first"
            )
        prepared = next(reversed(self.preparer.known.values()))
        graphs = Graphs(differentiable=torch.is_grad_enabled(), cut=False)
        known = KnownForward(sealed_forwards=prepared.sealed_forwards)
        step = StepContext(prepared.route, prepared.homes, prepared.devices, graphs, known)
        cursor = Cursor(follow_marks=not prepared.planned)
        run = UncutRun(step, 0, cursor)
        before = set_cursor(cursor)
        try:
            args, kwargs = map_tensors(run.take_input, (args, kwargs))
            with prepared.sealed_forwards, intercepting(), _start_over(self.preparer.model, run):
                with theirs(), CrossingMode(run):
                    result = function(*args, **kwargs)
                run.notice_writes()
                return result
        finally:
            set_cursor(before)
            run.abandon()

    # --- batches

    def split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None
    ) -> list[Microbatch]:
        """Split a batch into micro-batches."""
        return self.options.split(self.preparer.model, args, kwargs, target)

    def _step(
        self,
        prepared: Prepared,
        microbatches: list[Microbatch],
        weights: list[float],
        caller: CallerState,
        want: Iterable[str],
        loss_fn: Callable[..., Any] | None = None,
    ) -> Step:
        return Step(
            StepRequest(
                prepared=prepared,
                microbatches=microbatches,
                weights=weights,
                schedule=self.options.schedule,
                caller=caller,
                want=frozenset(want),
                loss_fn=loss_fn,
                scale=current_scale(),
                isolate_as=self.preparer.own_storages(prepared) if self.options.isolate else None,
                observer=self.observe(prepared, len(microbatches)) if self.observe else None,
            )
        )

    def _passed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return all arguments of a call, which are checked if the user has passed them."""
        given = *args, *kwargs.values()
        if self.passed is not None:
            self.passed.check(given)
        return given

    def _note_passed(self, step: Step, given: tuple[Any, ...]) -> None:
        if self.passed is not None:
            self.passed.note(given, step.state.whole_arguments.entries_set)

    def _joined(self, step: Step) -> tuple[Any, list[JoinedLeaf]]:
        """The outputs of the micro-batches as the whole batch's, and how each leaf was joined."""
        request = step.request
        prepared = request.prepared
        results = [result for result in step.state.results if result is not None]
        values, on_host = [r.outputs for r in results], [r.on_host for r in results]
        sizes = [m.size for m in request.microbatches]
        device: torch.device | None = prepared.devices[prepared.route[-1]]
        dim = output_dim(self.options.batch_dims, values, sizes)
        if isinstance(self.options.batch_dims, CallDims):
            device = None  # of one copy of several: what they return is told by where it lies
        return join(values, sizes, request.weights, device, dim, on_host)

    def _inputs_that_need_grad(
        self, step: Step, args: Any, kwargs: Any, target: Any
    ) -> list[tuple[Tensor, InputPlace]]:
        # A tensor that is given twice is listed twice: each argument has micro-batches of its own.
        given = list(leaves((args, kwargs, target)))
        if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in given):
            return []
        sizes = [m.size for m in step.request.microbatches]
        dims = dims_of_call(self.preparer.model, self.options.batch_dims, args, kwargs, target)
        places = input_places(args, kwargs, target, sizes, dims)
        return [
            (leaf, place)
            for leaf, place in zip(given, places, strict=True)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]

    def _give_input_gradients(self, step: Step, args: Any, kwargs: Any, target: Any) -> None:
        inputs = self._inputs_that_need_grad(step, args, kwargs, target)
        if not inputs:
            return
        whole = [(t, place) for t, place in inputs if t.is_leaf and place.dim is None]
        rest = [(t, place) for t, place in inputs if not (t.is_leaf and place.dim is None)]
        found = input_gradients(step.state, rest)
        give([(tensor, gradient) for (tensor, _), gradient in zip(rest, found, strict=True)])
        for m in range(len(step.request.microbatches)) if whole else ():
            found = input_gradients(step.state, [(t, place.only(m)) for t, place in whole])
            give([(tensor, gradient) for (tensor, _), gradient in zip(whole, found, strict=True)])


def _batch_loss(step: Step) -> Tensor:
    """The loss of the whole batch, on the last stage's device."""
    prepared = step.request.prepared
    device = prepared.devices[prepared.route[-1]]
    losses = [r.loss for r in step.state.results if r is not None and r.loss is not None]
    is_there = losses[0].device == device
    moved = losses if is_there else [loss.to(device) for loss in losses]
    loss = weighted_sum(moved, step.request.weights)
    # To look at a value is to wait for an accelerator: done in the first step only, and never where
    # a dispatch mode is on that may count such waits.
    may_look = prepared.steps == 1 or not is_asynchronous(device)
    if may_look and not how_many_dispatch_modes() and bool(loss.isnan()):
        warn_of_some_without_a_number(losses)
    return loss


def _check_call() -> None:
    """Raise :class:`UsageError` where a pipeline cannot be called: under what it cannot pass on."""
    exporting = "torch.export" if torch.compiler.is_exporting() else None
    if exporting or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise UsageError(
            f"{exporting or 'torch.jit.trace'} cannot see the stages of a pipeline "
            f"({users_line()}); call unplace(), and give it pipe.module"
        )
    if current_cursor() is not None:
        raise UsageError(
            "a pipeline was called inside a forward that Blockpipe runs; mark the inner "
            f"model's modules as blocks of the outer one instead ({users_line()})"
        )
    if is_in_transform():
        raise UsageError(
            "torch.func transforms cannot go through a pipeline; transform the model's "
            f"own functions, or use the plain model ({users_line()})"
        )
    if is_in_forward_mode():
        raise UsageError(
            "forward-mode AD cannot go through a pipeline: its graph is cut between the "
            f"stages; use the plain model ({users_line()})"
        )


def _parts_of_whole_leaves(
    pairs: list[tuple[Tensor, Tensor]], batch: Microbatch
) -> dict[int, list[Tensor]]:
    """Return, by the id of what stands for it, where each micro-batch's gradient is collected of a
    leaf that goes whole to all of them: its hooks run once for each, as in the plain loop."""
    whole = {id(tensor) for tensor in tensors((batch.args, batch.kwargs, batch.target))}
    parts: dict[int, list[Tensor]] = {}
    for tensor, leaf in pairs:
        if tensor.is_leaf and id(leaf) in whole:
            leaf.register_hook(parts.setdefault(id(leaf), []).append)
    return parts


class _start_over:  # noqa: N801 - a context manager that reads as a verb
    """While entered, each call of the model begins on stage 0: ``generate`` calls it many times."""

    def __init__(self, model: nn.Module, run: UncutRun) -> None:
        def start(*_: Any) -> None:
            run.cursor.move(0, None)
            run.cursor.highest = -1
            run.cursor.forget_calls()

        self._handle = model.register_forward_pre_hook(start, prepend=True)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *failure: Any) -> None:
        self._handle.remove()
