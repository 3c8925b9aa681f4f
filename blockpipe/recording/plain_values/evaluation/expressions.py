"""Evaluate the user's expressions in a running frame without running any of the user's code.

So no property, no ``__getattr__`` and no function is called.
"""

import ast
import builtins
import copy
import functools
import logging
import os
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ...._common.imports import module_named
from ...._common.libraries import poses
from ...._torch.modules import FOUND_BY, children_of
from ....restoring.holders import CacheHolder
from ..syntax.accesses import Access
from ..syntax.computed import computed
from ..syntax.contents import NOT_MADE, made_of
from ..syntax.nodes import ImportedModule
from ..syntax.protocols import is_descriptor
from .getters import found_by, gives_known
from .members import (
    ALL,
    NEEDS_GRADIENT,
    UNKNOWN,
    WHOLE,
    Names,
    attribute_in,
    is_one_of,
    makes_new,
    member_of,
    own_attributes,
)

_PLAIN = (bool, int, float, str, bytes, type(None), tuple)
_TORCHS = frozenset(vars(nn.Module())) - {"training"}  # attributes of every module
_WALKS = frozenset(
    [
        *("parameters", "named_parameters", "buffers", "named_buffers"),
        *("modules", "named_modules", "children", "named_children"),
    ]
)
_TELL_NOTHING = (type, types.FunctionType, types.ModuleType)  # of what is set in them
_FINDERS = {"__getattr__": nn.Module.__getattr__, "__getattribute__": object.__getattribute__}
_MEMBERS = ("keys", "values", "items")
_WALKERS = [vars(nn.Module)[name] for name in _WALKS]
_WALKERS += [vars(nn.ModuleDict)[name] for name in _MEMBERS]
_IN_C = (
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType),
    types.BuiltinFunctionType,
)
_NO_STATE = (
    *(types.ModuleType, types.FunctionType, types.MethodType, *_IN_C),
    *(type, property, classmethod, staticmethod, nn.Module, Tensor),
)


