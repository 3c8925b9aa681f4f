"""The tensors that one access of the user's code reads or writes, by its source.

An expression may lead to a tensor through views, ``.data``, methods in place, variables that name
one, and loops. Writes are methods and functions whose names end in an underscore, ``out=``,
``inplace=True``, assignments to a part, and calls of modules that keep statistics.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...._common.threads.thread_state import ours
from ...._torch.modules import buffers_of, children_of, parameters_of, within
from ...._torch.tensors import is_view, storage_of
from ..arrays import is_array
from ..evaluation.expressions import Frame, members_of
from ..evaluation.members import UNKNOWN
from ..evaluation.targets import bound_by
from ..places import is_looked_into
from ..syntax.accesses import Access, assignments_of, loops_by_name
from ..syntax.contents import alternatives
from ..syntax.effects import ASKS_SHAPE, CHECKPOINTS, name_called, writes_in_place
from ..syntax.uses import Use

CONTENT, GRADIENT = "content", "grad"

_PARTS = frozenset(["data", "T", "mT", "H", "mH", "real", "imag"])
_VIEWS = frozenset(  # methods whose result may have the tensor's memory
    [
        *("detach", "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel"),
        *("t", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "squeeze"),
        *("unsqueeze", "expand", "expand_as", "narrow", "select", "diagonal", "unfold", "unbind"),
        *("chunk", "split", "tensor_split", "as_strided", "contiguous", "to", "type_as"),
    ]
)
_NORMS = ("batch_norm", "instance_norm")
_STATISTICS = ("running_mean", "running_var")
_MODES = ("training", "use_input_stats")  # of these functions, as arguments: the sixth by position


class TensorUse(NamedTuple):
    """What an access does with one tensor.

    Attributes:
        tensor: the tensor; an array as a tensor of its memory.
        key: ``CONTENT``, or ``GRADIENT`` for its ``.grad``.
        reads: whether it reads that.
        writes: whether it writes to it.
    """

    tensor: Tensor
    key: str
    reads: bool
    writes: bool


def _any(tensor: Tensor) -> bool:
    return True


def uses_of(
    access: Access, frame: Frame, lasts: Callable[[Tensor], bool] = _any
) -> Iterator[TensorUse]:
    """Yield what an access does with tensors.

    Args:
        access: the access.
        frame: the frame that it is in, which may be over, or never run.
        lasts: says whether a tensor outlives the forward; others are left out.
    """
    node = access.node
    found = _Found(frame, lasts)
    if isinstance(node, ast.Call):
        yield from _by_call(node, found)
    key = CONTENT
    if isinstance(node, ast.Attribute) and node.attr == "grad":
        node, key = node.value, GRADIENT
    elif access.writes and not access.counts:  # else the name gets another tensor
        match node:
            case ast.Subscript(value=value):
                node = value
            case ast.Attribute(value=value, attr=name) if name in _PARTS:
                node = value
            case ast.Attribute(value=value, attr=name):
                yield from (
                    TensorUse(tensor, key, reads=False, writes=True)
                    for tensor in _parametrized(frame.evaluated(value), name)
                    if lasts(tensor)
                )
                return
            case _:
                return
    writes = access.writes or access.use.changes
    reads = access.counts or (
        access.reads and access.use in (Use.READ, Use.BOTH) and not _asks_shape(access)
    )
    # Whether there is one is a question to it as well, and a variable may be asked.
    reads = reads or (key == GRADIENT and not writes)
    if reads or writes:
        yield from (TensorUse(tensor, key, reads, writes) for tensor in found.behind(node))


def _parametrized(owner: Any, name: str) -> Iterator[Tensor]:
    """Yield the tensors that torch computes an attribute from, and writes to where it is set."""
    lists = children_of(owner).get("parametrizations") if isinstance(owner, nn.Module) else None
    by_name = children_of(lists) if isinstance(lists, nn.Module) else {}
    if (held := by_name.get(name)) is not None:
        for module in within(held):
            tensors = (*parameters_of(module).values(), *buffers_of(module).values())
            yield from (tensor for tensor in tensors if tensor is not None)


def _asks_shape(access: Access) -> bool:
    """Whether code asks for no value of what it reads."""
    given_to = access.given_to
    return access.method in ASKS_SHAPE or (
        isinstance(given_to, ast.Name) and given_to.id in ASKS_SHAPE
    )


def _by_call(node: ast.Call, found: _Found) -> Iterator[TensorUse]:
    """Yield what a call of a library's function or module does, into which nobody looks."""
    function = found.frame.evaluated(node.func)
    if function is UNKNOWN or isinstance(function, Tensor) or is_looked_into(function):
        return
    name, keywords = name_called(node), {one.arg: one.value for one in node.keywords}
    inplace = keywords.get("inplace", ast.Constant(getattr(function, "inplace", False)))
    written = list[ast.expr]()
    if name == "forward":  # of a module's class: ``super().forward(x)``
        first = found.frame.evaluated(node.args[0]) if node.args else None
        function = getattr(function, "__self__", first)
    if isinstance(function, nn.Module):
        yield from _by_module(function, found)
    elif name in _NORMS:
        by_position = node.args[3:5] if function is torch.batch_norm else node.args[1:3]
        written = [*by_position, *(keywords[n] for n in _STATISTICS if n in keywords)]
    elif writes_in_place(name):
        written = node.args[:1]
    if found.frame.evaluated(inplace) is True:
        written = node.args[:1]
    for one in written:
        for tensor in found.behind(one):
            yield TensorUse(tensor, CONTENT, reads=True, writes=True)
    for one in node.args if name in CHECKPOINTS else ():  # ``checkpoint(self.norm, h)``
        handed_on = found.frame.evaluated(one)
        if isinstance(handed_on, nn.Module) and not is_looked_into(handed_on):
            yield from _by_module(handed_on, found)


