"""A forward to record: what it is given, in words, and what may be wrong with it where it fails.

A forward that runs on the whole batch may fail on a micro-batch, so what the split made of the
arguments is said with them. Values are never shown: shapes tell more in less room.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._common.callsite import users_line
from .._common.checks import near_miss
from .._common.nested import leaves, tensors
from .._common.text import dtype_text
from ..batches.microbatch import BatchPart
from ..errors import RecordingError
from ..restoring.held_signals import HeldSignals
from ..restoring.holders import Holder
from ..restoring.model_state import ModelState
from .plain_values.still_code import Hook
from .plan_resolution import Planned
from .watching.late.crossed_memory import CrossedMemory


@dataclass(frozen=True)
class RecordRequest:
    """A forward to record.

    Attributes:
        model: the user's.
        args: the forward's positional arguments.
        kwargs: its keyword arguments.
        planned: stages that override the marks.
        devices: where the stages of a placed model are.
        cut: whether autograd is cut between the stages.
        unhookable: paths of calls that do not run under saved-tensor hooks.
        stand_ins: by the id of each parameter and buffer, the fake one in its place. Code that has
            a parameter in a plain list of its own still finds the real one there.
        hooks: what a backward calls. The fake parameters have none.
        modes: the objects that the user's modes around the forward reach, and handlers of logging.
        loss_fn: what a step calls with the output; ``None``: nothing, or it is not known.
        signals: holds signals back; interrupts are let through between two operations.
        undone: its end puts back what runs of the forward have changed, once more: when what a run
            made goes, finalizers run (``__del__``), and some of it goes only with an error.
        states: what that puts back.
        on_index: is given each value that the forward uses as an index, with the line; ``None``:
            nobody asks.
        crossed: the memory of what has crossed in the first of two runs.
        fakes: whether fake tensors come first.
        beside: functions of the user's that a step has run, and that this forward may not come to:
            each with what it is given and its hop. What they read and set counts.
        failed: the errors of operations that fake tensors have no values for. Code that catches
            one goes where no real tensor leads it.
        turned: the places that its conditions asked and that it set later, by the owner's number.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    planned: Planned | None
    devices: list[torch.device] | None = None
    cut: bool = True
    unhookable: frozenset[str] = frozenset()
    stand_ins: Mapping[int, Tensor] = field(default_factory=dict)
    hooks: Sequence[Hook] = ()
    modes: Sequence[Holder] = ()
    loss_fn: Callable[..., Any] | None = None
    signals: HeldSignals = field(default_factory=HeldSignals)
    undone: ExitStack = field(default_factory=ExitStack)
    states: list[ModelState] = field(default_factory=list)
    on_index: Callable[[Any, str], None] | None = None
    crossed: CrossedMemory = field(default_factory=CrossedMemory)
    fakes: bool = True
    beside: Sequence[tuple[Callable[..., Any], object, int]] = ()
    failed: list[Exception] = field(default_factory=list)
    turned: set[tuple[int, Any]] = field(default_factory=set)


_SHOWN = 8  # of a container's members, or a forward's parameters


def signature(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the arguments of a call as text, tensors by dtype and shape.

    Example:
        >>> import torch
        >>> signature(([torch.zeros(3, 8), torch.zeros(3, 8)],), {"scale": 2.0})
        'list[2 × float32[3, 8]], scale=2.0'
    """
    parts = [_shown(a) for a in args] + [f"{k}={_shown(v)}" for k, v in kwargs.items()]
    return ", ".join(parts)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        members = [_shown(item) for item in value]
        if len(members) > 1 and len(set(members)) == 1 and any(True for _ in tensors(value)):
            return f"{type(value).__name__}[{len(members)} × {members[0]}]"
        begin, end = "[]" if isinstance(value, list) else "()"
        return f"{begin}{_listed(members)}{end}"
    if isinstance(value, Mapping):
        return f"{{{_listed([f'{key!r}: {_shown(item)}' for key, item in value.items()])}}}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        members = [f"{name}={_shown(getattr(value, name))}" for name in fields]
        return f"{type(value).__name__}({_listed(members)})"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(value, Tensor) or (isinstance(shape, tuple) and dtype is not None):
        kind = "" if isinstance(value, Tensor) else f"{type(value).__name__} of "
        return f"{kind}{dtype_text(dtype)}{list(shape or ())}"
    return repr(value)[:40]


def _listed(members: list[str]) -> str:
    return ", ".join(members[:_SHOWN] + ["…"] * (len(members) > _SHOWN))


def check_initialized(model: nn.Module) -> None:
    """Raise :class:`RecordingError` for lazy modules that have no parameters yet."""
    named = [*model.named_parameters(), *model.named_buffers()]
    lazy = [name for name, tensor in named if is_lazy(tensor)]
    if lazy:
        raise RecordingError(
            f"{type(model).__name__} has lazy modules, whose parameters have no shapes before the "
            f"first call: {_listed(lazy)} ({users_line()}); run the plain model once first, on a "
            "small batch"
        )


def what_failed(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], share: BatchPart | None
) -> str:
    """Return ``Net's forward fails on the sample (…)``, and which part of the batch that is.

    Args:
        model: the model whose forward failed.
        args: the positional arguments of that call.
        kwargs: its keyword arguments.
        share: which part of a batch they are, if a batch was split.
    """
    text = f"{type(model).__name__}'s forward fails on the sample ({signature(args, kwargs)})"
    if share is None or share.count == 1:
        return text
    first, *others = [_argument(model, name) for name in share.dims]
    text += (
        f", the first of {share.count} micro-batches ({share.size} of the batch's {share.batch} "
        f"samples): {first} was split on dim {next(iter(share.dims.values()))}"
    )
    if others:
        whole = ", ".join(f"{name!r}: None" for name in list(share.dims)[1:])
        them = "it" if len(others) == 1 else "them"
        text += f", {_listed(others)} too (batch_dims={{{whole}}} gives {them} whole)"
    return text


def _argument(model: nn.Module, name: int | str) -> str:
    parameters = _parameters(model)
    if isinstance(name, str):
        return name
    return parameters[name] if name < len(parameters) else f"argument {name}"


def taken_by(model: nn.Module) -> str:
    """Return the names of what a forward takes, for a message: ``(input)``."""
    return f"({_listed(_parameters(model))})"


def _parameters(model: nn.Module) -> list[str]:
    """Return the names of a forward's parameters; none where Python cannot tell."""
    try:
        found = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in found if p.kind is not p.VAR_POSITIONAL and p.kind is not p.VAR_KEYWORD]