class Frame:
    """A running frame of the user's code.

    Args:
        frame: the frame.
        functions: the user's functions by the id of their code, to look into their closures.
        returned: the code that returned to the frame last, and its result.

    Attributes:
        kept: the evaluated values that a ``functools.lru_cache`` keeps, and loggers.
    """

    def __init__(
        self,
        frame: types.FrameType,
        functions: Mapping[int, Sequence[types.FunctionType]],
        returned: tuple[types.CodeType, Any] | None,
    ) -> None:
        self.code, self.line = frame.f_code, f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self.frame: Any = frame  # or a still one
        self._functions, self._returned = functions, returned
        self.kept: list[Any] = []
        self._values: dict[ast.expr, Any] = {}  # nothing runs meanwhile
        self.is_running = isinstance(frame, types.FrameType)

    def line_of(self, node: ast.expr) -> str:
        """Return the line that an expression is on, wherever the frame is."""
        return f"{self.code.co_filename}:{node.lineno}"

    def evaluated(self, node: ast.expr) -> Any:
        """Return the value of an expression; ``UNKNOWN`` if code would have to run for it."""
        if node not in self._values:
            found = self._evaluated(node)
            # What a proxy answers, its object answers.
            is_proxy = type(found) in weakref.ProxyTypes
            found = UNKNOWN if poses(found) else found
            self._values[node] = found.__repr__.__self__ if is_proxy else found
        return self._values[node]

    def _evaluated(self, node: ast.expr) -> Any:
        match node:
            case ImportedModule():
                found = module_named(str(node.value), self.frame.f_globals)
                return UNKNOWN if found is None else found
            case ast.Constant():
                return node.value
            case ast.Name():
                for names in (self.frame.f_locals, self.frame.f_globals, vars(builtins)):
                    is_inner = self._is_local(node.id) or node.id in self.code.co_freevars
                    if names is not self.frame.f_locals and is_inner:
                        break  # it is not set yet, or not known
                    if node.id in names:
                        return names[node.id]
                return UNKNOWN if self.is_running else self.frame.function_named(node.id)
            case ast.Lambda():
                return UNKNOWN if self.is_running else self.frame.function_of(node)
            case ast.Attribute():
                found = attribute_in(self.evaluated(node.value), node.attr)
                if isinstance(found, property):
                    return self._of_property(found, node)
                return UNKNOWN if is_descriptor(found) else found
            case ast.Subscript():
                found = member_of(self.evaluated(node.value), self.key(node.slice))
                if found is not UNKNOWN:
                    return found
                if not self.is_running and not isinstance(node.slice, ast.Slice):
                    found = self.frame.entry_of(*map(self.evaluated, (node.value, node.slice)))
                    if found is not UNKNOWN:
                        return found
            case ast.NamedExpr():
                if (found := self.evaluated(node.target)) is not UNKNOWN:
                    return found  # it is set already
            case ast.Call():
                if (found := self._called(node)) is not UNKNOWN:
                    return found
        if (found := computed(node, self.evaluated)) is not NOT_MADE:
            return found
        found = made_of(node, self.evaluated)
        return UNKNOWN if found is NOT_MADE else found

    def key(self, node: ast.expr) -> Any:
        """Return the value of an expression as a key; ``UNKNOWN`` if a part of it is not known."""
        found = self.evaluated(node)
        is_part_known = not isinstance(found, tuple) or all(part is not UNKNOWN for part in found)
        return found if is_part_known and not isinstance(found, list | dict) else UNKNOWN

    def bound(self, node: ast.expr) -> Any:
        """The value of an expression; a function of a class comes as the method that it is."""
        match node:
            case ast.Call(func=ast.Name("getattr"), args=[held, asked, *_]):
                name = self.evaluated(asked)
                if isinstance(name, str):
                    node = ast.Attribute(held, name)
        if not isinstance(node, ast.Attribute):
            return self.evaluated(node)
        found, owner, has_it = self._of_super(node)
        if found is UNKNOWN:
            found, owner = self.evaluated(node), self.evaluated(node.value)
        if isinstance(found, classmethod | types.ClassMethodDescriptorType):  # of Python, or of C
            return found.__get__(None, owner if isinstance(owner, type) else type(owner))
        if isinstance(found, staticmethod):
            return found.__func__
        if isinstance(found, functools._lru_cache_wrapper):
            found = found.__wrapped__ if own_attributes(owner).get(node.attr) is None else found
        is_method = isinstance(found, types.FunctionType) and (
            not isinstance(owner, type | types.ModuleType)
            and (has_it is not UNKNOWN or node.attr not in own_attributes(owner))
        )
        return types.MethodType(found, owner) if is_method else found

    def _of_super(self, node: ast.Attribute) -> tuple[Any, Any, Any]:
        """Return what ``super()`` finds, the object that it is asked for, and the class that has
        it."""
        call = node.value
        if not (isinstance(call, ast.Call) and getattr(call.func, "id", "") == "super"):
            return UNKNOWN, UNKNOWN, UNKNOWN
        first = ast.Name(self.code.co_varnames[0]) if self.code.co_varnames else call.func
        nodes = call.args if len(call.args) == 2 else [ast.Name("__class__"), first]
        kind, owner = map(self.evaluated, nodes)
        mro = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
        bases = mro[mro.index(kind) + 1 :] if kind in mro else ()
        has_it = next((base for base in bases if node.attr in vars(base)), None)
        return (
            (UNKNOWN, owner, UNKNOWN)
            if has_it is None
            else (vars(has_it)[node.attr], owner, has_it)
        )

    def _called(self, node: ast.Call) -> Any:
        function = self.evaluated(node.func)
        if isinstance(function, weakref.ref):
            return function()
        if isinstance(function, functools._lru_cache_wrapper):
            held = [value for _, value in CacheHolder(function, restores=False).now()]
            kept = [v for v in held if _may_change(v) and v is not vars(function)]
            self.kept += kept
            return kept[0] if len(kept) == 1 else UNKNOWN
        if isinstance(node.func, ast.Attribute) and node.func.attr in _FINDERS and node.args:
            of_super, owner, _ = self._of_super(node.func)
            if is_one_of(of_super, _FINDERS.values()):
                return attribute_in(owner, self.evaluated(node.args[0]))
        if function is globals:
            return self.frame.f_globals
        if function is logging.getLogger:
            return self._logger(*map(self.evaluated, node.args))
        if is_walker(function):
            return members_of(self, node)
        if function is dict and len(node.args) == 1 and not node.keywords:
            found = self.evaluated(node.args[0])
            return dict(found) if type(found) is list else found
        if is_one_of(function, (copy.copy, copy.deepcopy)) and len(node.args) == 1:
            return self.evaluated(node.args[0])  # what is read of a copy, is read of the original
        if is_one_of(function, (type, vars, getattr)) and node.args:
            args = [*map(self.evaluated, node.args)]
            made = node.args[0] if function is type and args[0] is UNKNOWN else None
            if isinstance(made, ast.Call):  # ``type(Options())``
                kind = self.evaluated(made.func)
                return kind if isinstance(kind, type) else UNKNOWN
            if any(one is UNKNOWN for one in args[:2]) or (function is type and len(args) > 1):
                return UNKNOWN
            if function is type:
                return type(args[0])
            return attribute_in(args[0], "__dict__" if function is vars else args[1])
        if gives_known(function):
            return found_by(function, [*map(self.evaluated, node.args)])
        if function is id and node.args:
            found = self.evaluated(node.args[0])
            return UNKNOWN if found is UNKNOWN else id(found)
        is_method = isinstance(function, types.FunctionType) and not node.keywords
        find = FOUND_BY.get(function) if is_method else None
        if find is not None and isinstance(node.func, ast.Attribute):
            return find(*map(self.evaluated, (node.func.value, *node.args)))
        if not self.is_running:
            return self.frame.given_by(self.bound(node.func), node, self)
        return self._given(function)

    def _logger(self, name: Any = logging.root.name) -> Any:
        """Return a logger that is there. It lasts, though nothing of the model's may lead to it."""
        loggers: dict[Any, Any] = {None: logging.root, logging.root.name: logging.root}
        loggers |= logging.root.manager.loggerDict
        found = loggers.get(name) if isinstance(name, str | None) else None
        self.kept += [found] if isinstance(found, logging.Logger) else []
        return UNKNOWN if found is None else found

    def _of_property(self, found: property, node: ast.Attribute) -> Any:
        if self.is_running:
            return self._given(found.fget)
        return self.frame.of_property(found, self.evaluated(node.value))

    def given_by(self, node: ast.expr) -> Any:
        """Return what a call gives that is about to run: of what is there already, or of what a
        ``functools.lru_cache`` keeps; ``UNKNOWN`` for one of a user's function, whose own code is
        traced."""
        function = self.bound(node.func) if isinstance(node, ast.Call) else UNKNOWN
        is_traced = isinstance(function, types.FunctionType | types.MethodType)
        return UNKNOWN if is_traced and function is not logging.getLogger else self.evaluated(node)

    def _given(self, function: Any) -> Any:
        """Return the value that a user's function, or a module's forward, has just returned."""
        if isinstance(function, nn.Module):
            function = type(function).forward  # the recording puts its own in front of it
        elif isinstance(function, staticmethod | classmethod):
            function = function.__func__
        code = getattr(function, "__code__", None)
        if self._returned is None or code is not self._returned[0]:
            return UNKNOWN
        return self._returned[1]

    def owner_of(self, access: Access) -> tuple[Any, Any, Any]:
        """Return the object that holds an access's value, the value's key in it, and the value."""
        node = access.node
        if access.writes and (replaced := self.place_of(access))[1] in WHOLE:
            return replaced[0], ALL, UNKNOWN
        if isinstance(node, ast.Name):
            return self._owner_of_name(node.id, self.evaluated(node))
        if isinstance(node, ast.Attribute):
            owner, key = self.evaluated(node.value), node.attr
            owner = self._of_super(node)[2] if owner is UNKNOWN else owner
            if owner is UNKNOWN and isinstance(node.value, ast.Call):
                made = self.evaluated(node.value.func)  # by its class: ``Options().scale``
                owner = made if isinstance(made, type) and makes_new(made) else UNKNOWN
        elif isinstance(node, ast.Subscript):
            if access.writes and getattr(node.value, "attr", "") == "__kwdefaults__":
                return self.evaluated(node.value.value), ALL, UNKNOWN  # type: ignore[attr-defined]
            owner, key = self.evaluated(node.value), self.key(node.slice)
            is_entry = not isinstance(owner, type) and owner is not UNKNOWN
            key = key if isinstance(owner, Mapping) else ALL
            if key is UNKNOWN and isinstance(owner, dict) and access.reads and self.is_running:
                key = ALL  # it may be any
            owner = Names(owner) if owner is self.frame.f_globals else owner
            is_set = access.writes or key is not ALL
            value = member_of(owner, key) if is_set else self.evaluated(node)
            return (owner if is_entry else None), key, value
        elif isinstance(node, ast.Call):
            function = self.evaluated(node.func)
            if function is vars or access.is_call:
                return None, None, self.evaluated(node)
            if is_one_of(function, (os.getenv, os.getenvb)):
                key = self.evaluated(node.args[0])
                return os.environ, os.fsdecode(key) if isinstance(key, bytes) else key, UNKNOWN
            owner, key = self._asked_by_name(node)
            key = ALL if key is UNKNOWN and self._may_be_any(access) else key
            if access.writes and isinstance(owner, _TELL_NOTHING) and not _is_constant(key, node):
                owner = Names(vars(owner)) if isinstance(owner, types.ModuleType) else owner
                return owner, ALL, UNKNOWN
        else:
            return None, None, self.evaluated(node)
        value = attribute_in(owner, key)
        if isinstance(value, property):
            return None, None, self._given(value.fget)
        if owner is UNKNOWN or key is UNKNOWN or _is_tensors(owner, key):
            return None, None, value
        if isinstance(owner, types.ModuleType):
            owner = Names(vars(owner))
        if isinstance(owner, nn.Module) and key in _TORCHS:
            return None, None, value
        return (None, None, value) if _is_method_in_c(owner, key, value) else (owner, key, value)

    def place_of(self, access: Access) -> tuple[Any, Any]:
        """Return the object in which an access sets something, and the key, whatever the value is:
        code too."""
        node = access.node
        if isinstance(node, ast.Name):
            is_global = node.id not in self.code.co_freevars and not self._is_local(node.id)
            return Names(self.frame.f_globals) if is_global else UNKNOWN, node.id
        if isinstance(node, ast.Attribute):
            return self.evaluated(node.value), node.attr
        if isinstance(node, ast.Subscript):
            owner = self.evaluated(node.value)
            key = self.key(node.slice) if owner is self.frame.f_globals else ALL
            return owner if key is ALL else Names(owner), key
        return self._asked_by_name(node) if isinstance(node, ast.Call) else (UNKNOWN, UNKNOWN)

    def _may_be_any(self, access: Access) -> bool:
        """Whether a name that is not known may be any: where the code runs, or ``dir()`` lists
        them."""
        return access.reads and (self.is_running or dir.__name__ in self.code.co_names)

    def _owner_of_name(self, name: str, value: Any) -> tuple[Any, Any, Any]:
        if name in self.code.co_freevars:
            return self._cell(name, value), name, value
        if self._is_local(name) or (
            name in self.frame.f_locals and self.frame.f_locals is not self.frame.f_globals
        ):
            return None, None, value
        return Names(self.frame.f_globals), name, value

    def _is_local(self, name: str) -> bool:
        return name in self.code.co_varnames or name in self.code.co_cellvars

    def _asked_by_name(self, node: ast.Call) -> tuple[Any, Any]:
        """Evaluate ``getattr`` and ``setattr``, and the methods of an object or class for them."""
        args = [*map(self.evaluated, node.args)]
        if isinstance(node.func, ast.Attribute):
            base = self.evaluated(node.func.value)
            is_of_class = isinstance(base, type) or base is UNKNOWN  # or of ``super()``
            return (args[0], args[1]) if is_of_class and len(args) > 2 else (base, args[0])
        return args[0], args[1]

    def _cell(self, name: str, value: Any) -> types.CellType | None:
        """Return a closure's variable, if the frame knows it, or only one function with this code
        can be running."""
        if name in (cells := getattr(self.frame, "f_cells", {})):
            return cells[name]  # type: ignore[no-any-return]
        found: dict[int, types.CellType] = {}
        for function in self._functions.get(id(self.code), ()):
            names, cells = function.__code__.co_freevars, function.__closure__ or ()
            cell = dict(zip(names, cells, strict=True)).get(name)
            if cell is not None and member_of(cell, name) is value:
                found[id(cell)] = cell
        return next(iter(found.values())) if len(found) == 1 else None


