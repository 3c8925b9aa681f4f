"""What operations do, and which of them make the host wait: seen below autograd, where every
operation passes, inside of sealed modules too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._common.callsite import users_line
from .._common.nested import tensors
from .._common.threads.thread_state import ours
from .._torch.collectives import is_collective, made_alone
from .._torch.custom_operators import body_of
from .._torch.modes import DispatchMode
from .._torch.tensors import (
    OpOverload,
    arguments_by_name,
    normalizes_batches,
    reads_memory,
    updated_statistics,
    written_by,
)
from .work import Work, seen, size_of

_aten = torch.ops.aten
# Operations whose result the host has to know before it can go on.
_ASKS_HOST = {
    _aten._local_scalar_dense: "a tensor's value (item(), bool(), float(), if)",
    _aten.nonzero: "nonzero(), or indexing with a mask",
    _aten.masked_select: "masked_select()",
    _aten._unique2: "unique()",
    _aten.unique_consecutive: "unique_consecutive()",
    _aten.unique_dim: "unique()",
    _aten.equal: "torch.equal()",
    _aten._linalg_check_errors: "a check of torch.linalg",
}
# Torch functions that always do; a recording on the CPU does not see it of all.
_CONVERTS = ["__bool__", "__float__", "__int__", "__index__", "__complex__", "__contains__"]
ASKS_HOST = frozenset([*_CONVERTS, "item", "tolist", "cpu", "numpy"])
_INDEXES = (_aten.index, _aten.index_put, _aten.index_put_, _aten._unsafe_index)


@dataclass(frozen=True)
class HostSync:
    """A place in a forward where the host waits for the device, and so every stage does."""

    operation: str
    where: str


class Meter(DispatchMode):
    """A mode that reports what each operation does, and where one makes the host wait.

    Args:
        spent: called with an operation's work and the bytes that it makes; for a view these are
            none, and its work is at most in the backward.
        waited: called for each host synchronization.
        drew: called for each operation that draws random numbers, with the generator that it was
            given; ``None``: none.
        wrote: called for each tensor that an operation writes without saying so: batch norm's
            running statistics, whose versions do not count.
        given: called for each operation with the tensors that it is given.
        writing: called before each operation with the tensors that it says it writes to.
        fills: called before each operation that writes to a tensor after autograd has saved it.
        reading: called with the tensors that an operation is given, unless it only looks at them.

    Attributes:
        gathers: called for each operation that several processes make together; returns whether to
            leave it out here, and to go on with what this process has. ``None``: they are made.
        computes: called with the function by which an operator of the user's computes.
        made: called with the result of each operation, and its arguments.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        spent: Callable[[Work, int], None] | None,
        waited: Callable[[HostSync], None] | None = None,
        drew: Callable[[torch.Generator | None], None] | None = None,
        wrote: Callable[[Tensor], None] | None = None,
        given: Callable[[Iterable[Tensor]], None] | None = None,
        writing: Callable[[Iterable[Tensor]], None] | None = None,
        fills: Callable[[], None] | None = None,
        reading: Callable[[Iterable[Tensor]], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.spent = spent
        self.waited = waited
        self.drew = drew
        self.wrote = wrote
        self.given = given
        self.writing = writing
        self.fills = fills
        self.reading = reading
        self.gathers: Callable[[], bool] | None = None
        self.made: Callable[[Any, Any], None] | None = None
        self.computes: Callable[[Callable[..., Any]], None] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with ours():
            return self._measured(func, args, kwargs or {})

    def _measured(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if self.waited is not None:
            what = _waits(func, args, kwargs)
            if what is not None:
                self.waited(HostSync(what, users_line()))
        if self.drew is not None and _draws(func, args, kwargs):
            self.drew(kwargs.get("generator"))
        if self.fills is not None and func in _FILL_WHAT_THEY_SAVED:
            self.fills()
        if normalizes_batches(func):
            if self.wrote is not None:
                for tensor in updated_statistics(func, args, kwargs):
                    self.wrote(tensor)
        elif self.writing is not None:
            self.writing(tensors(written_by(func, args, kwargs)))
        if self.given is not None:
            self.given(tensors((args, kwargs)))
        if self.reading is not None and reads_memory(func):
            self.reading(tensors((args, kwargs)))
        if self.computes is not None and (body := body_of(func)) is not None:
            self.computes(body)
        is_alone = self.gathers is not None and is_collective(func) and self.gathers()
        result = made_alone(func, args, kwargs) if is_alone else func(*args, **kwargs)
        if func is _aten.mkldnn_rnn_layer.default:
            result = _with_workspace(result, *args)
        if self.made is not None:
            self.made(result, (args, kwargs))
        computes = isinstance(result, Tensor | tuple | list)  # no question, such as for a device
        if self.spent is not None and computes:
            work = seen(func, args, kwargs, result)
            if work.forward or work.backward:
                made = sum(map(size_of, tensors(result))) if work.forward else 0
                self.spent(work, made)
        return result


def _with_workspace(result: tuple[Any, ...], x: Tensor, *given: Any) -> tuple[Any, ...]:
    """Return the result of an LSTM's layer on the CPU, with a workspace also if it is fake.

    The backward reads it, and it is most of what an LSTM keeps, but a fake tensor's is empty.
    oneDNN tells nobody its size: this is fitted to real runs, in which it has the gates of each
    step and, for each step and one more, several copies of the states and of their gradients.
    Above 1 MB it is good to a tenth; below, it is too small, for rounding to pages is left out.
    """
    *outputs, workspace = result
    hidden, is_training = given[9], given[-1]
    if workspace is None or workspace.numel() or not (is_training and torch.is_grad_enabled()):
        return result
    steps, batch, features = x.shape
    wide = max(features, hidden)
    kept = 4 * hidden * steps * batch + (2 * wide + 3 * hidden) * (steps + 1) * batch
    in_float32 = (4 * wide + 2 * hidden) * (steps + 1) * batch
    return *outputs, workspace.new_empty(kept * x.element_size() + in_float32 * 4)


# Autograd saves the noise, and then they fill it: run again, a call may stop in between.
_FILL_WHAT_THEY_SAVED = (_aten.rrelu_with_noise.default, _aten.rrelu_with_noise_.default)

# Arguments that are zero, or off, where an operation that can draw does not.
_DRAWS_UNLESS_ZERO = ("dropout_p", "dropout", "train", "training")


def _draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = arguments_by_name(func, args, kwargs)
    return all(given.get(name, 1) != 0 for name in _DRAWS_UNLESS_ZERO)


def _waits(func: Any, args: tuple[Any, ...], kwargs: Any) -> str | None:
    packet = getattr(func, "overloadpacket", None)
    if packet in _ASKS_HOST:
        return _ASKS_HOST[packet]
    if packet in _INDEXES:
        masks = [t for t in tensors(args[1:2]) if t.dtype in (torch.bool, torch.uint8)]
        return _ASKS_HOST[_aten.nonzero] if masks else None
    if packet is _aten.repeat_interleave and kwargs.get("output_size") is None:
        return "repeat_interleave() without output_size"
    if packet in (_aten._to_copy, _aten.copy_) and not kwargs.get("non_blocking", False):
        source = args[-1] if packet is _aten.copy_ and len(args) > 1 else args[0]
        to = kwargs.get("device") if packet is _aten._to_copy else args[0].device
        if isinstance(source, Tensor) and source.device.type not in ("cpu", "meta"):
            return "a copy to the host" if torch.device(to or "meta").type == "cpu" else None
    return None


@contextmanager
def host_syncs() -> Iterator[list[HostSync]]:
    """Collect the places that make the host wait for a device, in all that runs while this is
    entered.

    A forward that asks for a tensor's value stops the thread that issues work for all stages, until
    the device has come that far. On the CPU nothing waits, but the places are the same: so a
    model can be looked at on a laptop. Each place is told once; what waits in a backward on the CPU
    is told with the line that called for it. It costs time: look, then leave.

    Yields:
        A list of :class:`HostSync`, filled as forwards run, with operation, file and line.

    Example:
        >>> import torch, blockpipe as bp
        >>> class Net(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(x) if x.sum() > 0 else x
        >>> with bp.host_syncs() as found:
        ...     _ = Net(2, 2)(torch.ones(1, 2))
        >>> found[0].operation
        "a tensor's value (item(), bool(), float(), if)"
    """
    found: list[HostSync] = []
    with Meter(None, lambda sync: None if sync in found else found.append(sync)):
        yield found