def remedy(
    error: Exception,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    share: BatchPart | None,
) -> str:
    """Return what to do about a forward that failed; the arguments are those of
    :func:`what_failed`."""
    if "on the same device" in str(error):
        return (
            "a device that the forward names itself (x.to('cuda:0')) is none of Blockpipe's "
            "business: leave the move out, for tensors follow the stages, or write x.device"
        )
    if "update to inference tensor" in str(error):
        return (
            "a forward that needs the values of its tensors is recorded outside of inference mode: "
            "call the pipeline under torch.no_grad() instead of torch.inference_mode()"
        )
    is_split = share is not None and share.count > 1
    if is_split and "Expected more than 1 value per channel" in str(error):
        assert share is not None
        return (
            "batch norm in training needs several values of each channel in a micro-batch: pass "
            f"fewer chunks (chunks={max(share.batch // 2, 1)} or less for this batch)"
        )
    if not fits(model, args, kwargs):
        takes = f"its forward takes {taken_by(model)}"
        if not args and not kwargs:
            return f"{takes}: pass a sample of that"
        if len(args) > 1 and _is_shape(args):
            return f"{takes}; pass tensors, not their shapes: torch.zeros{tuple(args)}"
        parameters = _parameters(model)
        unknown = [name for name in kwargs if name not in parameters]
        meant = _meant(unknown[0], parameters) if unknown else None
        if meant is not None:
            return f"{takes}; {meant}"
        if share is not None and len(args) > 1:
            return f"{takes}; pass what a loss_fn compares the output with by name: target=…"
        return takes
    shape = next((a for a in args if _is_shape(a)), None)
    if shape is not None and not any(True for _ in tensors((args, kwargs))):
        return f"pass tensors, not their shapes: torch.zeros{tuple(shape)}"
    if is_split:
        return "if the forward runs on the whole batch, look at how its arguments were split"
    return "pass what the forward takes"


_TARGET = "pass what a loss_fn compares the output with as target=… of forward_backward"
_LOSS_FN = "pass the loss as loss_fn=… of forward_backward"
_MEANT = {
    **dict.fromkeys(("y", "label", "labels", "targets", "target"), _TARGET),
    **dict.fromkeys(("criterion", "loss", "loss_func", "loss_function", "loss_fn"), _LOSS_FN),
    "input_size": "pass tensors, not their shapes: torch.zeros(…)",
}
"""What a keyword argument that a forward does not take may be meant to be, by its name."""
# Those that methods of a pipeline take, and do not hand on to the model.
_OWN = [
    *("return_outputs", "model_kwargs", "depth", "columns", "optimizer", "limit", "rtol", "atol"),
    *("device", "whole", "candidates", "schedules", "repeats"),
]


def _meant(name: str, parameters: Sequence[str]) -> str | None:
    """What a keyword argument was meant to be that a forward does not take, if there is a guess."""
    near = near_miss(name, [*parameters, *_OWN])
    return _MEANT.get(name) if near is None else f"did you mean {near!r}?"


def fits(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a forward takes so many arguments, of these names."""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # it has none that Python could tell
        pass
    return True


def _is_shape(value: Any) -> bool:
    numbers = list(leaves(value)) if isinstance(value, tuple | list) else []
    return bool(numbers) and all(isinstance(n, int) for n in numbers)
