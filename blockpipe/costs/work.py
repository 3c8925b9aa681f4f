"""What operations do, whatever device does it: so a recording can be timed for any device later.

An operation is of a *kind*, whose members take about as long for as much arithmetic, or for as many
bytes. Kinds are few, for each is timed by a probe (:mod:`blockpipe.costs.probing`); a rate for each
operation that torch has would take longer to find than the model takes to run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from .._common.nested import tensors
from .._common.text import dtype_text
from .._torch.tensors import OpOverload

_aten = torch.ops.aten

PRODUCT = "product"  # of matrices, and attention
CONVOLUTION = "convolution"
ADDITION = "addition"  # of one tensor to another, in place: as gradients are
PASS = "pass"  # over memory: reads, computes next to nothing, writes
FUNCTION = "function"  # a pass with exponentials, or with a mean of each row
GROUPS = "groups"  # group norm
STATISTICS = "statistics"  # batch norm: several passes, for each channel
WINDOW = "window"  # pooling, interpolation
RANDOM = "random"  # numbers drawn
KINDS = (PRODUCT, CONVOLUTION, ADDITION, PASS, FUNCTION, GROUPS, STATISTICS, WINDOW, RANDOM)

# By parts of operations' names; the first that is met counts, and all else is a pass.
_KINDS_BY_NAME = {
    "batch_norm": STATISTICS,
    "instance_norm": STATISTICS,
    "group_norm": GROUPS,
    "dropout": RANDOM,
    "bernoulli": RANDOM,
    "rand": RANDOM,
    "normal": RANDOM,
    "uniform": RANDOM,
    "exponential": RANDOM,
    "pool": WINDOW,
    "upsample": WINDOW,
    "grid_sampler": WINDOW,
    "im2col": WINDOW,
    "col2im": WINDOW,
    "_norm": FUNCTION,
    "softmax": FUNCTION,
    "gelu": FUNCTION,
    "silu": FUNCTION,
    "mish": FUNCTION,
    "elu": FUNCTION,
    "glu": FUNCTION,
    "tanh": FUNCTION,
    "sigmoid": FUNCTION,
    "softplus": FUNCTION,
    "exp": FUNCTION,
    "log": FUNCTION,
    "erf": FUNCTION,
    "pow": FUNCTION,
    "sin": FUNCTION,
    "cos": FUNCTION,
}
_CHEAP = ("relu", "expand", "logical")  # whose names have one of the above in them
_CONVOLUTIONS = (_aten.convolution, _aten._convolution, _aten.cudnn_convolution)
# Gradients that go through as they are, or as views: for each operand nothing runs.
_FREE_BACKWARD = (
    *(_aten.add, _aten.add_, _aten.sub, _aten.sub_, _aten.sum, _aten.cat, _aten.stack),
    *(_aten.clone, _aten.copy_),
)
# Views whose gradient is one: a tensor of zeros is made, and written in part.
_VIEWS_IN_PART = (
    *(_aten.slice, _aten.select, _aten.split, _aten.split_with_sizes, _aten.unbind),
    *(_aten.expand, _aten.diagonal, _aten.unfold, _aten.as_strided),
)
# Read as many rows as there are indices, and not the whole of their first argument.
_GATHERS = (_aten.embedding, _aten.index_select, _aten.gather, _aten.index)
# Take memory and do nothing with it.
_NOTHING = (
    *(_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty),
    *(_aten.new_empty_strided, _aten.empty_permuted),
)
# Arithmetic that torch's registry does not know, from an operation's arguments.
_FLOPS: dict[Any, Callable[..., float]] = {
    _aten.mkldnn_rnn_layer: lambda x, *weights: _each_row(x, *weights[:2]),  # an LSTM on the CPU
    _aten._trilinear: lambda x, weight, *_: _each_row(x, weight),  # nn.Bilinear
    _aten._cdist_forward: lambda a, b, *_: 2.0 * a.numel() * b.shape[-2],
    _aten._euclidean_dist: lambda a, b: 2.0 * a.numel() * b.shape[-2],  # cdist of many
    _aten.mv: lambda matrix, _: 2.0 * matrix.numel(),
    _aten.dot: lambda a, _: 2.0 * a.numel(),
}


class Operation(NamedTuple):
    """The amounts that one operation computes, reads and writes.

    Attributes:
        kind: one of ``KINDS``.
        dtype: what products and convolutions compute in; for all else bytes say it, and it is
            empty.
        flops: arithmetic.
        bytes: read and written.
    """

    kind: str
    dtype: str
    flops: float
    bytes: int


@dataclass
class Work:
    """Operations, how many of each, in a forward and in its backward.

    Attributes:
        forward: what runs.
        backward: of which operations a gradient is computed: once for each operand that needs one.
    """

    forward: Counter[Operation] = field(default_factory=Counter)
    backward: Counter[Operation] = field(default_factory=Counter)

    def add(self, other: Work) -> None:
        """Add other work to this one."""
        for mine, others in ((self.forward, other.forward), (self.backward, other.backward)):
            for operation, count in others.items():
                mine[operation] += count

    def __repr__(self) -> str:
        count = self.forward.total(), self.backward.total()
        return f"<Work: {count[0]} operations forward, {count[1]} backward>"


def seen(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Work:
    """Return the work of one operation, seen below autograd; that of a view is in its backward.

    Args:
        func: the operator.
        args: as it was called.
        kwargs: as it was called.
        result: what it returned.
    """
    packet = getattr(func, "overloadpacket", func)
    work = Work()
    given = list(tensors((args, kwargs)))
    needy = [t for t in given if t.requires_grad] if torch.is_grad_enabled() else []
    if is_view(func):
        if needy and packet in _VIEWS_IN_PART:
            work.backward[addition(needy[0])] += 1
        return work
    if packet in _NOTHING:
        return work
    made = sum(map(size_of, tensors(result)))
    read = sum(map(size_of, given))
    if packet in _GATHERS and given:
        read += min(0, made - size_of(given[0]))
    operation = _operation(packet, flops_of(func, args, kwargs, result), read + made, given)
    work.forward[operation] += 1
    if needy and any(t.is_floating_point() or t.is_complex() for t in tensors(result)):
        for gradient in _gradients(packet, operation, needy, made):
            work.backward[gradient] += 1
    return work


def addition(tensor: Tensor) -> Operation:
    """Return the work of adding a gradient of the tensor's size to another one."""
    return Operation(ADDITION, "", 0.0, 3 * size_of(tensor))


