"""A step over processes against the plain loop, which the first stage's process runs alone.

Every other process has its own stages as ever: the tensors to compare come one at a time to the
process that compares. With replicas that is one process for all of them: it runs the plain loop
over all shares, and the values of the other replicas come to it one replica at a time.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..._common.callsite import users_line
from ..._common.nested import map_tensors
from ...batches.joining import join
from ...batches.microbatch import weights_of
from ...batches.output_dims import output_dim
from ...devices.rng_streams import Source
from ...errors import MicrobatchError, RankError, UsageError
from ...execution.step_result import StepResult
from ...reports.verify.result import (
    Outcome,
    Verification,
    compared,
    named_outputs,
    not_finite,
)
from ...reports.verify.run import joining
from ...reports.verify.whole_batch import against_whole_batch
from ...restoring.copies.whole_copies import copied_whole
from ...restoring.preserved import PreservedModel, fresh_copy
from ..agreement import Agreement, Kind
from ..replicas import StageReplicas
from ..stage_places import StagePlaces
from ..stage_values import StageValues
from .plain_step import (
    Share,
    StepOptions,
    joined_shares,
    on_host,
    plain_outcomes,
    wholes,
)

_TOLERANCE = 1e-5  # for single precision, as in one process

Call = tuple[tuple[Any, ...], dict[str, Any], Any]


@dataclass(frozen=True)
class VerifiedStep:
    """The step that is verified, as the pipeline runs it.

    Attributes:
        call: this replica's arguments, keyword arguments and target.
        run: runs it, and returns the outputs too.
        sources: records it for the model's modes, and returns the generators that it draws from.
        options: how its batch is split and its losses are weighted.
    """

    call: Call
    run: Callable[[Call], StepResult]
    sources: Callable[[], list[Source]]
    options: StepOptions


class StageVerifier:
    """Runs a step over processes, and the same one in a single process, from the same state.

    All processes call the methods together. The results are in the first stage's process of the
    first replica; elsewhere they are empty.

    Args:
        model: the user's.
        values: of this process's stages.
        places: where stages are.
        replicas: the processes that have the same stages; ``None``: there are none.
        agreement: of all processes.
        step: what is verified.
    """

    def __init__(
        self,
        model: nn.Module,
        values: StageValues,
        places: StagePlaces,
        replicas: StageReplicas | None,
        agreement: Agreement,
        step: VerifiedStep,
    ) -> None:
        self._model = model
        self._values = values
        self._places = places
        self._replicas = replicas
        self._agreement = agreement
        self._step = step
        self._has_first = places.is_own(0)
        self._compares = self._has_first and (replicas is None or replicas.is_first)
        self._sources = step.sources()
        self._shares: list[Share] = []  # of all replicas
        self._batch: Share  # all of them as one

    def verify(
        self, rtol: float | None, atol: float, schedule: str, *, whole: bool
    ) -> Verification:
        """Compare the runs; return the same verification in every process.

        Args:
            rtol: the relative tolerance; ``None``: that of single precision.
            atol: the absolute tolerance.
            schedule: a description of the pipelined run.
            whole: also compare with the whole batch in one forward.
        """
        rtol = _TOLERANCE if rtol is None else rtol
        plain = self._plain()
        outputs, piped = self._piped()
        reference = "the plain loop on the host of the first stage's process"
        if self._replicas is not None:
            reference += f", over the shares of {self._replicas.count} replicas"
        found = Verification([], False, rtol, atol, schedule, reference)
        for number, theirs in enumerate(self._each(piped)):
            if self._compares:
                self._compare(found, number, plain[number], theirs)
        del plain
        if whole and self._shared(self._is_split()):
            self._add_whole(found, outputs, piped)
        shared: Verification = self._shared(found)
        return shared

    def _compare(self, found: Verification, number: int, plain: Outcome, piped: Outcome) -> None:
        """Add the differences of one replica to a verification."""
        for difference in compared(plain, piped, found.rtol, found.atol):
            if self._replicas is not None:
                difference.name += f" of replica {number}"
            found.differences.append(difference)
        found.notes += [note for note in not_finite(plain) if note not in found.notes]

    def _add_whole(self, found: Verification, outputs: Any, piped: Outcome) -> None:
        """Add the comparison with the whole batch to a verification."""
        try:
            with self._agreement.at_end(lambda: Kind({"call": "the whole batch of verify"})):
                if self._compares:
                    self._batch = joined_shares(self._model, self._shares, self._step.options)
            piped = self._joined(outputs, piped)
        except (MicrobatchError, RankError) as error:
            found.notes.append(f"not compared with the whole batch: {error}")
            return
        against = against_whole_batch(self, piped)
        if isinstance(against, str):
            found.notes.append(f"not compared with the whole batch: {against}")
        else:
            found.whole = against

    # --- the runs

    def _plain(self) -> list[Outcome]:
        """Run the plain loop, and return what results for each replica."""
        model, buffers = self._whole_model()
        self._shares = self._gathered(buffers)
        with self._agreement.at_end(lambda: Kind({"call": "the plain run of verify"})):
            if model is None:
                return []
            return plain_outcomes(model, self._shares, self._step.options, self._sources)

    def whole(self) -> Outcome:
        """Run the step of the whole batch in one forward."""
        model, _ = self._whole_model()
        with self._agreement.at_end(lambda: Kind({"call": "the whole batch of verify"})):
            if model is None:
                return Outcome()
            dims = joining(self._step.options.batch_dims)
            options = replace(self._step.options, chunks=1, batch_dims=dims)
            return plain_outcomes(model, [self._batch], options, self._sources)[0]

    def pipelined(self) -> Outcome:
        """Run the pipeline's step; the outputs are those of all shares."""
        return self._joined(*self._piped())

    def _piped(self) -> tuple[Any, Outcome]:
        """Run the pipeline's step, leave the model as it was, and return this replica's outputs
        and what resulted."""
        outcome = Outcome()
        loss = self._step.options.loss_fn
        modules = [self._model, *([loss] if isinstance(loss, nn.Module) else [])]
        with PreservedModel(modules, self._sources).run():
            result = self._step.run(_own(self._step.call))
            gradients, buffers = [], []
            for name, parameter in self._model.named_parameters():
                if parameter.requires_grad:
                    gradient = self._values.gathered_gradient(name, parameter)
                    gradients += [(name, gradient)] if self._has_first else []
            for name, buffer in self._model.named_buffers():
                value = self._values.gathered_one(name, buffer)
                buffers += [(name, value)] if self._has_first else []
        outputs = on_host(result.outputs)
        if self._has_first:
            outcome.put("outputs", named_outputs(outputs))
            outcome.put("loss", [("loss", result.loss.detach().cpu().as_subclass(Tensor))])
            outcome.put("gradients", gradients)
            outcome.put("buffers", buffers)
        return outputs, outcome

    def _joined(self, outputs: Any, piped: Outcome) -> Outcome:
        """Return what resulted, with the outputs of all shares joined.

        Raises:
            MicrobatchError: they do not fit together; where they are joined.
            RankError: elsewhere.
        """
        every = [*self._each(outputs)]
        with self._agreement.at_end(lambda: Kind({"call": "the outputs of verify"})):
            if not self._compares:
                return piped
            options = self._step.options
            dims = joining(options.batch_dims)
            if dims is options.batch_dims:
                parts = wholes(self._model, self._shares, options)
            else:  # they are lists of micro-batches' outputs
                every = [output for listed in every for output in listed]
                split = (share.microbatches(self._model, options) for share in self._shares)
                parts = [microbatch for part in split for microbatch in part]
            sizes, weights = [p.size for p in parts], weights_of(parts, options.reduction)
            dim = output_dim(dims, every, sizes)
            joined = named_outputs(join(every, sizes, weights, None, dim)[0])
            return Outcome({**piped.values, "outputs": dict(joined)})

    # --- the model's modes

    @property
    def draws(self) -> bool:
        """Whether the forward draws random numbers."""
        return bool(self._sources)

    def all_modules(self) -> list[nn.Module]:
        """Return all modules of the model and the loss."""
        loss = self._step.options.loss_fn
        return [*self._model.modules(), *(loss.modules() if isinstance(loss, nn.Module) else [])]

    @contextmanager
    def anew(self) -> Iterator[None]:
        """While entered, use a recording of the model as it is now."""
        before = self._sources
        try:
            self._sources = self._step.sources()
            yield
        finally:
            self._sources = before

    # --- what comes together

    def _whole_model(self) -> tuple[nn.Module | None, dict[str, Tensor]]:
        """Return a copy of the whole model on the host, where it is compared, and the replica's
        buffers in its first stage's process."""
        memo: dict[int, Any] = {}
        buffers: dict[str, Tensor] = {}
        for name, parameter in self._model.named_parameters():
            value = self._values.gathered_one(name, parameter)
            if self._compares:
                memo[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
        for name, buffer in self._model.named_buffers():
            value = self._values.gathered_one(name, buffer)
            if self._has_first:
                memo[id(buffer)] = buffers[name] = value
        with self._agreement.at_end(lambda: Kind({"call": "the whole model of verify"})):
            return copied_whole(self._model, memo) if self._compares else None, buffers

    def _gathered(self, buffers: dict[str, Tensor]) -> list[Share]:
        """Return the shares of all replicas, where they are compared."""
        share = None
        with self._agreement.at_end(lambda: Kind({"call": "the shares of verify"})):
            if self._has_first:
                args, kwargs, target = on_host(self._step.call)
                share = Share(args, kwargs, target, buffers)
                if self._replicas is not None:
                    _check_sendable(share)
        shares = [*self._each(share)]
        return shares if self._compares else []

    def _is_split(self) -> bool:
        """Whether the batch has several micro-batches."""
        parts = (share.microbatches(self._model, self._step.options) for share in self._shares)
        return sum(map(len, parts)) > 1

    def _each(self, value: Any) -> Iterator[Any]:
        """Yield each replica's value in the first stage's processes; nothing in the others."""
        if self._has_first:
            yield from [value] if self._replicas is None else self._replicas.each(value)

    def _shared(self, value: Any) -> Any:
        """Return the value of the process that compares, in all."""
        if self._has_first and self._replicas is not None:
            value = self._replicas.shared(value)
        return self._places.shared(value, 0)


def _own(call: Call) -> Call:
    """Return copies of a call's tensors: a forward may write to them, and each run begins alike."""
    copies: dict[int, Tensor] = {}

    def own(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = fresh_copy(tensor, tensor.device)
        return copies[id(tensor)]

    found: Call = map_tensors(own, call)
    return found


def _check_sendable(share: Share) -> None:
    """Raise :class:`UsageError` if a share cannot go to another process."""
    try:
        torch.save(share, io.BytesIO())  # pickles, as torch.distributed does
    except Exception as error:
        raise UsageError(
            "expected arguments that pickle, for one process verifies the shares of all replicas, "
            f"got {type(error).__name__}: {error} ({users_line()}); pass others, or verify a "
            "pipeline without mesh="
        ) from error
