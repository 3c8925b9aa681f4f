"""Copies of a model's pipeline on several groups of devices, in one process.

Each copy runs its share of the batch, and the gradients are summed into the model's own parameters,
which are the only ones: an optimizer knows nothing of the copies. They get the model's values at
the start of each step, as ``nn.DataParallel`` has it, and what was set on it. To keep them alike by
an optimizer for each copy was no alternative: the user has one.

A share is a micro-batch of the whole batch, and a pipeline cuts it further. It cuts what was cut of
the batch: a tensor that goes whole to every share may have as many rows as a share has samples.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ._common.callsite import remembers_caller, users_line
from ._common.nested import map_tensors
from ._common.threads.shared_contexts import SharedContexts
from ._common.threads.thread_state import CallerState, intra_operation_threads
from ._torch.modes import untraced
from .batches.batch_dims import BatchDims, dims_of_call
from .batches.class_weights import reduction_for
from .batches.cut_off import cut_off, give
from .batches.joining import join
from .batches.losses import WeightedLoss, kind_of
from .batches.microbatch import (
    LossReduction,
    Microbatch,
    split,
    weights_of,
    weights_without_target,
)
from .batches.output_dims import output_dim
from .batches.shares import dims_of_shares
from .devices.devices import is_asynchronous, is_on_meta
from .devices.rng_streams import Source, current, diverted, host_sources, moved, torchs_of
from .errors import PlanError, UsageError
from .execution.lanes.thread_pool import submit
from .execution.step_result import StepResult
from .pipeline import Pipeline
from .preparation.options import check_loss, joined_kwargs
from .preparation.shared_state import check_loss_of_copies, shared_by_copies
from .recording.recording import Recording
from .recording.sample import check_initialized
from .restoring.copies.copied_models import CopiedModels
from .restoring.copies.shared_objects import SharedObjects
from .weights.copied_interface import CopiedInterface

__all__ = ["Replicas"]

_MOST_KINDS = 64  # of calls: a guess

Job = tuple[Pipeline, Microbatch, float]  # a copy, its share, and the weight of that's loss
Parts = list[tuple[int, float]]  # of each micro-batch of a share, its size and its loss's weight


class Replicas(CopiedInterface):
    """Pipelines over copies of one model, each with its share of every batch.

    Args:
        model: marked as for :class:`Pipeline`. The first group runs it itself, the others deep
            copies, which are made at once.
        groups: for each copy, the devices of its stages.
        **options: of each pipeline, as for :class:`Pipeline`; ``chunks`` is for each share.

    Raises:
        PlanError: no groups, or groups of several sizes.
        UsageError: a model on the meta device, of which each copy would be loaded for itself; or
            one that ``copy.deepcopy`` cannot copy.
        RecordingError: lazy modules that have not been called yet.

    Before each step, the copies get the values of parameters and buffers, and the numbers, texts
    and switches that were set on the model or its objects since the last step. After other changes
    (a layer, a hook, a function, a tensor that is no buffer) they and their ``pipes`` are made
    anew; they are recorded once more, and what was called on those pipes is gone
    (``pipe.compile``). What a forward sets on the model itself, such as a count or a generator's
    state, is each copy's own, until it is made anew. A change inside of an array, of bytes, or of
    an object of C++ does not reach the copies.

    Copies run at the same time, in a thread each, unless they draw random numbers, or change what
    they have in common (a global, a class, what a closure or the loss keeps). Then one is started
    after the other, so that nothing depends on timing. Buffers are the first copy's.

    Source: ``replicationFactor`` of PopTorch, ``torch.nn.DataParallel``.

    Example:
        >>> import torch, blockpipe as bp
        >>> from blockpipe.replicas import Replicas
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> two = Replicas(net, [["cpu"] * 2] * 2, chunks=2)
        >>> two.forward_backward(torch.ones(8, 4), loss_fn=torch.mean).loss.shape
        torch.Size([])
        >>> net[0].weight.grad.shape
        torch.Size([8, 4])
    """

    def __init__(self, model: nn.Module, groups: Sequence[Sequence[Any]], **options: Any) -> None:
        if len({len(group) for group in groups}) != 1:
            raise PlanError(
                "expected groups of devices, each with one for each stage, got groups of "
                f"{[len(group) for group in groups]} ({users_line()}); write [['cuda:0', "
                "'cuda:1'], ['cuda:2', 'cuda:3']] for two copies of two stages"
            )
        if is_on_meta(model):
            raise UsageError(
                "expected a model with values to copy, got one on the meta device "
                f"({users_line()}); call blockpipe.materialize(model, …) first"
            )
        check_initialized(model)
        self.module = model
        self._groups, self._options = groups, options
        # By kind of call, its recording, and whether it changes what copies have in common.
        self._changes: dict[Any, tuple[Recording, bool]] = {}
        self._copied = CopiedModels(model, len(groups) - 1)
        self.pipes = [Pipeline(model, devices=groups[0], **options), *self._pipes_of_copies()]

    def _pipes_of_copies(self) -> list[Pipeline]:
        pairs = zip(self._copied.copies, self._groups[1:], strict=True)
        return [Pipeline(each, devices=group, **self._options) for each, group in pairs]

    @untraced
    @remembers_caller
    def forward_backward(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        return_outputs: bool = False,
        model_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> StepResult:
        """As :meth:`Pipeline.forward_backward`; gradients add up in the model's ``.grad``.

        With ``batch_dims={"output": None}`` the outputs are a list with each copy's, which is a
        list with each micro-batch's.

        Args:
            *args: as for :meth:`Pipeline.forward_backward`.
            target: as for :meth:`Pipeline.forward_backward`.
            loss_fn: as for :meth:`Pipeline.forward_backward`.
            return_outputs: as for :meth:`Pipeline.forward_backward`.
            model_kwargs: as for :meth:`Pipeline.forward_backward`.
            **kwargs: the model's keyword arguments.

        Raises:
            UsageError: a parameter has a hook, which would not see the copies' gradients.
            The first exception of any copy, in their order. ``.grad`` may then hold part of the
            step.
        """
        check_loss(loss_fn, target)
        if isinstance(
            loss_fn, nn.Module
        ):  # as Pipeline does; the other copies read its tensors there
            loss_fn.to(self.pipes[0].output_device)
        given = args, joined_kwargs(kwargs, model_kwargs), target
        (args, kwargs, target), pairs = cut_off(given, leaves=False)
        shares, dims = self._shares(args, kwargs, target)
        reduction = reduction_for(loss_fn, self.pipes[0].loss_reduction)
        weights = weights_of(shares, reduction)

        def step(pipe: Pipeline, share: Microbatch, weight: float) -> tuple[StepResult, Parts]:
            by = self._parts_of(pipe, share, weight, reduction) if return_outputs else []
            if not weight:  # it counts for nothing, also where its loss is no number
                with torch.no_grad():
                    output = pipe(*share.args, **share.kwargs)
                return StepResult(torch.zeros((), device=pipe.output_device), output), by
            result = pipe.forward_backward(
                *share.args,
                target=share.target,
                loss_fn=WeightedLoss(loss_fn, weight),
                return_outputs=return_outputs,
                model_kwargs=share.kwargs,
            )
            return result, by

        results = self._run(step, shares, weights, dims, loss_fn)
        self._collect_gradients(len(shares))
        give((tensor, leaf.grad) for tensor, leaf in pairs)
        first = results[0][0].loss
        loss = torch.stack([result.loss.to(first.device) for result, _ in results]).sum()
        outputs = None
        if return_outputs:
            outputs = self._joined([(result.outputs, parts) for result, parts in results])
        return StepResult(loss.as_subclass(type(first)), outputs)

    @untraced
    @remembers_caller
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward over a batch, without a graph; outputs as for the step.

        Raises:
            UsageError: gradients are on.
        """
        if torch.is_grad_enabled():
            raise UsageError(
                "expected a call without gradients, for the copies' would not reach the model, "
                f"got one with them ({users_line()}); call it under torch.no_grad(), or "
                "forward_backward(…)"
            )
        shares, dims = self._shares(args, kwargs, None)
        reduction = self.pipes[0].loss_reduction
        weights, problem = weights_without_target(shares, reduction)
        reduction = reduction if problem is None else "mean"  # a copy with a loss raises it

        def forward(pipe: Pipeline, share: Microbatch, weight: float) -> tuple[Any, Parts]:
            by = self._parts_of(pipe, share, weight, reduction)
            return pipe(*share.args, **share.kwargs), by

        return self._joined(self._run(forward, shares, weights, dims))

    def unplace(self) -> nn.Module:
        """As :meth:`Pipeline.unplace`, of every copy; returns the model."""
        for pipe in self.pipes:
            pipe.unplace()
        return self.module

    def close(self) -> None:
        """End the threads that wait for a next step. The copies can be used again."""
        self.pipes[0].close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the copies: they are made anew."""
        return {**vars(self), "pipes": self.pipes[:1], "_copied": None, "_changes": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._copied = CopiedModels(self.module, len(self._groups) - 1)
        self.pipes += self._pipes_of_copies()

    # --- a step

    def _shares(
        self, args: Any, kwargs: dict[str, Any], target: Any
    ) -> tuple[list[Microbatch], BatchDims]:
        """The batch, cut for the copies, and how each of them is to cut its share; a batch of fewer
        samples leaves some idle."""
        dims = dims_of_call(self.module, self.pipes[0].batch_dims, args, kwargs, target)
        shares = split(args, kwargs, target, len(self.pipes), dims, cut=False)
        if len(shares) < 2:
            return shares, self.pipes[0].batch_dims
        size = sum(share.size for share in shares)
        return shares, dims_of_shares(args, kwargs, target, size, dims)

    def _run(
        self,
        work: Callable[[Pipeline, Microbatch, float], Any],
        shares: list[Microbatch],
        weights: list[float],
        dims: BatchDims,
        loss_fn: Callable[..., Any] | None = None,
    ) -> list[Any]:
        """Do the work on each copy with its share, which is split by ``dims``; results in order."""
        self._follow_model()
        self._copy_values(len(shares))
        try:
            with ExitStack() as stack:
                for pipe in self.pipes[: len(shares)]:
                    stack.enter_context(pipe._splits_by(dims))
                return self._run_jobs(work, shares, weights, loss_fn)
        finally:
            if self._copied.copies:
                self._copied.note()

    def _follow_model(self) -> None:
        """Bring to the copies what was set on the model since the last step, or make them anew."""
        if self._copied.copies and not self._copied.follow():
            for pipe in self.pipes[1:]:
                pipe.close()
            self._copied.copy()
            self.pipes[1:] = self._pipes_of_copies()

    def _run_jobs(
        self,
        work: Callable[[Pipeline, Microbatch, float], Any],
        shares: list[Microbatch],
        weights: list[float],
        loss_fn: Callable[..., Any] | None,
    ) -> list[Any]:
        jobs = [*zip(self.pipes, shares, weights, strict=False)]
        if len(jobs) < 2:
            return [work(*jobs[0])]
        recordings = self._recordings(jobs, loss_fn)
        if recordings is None or _key(recordings[0], loss_fn) not in self._changes:
            return self._one_by_one(partial(self._watched, loss_fn=loss_fn), work, jobs)
        if not self._may_overlap(recordings, loss_fn):
            return self._one_by_one(operator.call, work, jobs)
        ambient, share = CallerState().for_threads(), self._share_of_threads(len(jobs))

        def run(job: tuple[Pipeline, Microbatch, float]) -> Any:
            with intra_operation_threads(share):
                return work(*job)

        with SharedContexts():
            others = [submit(partial(ambient.run, partial(run, job))) for job in jobs[1:]]
            try:
                first = run(jobs[0])
            finally:
                wait(others)
        return [first, *(other.result() for other in others)]

    def _share_of_threads(self, copies: int) -> int | None:
        """How many threads an operation has on the CPU, where copies share its cores."""
        if any(is_asynchronous(device) for device in self.pipes[0].devices):
            return None
        return max(1, torch.get_num_threads() // copies)

    def _recordings(
        self, jobs: Sequence[Job], loss_fn: Callable[..., Any] | None
    ) -> list[Recording] | None:
        """The recording that each copy will run by; ``None`` if one of them has none yet."""
        found = []
        for pipe, share, _ in jobs:
            batch = pipe._runner.split(share.args, share.kwargs, share.target)[0]
            prepared = pipe._preparer.found(batch, loss_fn)
            if prepared is None:
                return None
            found.append(prepared.recording)
        return found

    def _may_overlap(self, recordings: list[Recording], loss_fn: Callable[..., Any] | None) -> bool:
        """Whether no copy draws random numbers, and they change nothing that they have in common,
        such as globals."""
        if any(hop.draws for recording in recordings for hop in recording.hops):
            return False
        _, changes = self._changes.get(_key(recordings[0], loss_fn), (None, True))
        return not changes and shared_by_copies(recordings) is None

    def _watched(self, run: Callable[[], Any], loss_fn: Callable[..., Any] | None) -> Any:
        """Run the first copy, and note whether it changes what the others read too."""
        drawn = current(_sources(self.pipes[0]))
        shared = SharedObjects(self.module, loss_fn, self._copied.is_copied)
        result = run()
        recording = self.pipes[0].recording
        if recording is not None:
            check_loss_of_copies(recording, self._copied.has_own)
            if len(self._changes) >= _MOST_KINDS:
                self._changes.clear()
            found = bool(moved(drawn)) or shared.changed()
            self._changes[_key(recording, loss_fn)] = recording, found
        return result

    def _one_by_one(
        self,
        first: Callable[[Callable[[], Any]], Any],
        work: Callable[[Pipeline, Microbatch, float], Any],
        jobs: Sequence[Job],
    ) -> list[Any]:
        """The first copy draws as it would alone; each other one from states of its own."""
        results = [first(partial(work, *jobs[0]))]
        for number, job in enumerate(jobs[1:], start=1):
            with ExitStack() as stack:
                if _draws(self.pipes[0]):
                    ours, own = _sources(self.pipes[0]), _sources(self.pipes[number])
                    stack.enter_context(diverted(ours, own, f"copy {number}"))
                results.append(work(*job))
        return results

    def _copy_values(self, count: int) -> None:
        """The model's values, modes and frozen parameters to the copies."""
        with torch.no_grad():
            for number, pipe in enumerate(self.pipes[1:count]):
                for ours, its in zip(self.module.modules(), pipe.module.modules(), strict=True):
                    its.training = ours.training
                parameters = [*self._copied.parameters(number)]
                for weight, own in parameters:
                    own.requires_grad_(weight.requires_grad)
                    own.grad = None  # of a step that failed
                for value, slot in (*parameters, *self._copied.buffers(number)):
                    slot.copy_(value, non_blocking=True)
                self._copied.copy_plain_tensors(number)

    def _collect_gradients(self, count: int) -> None:
        """The copies' gradients to the model's own, in the order of the shares."""
        with torch.no_grad():
            for number in range(count - 1):
                for original, copied in self._copied.parameters(number):
                    gradient, copied.grad = copied.grad, None
                    if gradient is None:
                        continue
                    gradient = gradient.to(original.device, non_blocking=True)
                    if original.grad is None:
                        original.grad = gradient
                    else:
                        original.grad += gradient

    def _parts_of(
        self, pipe: Pipeline, share: Microbatch, weight: float, reduction: LossReduction
    ) -> Parts:
        """The sizes and the weights of a share's micro-batches."""
        parts = pipe._runner.split(share.args, share.kwargs, share.target)
        weights = weights_of(parts, reduction) if weight else [0.0] * len(parts)
        return [(part.size, weight * own) for part, own in zip(parts, weights, strict=True)]

    def _joined(self, results: list[tuple[Any, Parts]]) -> Any:
        """The outputs of all copies' micro-batches, as the batch's."""
        outputs = [output for output, _ in results]
        if len(outputs) == 1 and output_dim(self.pipes[0].batch_dims) is not None:
            return outputs[0]
        parts = [part for _, parts in results for part in parts]
        sizes, weights = [size for size, _ in parts], [weight for _, weight in parts]
        device = self.pipes[0].output_device
        if output_dim(self.pipes[0].batch_dims) is None:
            sizes = [sum(size for size, _ in parts) for _, parts in results]
            return join(outputs, sizes, [1.0] * len(sizes), device, None)[0]
        for number in range(1, len(outputs)):
            outputs[number] = self._of_model(number - 1, outputs[number])
        every = [output for own in outputs for output in own]
        dim = output_dim(self.pipes[0].batch_dims, every, sizes)
        return join(every, sizes, weights, device, dim)[0]

    def _of_model(self, number: int, outputs: Any) -> Any:
        """Outputs of a copy, with the model's own parameters in place of the copy's."""
        pairs = self._copied.parameters(number)
        own = {_memory_of(its): ours.detach() for ours, its in pairs if its.numel()}
        return map_tensors(lambda t: own.get(_memory_of(t), t), outputs)


def _memory_of(tensor: Tensor) -> Any:
    if tensor.layout is not torch.strided:
        return None
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _key(recording: Recording, loss_fn: Callable[..., Any] | None) -> Any:
    return id(recording), kind_of(loss_fn)


def _draws(pipe: Pipeline) -> bool:
    recording = pipe.recording
    return recording is not None and any(hop.draws for hop in recording.hops)


def _sources(pipe: Pipeline) -> list[Source]:
    """All that a copy can draw from."""
    return [*host_sources(), *(source for d in pipe.devices for source in torchs_of(d))]
