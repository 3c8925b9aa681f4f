"""The effects that methods and functions of libraries have on containers, by their names.

Most of them are code in C, into which nobody can look. A rule that takes any unknown function in C
for one that changes its arguments would refuse many that only read them.
"""

import ast
import types
from collections.abc import Iterable, Iterator
from typing import Any


def name_called(node: ast.AST) -> str:
    """Return the name by which a call calls its function; empty if there is none."""
    function = node.func if isinstance(node, ast.Call) else None
    return str(getattr(function, "id", getattr(function, "attr", "")))


# Methods of containers, by their effect on the content.
WRITES = frozenset(
    [
        *("append", "appendleft", "extend", "extendleft", "insert", "clear", "remove", "reverse"),
        *("sort", "rotate", "add", "discard", "update", "write", "writelines", "truncate", "fill"),
        *("set", "reset", "put", "subtract", "move_to_end", "seek", "write_byte"),
        *("difference_update", "intersection_update", "symmetric_difference_update"),
        *("frombytes", "fromlist", "byteswap"),
        *("__setitem__", "__delitem__", "__iadd__", "__ior__", "__iand__", "__isub__", "__imul__"),
    ]
)
CHECKPOINTS = ("checkpoint", "checkpoint_sequential")
"""Functions that call what they are given, and once more in the backward."""
EMPTIES = frozenset(["clear", "truncate", "reset"])
"""Those of these methods after which nothing is left of what was there."""
# Functions of libraries that change what they are given first, most of them code in C.
_CHANGES_FIRST = frozenset(
    [
        *("heappush", "heappop", "heapify", "heapreplace", "heappushpop"),
        *("insort", "insort_left", "insort_right", "shuffle", "setitem", "delitem"),
        *("iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul"),
        *("ior", "ipow", "irshift", "isub", "itruediv", "ixor"),
        *("copyto", "put", "place", "putmask", "put_along_axis", "fill_diagonal"),
    ]
)
_CHANGES_ANY = frozenset(["pack_into", "dump"])  # a buffer or a file, in another position
_OF_UFUNCS = "at"  # ``numpy.add.at(array, …)``
_UNBOUND = (types.MethodDescriptorType, types.WrapperDescriptorType)
SETS_TORCHS = frozenset(["train", "eval", "requires_grad_"])
"""Methods that set the mode of modules, or whether parameters need a gradient."""
FILLS = frozenset(["copy_", "zero_", "fill_"])  # of tensors; others that end so read as well
_KEEPS_VALUES = frozenset(["requires_grad_", "detach_", "share_memory_", "rename_"])
DOES_BOTH = frozenset(
    [
        *("pop", "popleft", "popitem", "setdefault", "send", "__next__"),
        *("read", "readline", "readlines", "readinto", "read_byte"),  # from where a file stands
    ]
)
COPIES = frozenset(["copy", "deepcopy", "dict"])  # whose result is another container
CHANGES_GIVEN = _CHANGES_FIRST | _CHANGES_ANY

SETTERS = (
    *("setattr", "delattr", "__setattr__", "__delattr__"),
    *("register_buffer", "register_parameter", "register_module", "add_module"),
)
"""What sets an attribute by its name."""
CHANGES = (
    WRITES | DOES_BOTH | CHANGES_GIVEN | SETS_TORCHS | {*SETTERS, "next", "cache_info"}
)  # each call changes the latter

ASKS_CHANCE = (
    *("random", "randint", "uniform", "choice", "choices", "shuffle", "sample", "randrange"),
    *("gauss", "normalvariate", "getrandbits", "permutation", "integers", "uuid4", "token_hex"),
    *("time", "time_ns", "perf_counter", "monotonic", "process_time", "now", "today"),
    "current_microbatch",
)
"""Functions whose answer is another one in each forward."""

ASKS_KIND = (
    *("dim", "isinstance", "callable", "is_tensor", "is_floating_point", "is_grad_enabled"),
    *("is_contiguous", "type"),
)
"""Functions that ask of what kind an object is, which all data leave as it is."""

