"""``batch_dims``: the dim of each argument on which it is split."""

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, MethodType
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch import nn

from .._common.callsite import users_line
from .._common.checks import expected
from ..errors import MicrobatchError


@dataclass(frozen=True)
class PartlyWhole:
    """How a nested argument of a share is split: some of its tensors are not.

    Attributes:
        dim: the dim on which the others are split.
        whole: the numbers, among the argument's tensors, of those that go whole.
    """

    dim: int
    whole: frozenset[int]


class Role(Enum):
    """What has samples besides the arguments of the forward; an argument may have the same name."""

    TARGET = "target"  # of the loss
    OUTPUT = "output"

    def __repr__(self) -> str:
        return repr(self.value)


Name = int | str | Role  # of an argument: its position or name
BatchDim = int | Literal["list"] | PartlyWhole | None
BatchDims = int | Mapping[Name, BatchDim] | None

_ROLES = {role.value: role for role in Role}


class CallDims(dict[Name, BatchDim]):
    """``batch_dims`` of one call, by the positions and names with which it passes its arguments."""


WHOLE: Any = object()  # the dim of an argument that every micro-batch gets whole


class ArgumentDims:
    """``batch_dims``, asked argument by argument.

    Args:
        dims: the user's value; see :func:`blockpipe.batches.microbatch.split`.
        keywords: the names of the call's keyword arguments.
    """

    def __init__(self, dims: BatchDims, keywords: Collection[str] = ()) -> None:
        self._named = None
        if isinstance(dims, Mapping):
            roles = {name: role for name, role in _ROLES.items() if name not in keywords}
            dims = self._named = {_role_or_name(name, roles): dim for name, dim in dims.items()}
        self._dims = dims
        self.is_default = dims is None

    def check_names(self, names: Collection[Name]) -> None:
        """Raise :class:`MicrobatchError` if a mapping names no argument of the call."""
        if self._named is None:
            return
        unknown = [name for name in self._named if name not in {*names, *Role}]
        if unknown:
            contract = f"positions and names among {[*names, *Role]}"
            fix = "use those of this call's arguments"
            raise MicrobatchError(expected(contract, unknown, for_="batch_dims", fix=fix))

    def of(self, name: Name) -> Any:
        """Return an argument's dim, ``"list"``, a :class:`PartlyWhole`, or :data:`WHOLE`."""
        if self._dims is None:
            return 0
        if isinstance(self._dims, int):
            return self._dims
        dim = self._dims.get(name, 0)
        return WHOLE if dim is None else dim

    def names(self, name: Name) -> bool:
        """Return whether a mapping names an argument."""
        return self._named is not None and name in self._named

    def asks_for(self, name: Name) -> bool:
        """Return whether the user has said how an argument is split."""
        return isinstance(self._dims, int) or self.names(name)


def _role_or_name(name: Name, roles: Mapping[str, Role]) -> Name:
    return roles.get(name, name) if isinstance(name, str) else name


def output_of(dims: Mapping[Name, BatchDim]) -> BatchDim:
    """Return how a mapping joins the outputs; 0 if it does not say."""
    return dims.get(Role.OUTPUT, dims.get("output", 0))


def dims_of_call(
    model: nn.Module,
    dims: BatchDims,
    args: Sequence[Any],
    given: Collection[str],
    target: Any = None,
) -> BatchDims:
    """Return ``batch_dims`` for one call, with the positions and names of its arguments.

    The user may name a parameter by position or by name, however it is passed, and may name one
    that this call leaves out.

    Args:
        model: the model that is called.
        dims: the user's ``batch_dims``.
        args: the positional arguments of the call.
        given: the names of its keyword arguments.
        target: the loss's target.

    Raises:
        MicrobatchError: a name may be that of an argument, or of the target or the output.
    """
    if isinstance(dims, CallDims) or not isinstance(dims, Mapping):
        return dims
    parameters = _parameters_of(model.forward)
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, p in parameters.items() if p.kind in by_position]
    found: dict[Name, BatchDim] = {}
    for name, dim in dims.items():
        position = names.index(name) if isinstance(name, str) and name in names else name
        passed_as = position if isinstance(position, int) and position < len(args) else name
        if isinstance(name, int) and len(args) <= name < len(names):
            passed_as = names[name]
        is_passed = isinstance(passed_as, int) or passed_as in given
        role = _ROLES.get(name) if isinstance(name, str) else None
        if role is not None and not is_passed:
            found[role] = dim
        elif role is not None and (role is Role.OUTPUT or target is not None):
            if position not in dims or position == name:
                _refuse_double(role, position)
            found[role] = dim  # for the position names the argument
        elif is_passed or passed_as not in parameters:
            found[passed_as] = dim
    return found


def _refuse_double(role: Role, position: Name) -> None:
    """Refuse a name in ``batch_dims`` that two things of one call have."""
    other = "the target of the loss" if role is Role.TARGET else "the output"
    fix = (
        f"name the argument by its position as well: {{{position}: …, {role!r}: …}}"
        if isinstance(position, int)
        else "give the argument a position in the forward, or another name"
    )
    raise MicrobatchError(
        f"batch_dims names {role!r}, which may be the argument of the forward or {other} "
        f"({users_line()}); {fix}"
    )


_parameters: WeakKeyDictionary[Any, Mapping[str, inspect.Parameter]] = WeakKeyDictionary()


def _parameters_of(forward: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a forward. A method's are found once: that takes long beside the
    rest of a call, and they are the same for all modules of its class."""
    method = getattr(forward, "__func__", None)
    if not isinstance(forward, MethodType) or not isinstance(method, FunctionType):
        return inspect.signature(forward).parameters
    found = _parameters.get(method)
    if found is None:
        found = _parameters[method] = inspect.signature(forward).parameters
    return found


def has_batch(shape: Sequence[int], size: int, dim: int) -> bool:
    """Return whether a tensor's shape has an entry for each of ``size`` samples on a dim."""
    return has_dim(shape, dim) and shape[dim] == size


def has_dim(shape: Sequence[int], dim: int) -> bool:
    """Return whether a shape has a dim, which may be counted from the last one."""
    return -len(shape) <= dim < len(shape)