def _operation(packet: Any, flops: float, moved: int, given: list[Tensor]) -> Operation:
    name = getattr(packet, "__name__", "")
    if flops:
        kind = CONVOLUTION if packet in _CONVOLUTIONS or "conv" in name else PRODUCT
        return Operation(kind, _dtype(given), flops, moved)
    cheap = any(part in name for part in _CHEAP)
    kinds = (kind for part, kind in _KINDS_BY_NAME.items() if part in name and not cheap)
    return Operation(next(kinds, PASS), "", 0.0, moved)


def _gradients(
    packet: Any, operation: Operation, needy: list[Tensor], made: int
) -> Iterator[Operation]:
    if packet in _FREE_BACKWARD:
        return
    if operation.flops:
        matrices = [t for t in needy if t.dim() > 1]
        yield from (operation for _ in matrices or needy[:1])
        if operation.kind == PRODUCT and len(needy) > len(matrices):  # a bias's gradient is a sum
            yield Operation(ADDITION, "", 0.0, made)
    elif packet in _GATHERS:
        yield addition(needy[0])
    elif operation.kind == RANDOM:
        yield operation._replace(kind=PASS)
    elif operation.kind == PASS:
        yield from (operation for t in needy if t.dim())
    else:
        yield operation


def _dtype(given: list[Tensor]) -> str:
    found = next((t.dtype for t in given if t.is_floating_point() or t.is_complex()), None)
    return dtype_text(found or given[0].dtype) if given else ""


def flops_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> float:
    """Return an operation's floating-point operations; 0 for those that only move or map."""
    packet = getattr(func, "overloadpacket", func)
    if packet in _FLOPS:
        return _FLOPS[packet](*args)
    count = flop_registry.get(packet)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))


def _each_row(x: Tensor, *weights: Tensor) -> float:
    """Return the multiplications and additions with every number of the weights, for each row."""
    return 2.0 * x.numel() / max(1, x.shape[-1]) * sum(w.numel() for w in weights)


def is_view(func: Any) -> bool:
    """Return whether an operator makes a view, and does no work."""
    return isinstance(func, OpOverload) and func.is_view


def size_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements. A sparse one counts as dense, as not every layout
    has a size."""
    return tensor.numel() * tensor.element_size()