def _may_change(value: Any) -> bool:
    return not isinstance(value, (*_PLAIN, *_NO_STATE)) and type(value) is not object


def _is_tensors(owner: Any, key: Any) -> bool:
    """Whether it is an attribute that torch, or a class, gives a tensor, but whether that needs a
    gradient. User's code may set others."""
    is_own = key == NEEDS_GRADIENT or not hasattr(type(owner), str(key))
    return isinstance(owner, Tensor) and not is_own


def _is_method_in_c(owner: Any, key: Any, value: Any) -> bool:
    """Whether it is what a library's class gives all its objects: ``found.append``."""
    is_of_object = not isinstance(owner, Names | type) and key not in own_attributes(owner)
    return is_of_object and isinstance(value, _IN_C)


def is_walker(function: Any) -> bool:
    """Return whether a method of torch's lists what a module has. A recording has others in the
    place of some."""
    return is_one_of(getattr(function, "__wrapped__", function), _WALKERS)


def members_of(frame: Frame, node: ast.expr) -> Any:
    """Return what a loop over an expression gives; ``UNKNOWN`` if code would have to run for it,
    other than a module's own."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
        owner, name = frame.evaluated(node.func.value), node.func.attr
        if type(owner) in (dict, defaultdict, OrderedDict) and name in _MEMBERS:
            return [*getattr(dict, name)(owner)]
        if isinstance(owner, nn.ModuleDict) and name in _MEMBERS:
            return [*getattr(dict, name)(children_of(owner))]
        if isinstance(owner, nn.Module) and name in _WALKS:
            is_torchs = getattr(type(owner), name) is getattr(nn.Module, name)
            return [*getattr(owner, name)()] if is_torchs else UNKNOWN
        return UNKNOWN
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
        if node.func.id == "zip":
            several = [members_of(frame, one) for one in node.args]
            return (
                UNKNOWN
                if any(one is UNKNOWN for one in several)
                else [*zip(*several, strict=False)]
            )
        found = members_of(frame, node.args[0])
        if found is UNKNOWN or node.func.id not in ("list", "tuple", "enumerate", "reversed"):
            return UNKNOWN
        return [*enumerate(found)] if node.func.id == "enumerate" else found
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return [*_written_in(node.elts, frame)]
    value = frame.evaluated(node)
    if isinstance(value, nn.ModuleList | nn.Sequential):
        return [*children_of(value).values()]
    if isinstance(value, nn.ModuleDict):
        return [*children_of(value)]
    return [*value] if type(value) in (list, tuple, deque, dict, set, frozenset) else UNKNOWN


def _written_in(nodes: Sequence[ast.expr], frame: Frame) -> Iterator[Any]:
    for node in nodes:
        if not isinstance(node, ast.Starred):
            yield frame.evaluated(node)
        elif (found := members_of(frame, node.value)) is not UNKNOWN:
            yield from found


def _is_constant(key: Any, call: ast.Call) -> bool:
    """Whether a call of ``setattr`` has its name as a constant."""
    return any(isinstance(one, ast.Constant) and one.value == key for one in call.args)