def _by_module(root: nn.Module, found: _Found) -> Iterator[TensorUse]:
    """Yield what a call of a library's module does with its tensors."""
    for module in within(root):
        for tensor in (*parameters_of(module).values(), *buffers_of(module).values()):
            if tensor is not None and found.lasts(tensor):
                yield TensorUse(tensor, CONTENT, reads=True, writes=_updates(module, tensor))


def mode_of_norm(node: ast.expr) -> ast.expr | None:
    """Return what says in a call whether a normalization learns; ``None``: it is no such call."""
    if not isinstance(node, ast.Call) or name_called(node) not in _NORMS:
        return None
    by_name = [one.value for one in node.keywords if one.arg in _MODES]
    return next(iter([*by_name, *node.args[5:6]]), None)


def _updates(module: nn.Module, tensor: Tensor) -> bool:
    """Whether a call of a module writes to one of its tensors."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return module.max_norm is not None
    return module.training and any(tensor is one for one in statistics_of(module))


def statistics_of(module: nn.Module) -> list[Tensor]:
    """Return the buffers that a module of torch's updates in training."""
    has_some = getattr(module, "track_running_stats", False)
    has_some = has_some or type(module).__name__ == "_SpectralNorm"
    return [one for one in buffers_of(module).values() if one is not None and has_some]


class _Found:
    """Finds tensors in one frame.

    Args:
        frame: the frame.
        lasts: says whether a tensor outlives the forward.
    """

    def __init__(self, frame: Frame, lasts: Callable[[Tensor], bool]) -> None:
        self.frame, self.lasts = frame, lasts
        self._seen: set[str] = set()  # variables that are being looked at

    def behind(self, node: ast.expr) -> list[Tensor]:
        """Return the tensors of which an expression gives one, or a part, or several in a list."""
        value = self.frame.evaluated(node)
        own, inner = self._among(value), list[ast.expr]()
        if isinstance(node, ast.Name):
            return [*own, *self._turned(node.id)] or self._set_to(node, value)
        if own:
            return own
        match node:
            case ast.Attribute(value=value, attr=name) if name in _PARTS:
                inner = [value]
            case ast.Subscript(value=value):
                inner = [value]
            case ast.Call(func=ast.Attribute(value=value, attr=name)):
                inner = [value] if name in _VIEWS or writes_in_place(name) else []
            case ast.List(elts=members) | ast.Tuple(elts=members):
                inner = members
            case ast.IfExp() | ast.BoolOp() | ast.NamedExpr():
                inner = [*alternatives(node)]
        return [tensor for one in inner for tensor in self.behind(one)]

    def _among(self, value: Any) -> list[Tensor]:
        """Return the tensors that a value is, or is a view of, if they last."""
        if is_array(value) and value.flags.writeable:
            with contextlib.suppress(TypeError, ValueError):  # texts, objects, strides below zero
                value = torch.from_numpy(value)
        if not isinstance(value, Tensor):
            return []
        with ours():  # no mode is asked
            base = value._base if is_view(value) else None
        return next(([t] for t in (value, base) if t is not None and self.lasts(t)), [])

    def _turned(self, name: str) -> Iterator[Tensor]:
        """Yield what a variable names in the turns of the loops that set it."""
        for target, over in loops_by_name(self.frame.code).get(name, ()):
            members = members_of(self.frame, over)
            for member in () if members is UNKNOWN else members:
                for own, value in bound_by(target, member):
                    yield from self._among(value) if own == name else ()

    def _set_to(self, node: ast.Name, value: Any) -> list[Tensor]:
        """Return what a local variable was set to last, in the order of lines. If it names a tensor
        now, which the forward has made, only what has the memory of that counts (``.data``)."""
        own = (at for name, at in assignments_of(self.frame.code) if name == node.id)
        before = [at for at in own if at.lineno <= node.lineno]
        if not before or node.id in self._seen:
            return []
        self._seen.add(node.id)
        found = [tensor for one in alternatives(before[-1]) for tensor in self.behind(one)]
        self._seen.discard(node.id)
        if not isinstance(value, Tensor):
            return found
        with ours():  # no mode is asked
            return [tensor for tensor in found if storage_of(tensor) == storage_of(value)]
