"""The step of all replicas' shares in one process, one micro-batch at a time: the plain loop.

Each share has its replica's buffers and random numbers; the gradients of all add up in one model.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..._common.nested import leaves, map_leaves, map_tensors
from ...batches.batch_dims import (
    WHOLE,
    ArgumentDims,
    BatchDims,
    Name,
    Role,
    dims_of_call,
    has_batch,
)
from ...batches.class_weights import reduction_for
from ...batches.losses import own_or_mean_square
from ...batches.microbatch import LossReduction, Microbatch, split
from ...devices.rng_streams import Source, current, restore
from ...errors import MicrobatchError
from ...reports.verify.reference_loop import ReferenceLoop
from ...reports.verify.result import Outcome, named_outputs
from ...restoring.preserved import PreservedModel, moved_copy
from ..microbatches.streams import of_replica

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class StepOptions:
    """How a batch is split and its losses are weighted.

    Attributes:
        chunks: the number of micro-batches.
        loss_fn: the user's loss; ``None``: the model's own, or the mean square.
        loss_reduction: the user's.
        batch_dims: the user's.
        is_deferred: whether batch norm is deferred.
    """

    chunks: int
    loss_fn: Callable[..., Any] | None
    loss_reduction: LossReduction
    batch_dims: BatchDims
    is_deferred: bool

    @property
    def loss(self) -> Callable[..., Any]:
        """The loss function of the step."""
        return self.loss_fn or own_or_mean_square

    @property
    def reduction(self) -> LossReduction:
        """The weights of the losses."""
        return reduction_for(self.loss_fn, self.loss_reduction)


@dataclass
class Share:
    """What one replica has of a step, on the host.

    Attributes:
        args: its positional arguments.
        kwargs: its keyword arguments.
        target: its target.
        buffers: the model's, by name.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    buffers: dict[str, Tensor]

    def microbatches(self, model: nn.Module, options: StepOptions) -> list[Microbatch]:
        """Return copies of its micro-batches, for a forward may write to them."""
        dims = dims_of_call(model, options.batch_dims, self.args, self.kwargs, self.target)
        args, kwargs, target = on_host((self.args, self.kwargs, self.target))
        return split(args, kwargs, target, options.chunks, dims)


def plain_outcomes(
    model: nn.Module, shares: Sequence[Share], options: StepOptions, sources: Sequence[Source]
) -> list[Outcome]:
    """Run the plain loop on a model without gradients, and return what results for each share.

    Args:
        model: whole, on the host; it has the gradients of all shares afterwards.
        shares: of all replicas.
        options: of the step.
        sources: the generators that a share draws from; they are left as they were.
    """
    parts = [share.microbatches(model, options) for share in shares]
    outcomes: list[Outcome] = []
    total: Tensor | None = None
    loss_fn, losses = options.loss, []
    if isinstance(loss_fn, nn.Module):
        losses = [loss_fn := moved_copy(loss_fn, _CPU)]
    with PreservedModel(losses, sources).run():
        begin = current(sources)
        for number, share in enumerate(shares):
            own = _with_buffers(model, share.buffers)
            restore(of_replica(begin, number))
            loop = ReferenceLoop(
                parts[number],
                loss_fn,
                options.reduction,
                options.batch_dims,
                sources,
                is_deferred=options.is_deferred,
                others=[m for at, part in enumerate(parts) if at != number for m in part],
            )
            outputs, loss = loop.run(own, _CPU)
            if loss is not None:
                total = loss if total is None else total + loss
            outcomes.append(Outcome())
            outcomes[-1].put("outputs", named_outputs(outputs))
            outcomes[-1].put("buffers", [(n, b.detach()) for n, b in own.named_buffers()])
    for outcome in outcomes:
        if total is not None:
            outcome.put("loss", [("loss", total)])
        trained = [(n, p.grad) for n, p in model.named_parameters() if p.requires_grad]
        outcome.put("gradients", trained)
    return outcomes


def _with_buffers(model: nn.Module, buffers: dict[str, Tensor]) -> nn.Module:
    """Return a copy of a model that has its parameters, and these buffers."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    for name, buffer in model.named_buffers():
        memo[id(buffer)] = buffers[name].clone()
    return copy.deepcopy(model, memo)


# --- the shares as one batch


def wholes(model: nn.Module, shares: Sequence[Share], options: StepOptions) -> list[Microbatch]:
    """Return each share as one micro-batch."""
    uncut = replace(options, chunks=1)
    return [share.microbatches(model, uncut)[0] for share in shares]


def joined_shares(model: nn.Module, shares: Sequence[Share], options: StepOptions) -> Share:
    """Return all shares as one: the reverse of a split.

    Args:
        model: the model, for the names of its arguments.
        shares: of all replicas.
        options: of the step.

    Raises:
        MicrobatchError: something other than samples differs between them, such as a length.
    """
    first = shares[0]
    if len(shares) == 1:
        return first
    sizes = [whole.size for whole in wholes(model, shares, options)]
    of_call = dims_of_call(model, options.batch_dims, first.args, first.kwargs, first.target)
    dims = ArgumentDims(of_call, first.kwargs)

    def joined(name: Name, values: list[Any]) -> Any:
        try:
            return _joined(values, dims.of(name), sizes)
        except (RuntimeError, ValueError) as error:
            what = "the target" if name is Role.TARGET else f"argument {name!r}"
            raise MicrobatchError(f"the replicas' shares differ in {what}: {error}") from error

    for name, buffer in first.buffers.items():
        if not all(torch.equal(buffer, share.buffers[name]) for share in shares):
            raise MicrobatchError(f"the replicas differ in the buffer {name!r}")
    columns = zip(*(share.args for share in shares), strict=True)
    args = tuple(joined(at, [*values]) for at, values in enumerate(columns))
    kwargs = {name: joined(name, [share.kwargs[name] for share in shares]) for name in first.kwargs}
    target = joined(Role.TARGET, [share.target for share in shares])
    return Share(args, kwargs, target, first.buffers)


def _joined(values: list[Any], dim: Any, sizes: Sequence[int]) -> Any:
    """Return one argument of all shares.

    Raises:
        RuntimeError: torch cannot concatenate it.
        ValueError: something in it that is not split differs.
    """
    if dim == "list":
        return type(values[0])(itertools.chain.from_iterable(values))
    columns = zip(*map(leaves, values), strict=True)
    found = iter([_joined_leaf([*column], dim, sizes) for column in columns])
    return map_leaves(lambda _: next(found), values[0])


def _joined_leaf(parts: list[Any], dim: Any, sizes: Sequence[int]) -> Any:
    are_tensors = [isinstance(part, Tensor) for part in parts]
    if all(are_tensors) and dim is not WHOLE:
        pairs = zip(parts, sizes, strict=True)
        if all(has_batch(part.shape, size, dim) for part, size in pairs):
            return torch.cat(parts, dim)
    equal = torch.equal if all(are_tensors) else operator.eq
    mixed = any(are_tensors) and not all(are_tensors)
    if mixed or not all(equal(part, parts[0]) for part in parts):
        raise ValueError("it has no samples to join, and other values")
    return parts[0]


def on_host(value: Any) -> Any:
    """Return copies of the tensors in a nested value, on the host, without graphs."""
    return map_tensors(lambda t: t.detach().to(_CPU, copy=True), value)