ASKS_SIZE = ("size", "numel", "len", "stride", "nelement")
"""Functions that ask a tensor for its size."""

ASKS_SHAPE = (*ASKS_KIND, *ASKS_SIZE, "hasattr", "getattr", "get")
"""Functions that ask a tensor for no value."""

COMPUTES = (
    *("min", "max", "abs", "bool", "int", "float", "round", "str", "sum", "any", "all", "range"),
    *("list", "tuple", "set", "dict", "sorted", "reversed", "enumerate", "zip", "id", "divmod"),
    *("hash", "repr", "format", "ord", "chr", "frozenset"),
)
"""Functions of Python that give what follows from their arguments alone."""

CALLS_EACH = (
    *("map", "filter", "sorted", "min", "max", "reduce", "starmap", "takewhile", "dropwhile"),
    *("accumulate", "groupby", "filterfalse"),
)
"""Functions of Python that call what they are given for each member of something."""

CALLS_MODULES = (
    *("map", "filter", "reduce", "starmap", "tree_map", "functional_call", "vmap", "grad"),
    *("grad_and_value", "vjp", "jvp", "jacrev", "jacfwd", "hessian", "linearize"),
)
"""Functions of libraries that call a module which they are given."""

MAKES_BY_SIZE = (
    *("arange", "zeros", "ones", "empty", "full", "rand", "randn", "eye", "linspace", "randperm"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "repeat", "tile", "histc", "narrow"),
    *("expand", "split", "chunk", "tensor_split"),
    *("filter", "compress", "takewhile", "dropwhile", "filterfalse"),
)
"""Functions that make a tensor, or a list, as long as a number or a test says."""

OF_SHAPES = ("shape", "nbytes")
"""Attributes of tensors that tell of their size."""

OF_KINDS = (
    *("dtype", "device", "ndim", "layout", "requires_grad", "grad_fn", "is_leaf", "is_cuda"),
    *("is_cpu", "itemsize", "names"),
)
"""Attributes of tensors that all data leave as they are."""


def writes_in_place(name: str) -> bool:
    """Return whether a method or a function of torch of this name writes to its first tensor."""
    is_in_place = name.endswith("_") and not name.endswith("__") and name != "_"
    return is_in_place and name not in _KEEPS_VALUES


def registers_hook(name: str) -> bool:
    """Return whether a method or function of torch of this name takes a hook, to call it later."""
    return name.startswith("register_") and name.endswith("hook")


def arguments_of(call: ast.expr) -> list[ast.expr]:
    """Return the arguments of a call as expressions."""
    return [*call.args, *(one.value for one in call.keywords)] if isinstance(call, ast.Call) else []


def changes_given(given_to: ast.expr, function: Any, *, is_first: bool) -> bool:
    """Return whether a function changes a container that it is given.

    Args:
        given_to: the function as an expression.
        function: its value, or another object if that is not known.
        is_first: whether the container is its first argument.
    """
    name = getattr(function, "__name__", getattr(given_to, "attr", getattr(given_to, "id", "")))
    if name in _CHANGES_ANY:
        return True
    if isinstance(function, _UNBOUND) and name in WRITES | DOES_BOTH:
        return is_first
    is_of_ufunc = name == _OF_UFUNCS and isinstance(given_to, ast.Attribute)
    return is_first and (is_of_ufunc or name in _CHANGES_FIRST)


def asked_for_values(nodes: Iterable[ast.AST]) -> Iterator[ast.Name]:
    """Yield the variables whose values conditions ask for, and not only what they are."""
    for node in nodes:
        if isinstance(node, ast.Name):
            yield node
        elif isinstance(node, ast.BoolOp | ast.UnaryOp | ast.BinOp) or (
            isinstance(node, ast.Compare) and not isinstance(node.ops[0], ast.Is | ast.IsNot)
        ):
            yield from asked_for_values(ast.iter_child_nodes(node))
