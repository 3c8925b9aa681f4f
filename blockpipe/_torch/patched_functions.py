"""torch's functions, where somebody has put another one in the place of one.

torch looks a function up by its name to hand it to a function mode. If a user's wrapper is there
(``F.softmax = scaled``), the mode is given the wrapper, which has called torch's function already:
to call it once more applies it twice.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

_OF_C = frozenset(
    [
        *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
        *(types.MethodWrapperType, types.ClassMethodDescriptorType, types.GetSetDescriptorType),
    ]
)
_OF_PYTHON = (types.FunctionType, types.MethodType, functools.partial)
_OPERATORS = torch._ops.OperatorBase  # objects, as torch.cond's
_BASE = torch._C.TensorBase  # has the methods that Tensor does not have itself
_PACKAGE = __name__.partition(".")[0]
_SPACES = (torch, torch.functional, torch.nn.functional, torch.nn.init, Tensor)
_MODULES = (*_SPACES[:-1], torch._tensor, torch._jit_internal)
_FILES = frozenset(module.__file__ for module in _MODULES)


def _is_own(function: Any) -> bool:
    """Return whether something is a function of torch's, and no wrapper around one."""
    return isinstance(function, types.FunctionType) and function.__code__.co_filename in _FILES


# As they are when this is imported; kept, so that no other object has the id of one.
_own: dict[int, types.FunctionType] = {
    id(each): each for space in _SPACES for each in vars(space).values() if _is_own(each)
}
_by_code = {each.__code__: each for each in _own.values()}


def in_place_of_torchs() -> Iterator[Callable[..., Any]]:
    """Yield the functions that somebody has put in the place of torch's."""
    for space in _SPACES:
        for member in [*vars(space).values()]:  # another thread may set some
            if isinstance(member, _OF_PYTHON) and id(member) not in _own:
                names = getattr(member, "__globals__", {})
                if not f"{names.get('__name__')}.".startswith("torch."):
                    yield member


def torchs_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function to call for what a function mode is given.

    Args:
        function: what the mode is given, which asks this in its ``__torch_function__`` itself.

    Returns:
        The same, or torch's own if something else is in its place.
    """
    if type(function) in _OF_C or id(function) in _own or isinstance(function, _OPERATORS):
        return function
    if str(getattr(function, "__module__", "")).partition(".")[0] == _PACKAGE:
        return function
    caller = sys._getframe(2)
    if caller.f_code is not handle_torch_function.__code__:
        return _method_behind(function)
    if caller.f_back is None or caller.f_back.f_code is getattr(function, "__code__", None):
        return function
    code, names = caller.f_back.f_code, caller.f_back.f_globals
    if code in _by_code:
        return _by_code[code]
    return function if code.co_freevars else types.FunctionType(code, names)


def _method_behind(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of C in whose place a function is."""
    for name, member in [*vars(Tensor).items()]:
        if member is function and hasattr(_BASE, name):
            method: Callable[..., Any] = inspect.getattr_static(_BASE, name)
            return method
    return function
