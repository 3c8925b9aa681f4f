"""Collect the user's code that autograd will call in the backwards of a recorded forward.

That is hooks of tensors and of nodes, the backwards of custom functions, what unpacks saved
tensors, and the contexts in which a checkpoint runs again. No backward runs in a recording:
gradients would have to be made up, and the code may step, log or talk to other processes. So the
functions are noted where the forward hands them to torch, each with its hop, and ``plain_values``
reads their source.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import Node
from torch.utils.hooks import BackwardHook

from ..._common.callsite import users_line
from ..._common.libraries import is_users
from ..._common.profilers import calls_seen_by
from ..._torch.graph import (
    ADD_HOOK,
    NodeHooks,
    PythonNode,
    custom_function_of,
    hook_of_several,
    nodes_made,
    recompute_context_of,
    saved_tensor_hooks,
    sequence_number,
)
from ...crossing.interception import active_mode
from ...crossing.tags import TAG, UNCUT, GraphEntry, ParameterHome
from ...crossing.torch_patches import Replacement
from ...errors import CrossingError, StateError
from ..entries import SharedChange
from ..outside.code_beside import CodeBeside
from ..plain_values.evaluation.calls_behind import hooks_of
from ..plain_values.evaluation.members import member_of
from ..plain_values.still_code import Hook, frames_of
from ..reads import mentioned
from ..recording import Recording

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_OF_CONTEXT = ("__enter__", "__exit__", "__torch_dispatch__", "__torch_function__")
_SEEDS = "manual_seed"
_BETWEEN = "set it between steps"
_OF_POLICY = "policy_fn"  # of torch's selective checkpoints


class CalledInBackward(NamedTuple):
    """A function that autograd calls.

    Attributes:
        function: the user's, or a library's around it.
        given: its first argument; ``None``: that is not known.
        hop: the hop in whose backward it is called.
    """

    function: Callable[..., Any]
    given: object
    hop: int


class BackwardCode:
    """The functions that a forward hands to autograd.

    Attributes:
        called: the functions, in the order in which they were handed over.
        around: the hooks on saved tensors that were on around the forward; ``None``: none were.
        operators: the functions of the user's operators, each with a hop in whose forward it is
            called: on fake tensors they do not run either.
        beside: what these functions, and the loss, change for a while.
    """

    beside: CodeBeside

    def __init__(self) -> None:
        self.called: list[CalledInBackward] = []
        self.operators: dict[tuple[int, int], tuple[Callable[..., Any], int]] = {}
        self.around: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self.checkpoints: list[weakref.ref[Any]] = []  # what torch keeps of each
        self._known: set[tuple[Any, ...]] = set()
        self._ambient: Any = None  # the hooks on saved tensors while the forward runs
        self._first_nodes: list[int] = []  # by hop, the number of the first node
        self._made_apart: dict[int, Node] = {}  # by id, the nodes that a backward has made
        self._looked_at = 0  # the hop of the graph that the forward has asked for

    def begin(self, watched: Callable[[], None]) -> None:
        """Begin to collect.

        Args:
            watched: puts the recording's own hooks on saved tensors on, over those around it.
        """
        self.around = saved_tensor_hooks()
        watched()
        self._ambient = saved_tensor_hooks()

    def looks_at_graph(self, hop: int) -> None:
        """Note that the forward asks for the graph of a tensor that was made on a hop."""
        self._looked_at = hop

    def hooks_node(self, hook: Callable[..., Any]) -> None:
        """Note a hook of a node. The forward has asked for the node before."""
        self.calls(hook, None, self._looked_at)

    def packs(self, hop: int) -> bool:
        """Note the hooks of the user's, or of torch's checkpoints, that saved tensors go through
        now; return whether there are any."""
        hooks = saved_tensor_hooks()
        if hooks is None or hooks == self._ambient:
            return False
        self.calls(hooks[1], None, hop)
        return True

    def begins_hop(self) -> None:
        """Note that the nodes that are made from here on belong to another hop."""
        self._first_nodes.append(nodes_made())

    def ran_backward(self, given: Iterable[Tensor], gradients: Iterable[Tensor]) -> None:
        """Note the nodes that a backward in the forward has made. It may have run in a device's
        thread, which numbers its nodes by itself.

        Args:
            given: the tensors that it was given.
            gradients: its results.
        """
        made = _nodes_behind(gradients)
        known = _nodes_behind(given) if made else made
        self._made_apart.update((key, made[key]) for key in made.keys() - known.keys())

    def has_graph(self, hop: int, roots: Iterable[Node]) -> None:
        """Note the custom functions in a hop's graph, by whatever name they were applied.

        Args:
            hop: the hop.
            roots: where its backward begins.

        Raises:
            CrossingError: one of them has joined the graphs of two hops.
        """
        todo, seen = [*roots], dict[int, Node]()
        while todo:
            node = todo.pop()
            kind = custom_function_of(node)
            if id(node) in seen or kind is GraphEntry:
                continue
            seen[id(node)] = node
            following = [found for found, _ in node.next_functions if found is not None]
            if kind is not None:
                self.applies(node, hop)
                if hop > 0 and any(self._is_of_earlier(found, hop) for found in following):
                    raise _joins(kind, hop)
            todo += following

    def _is_of_earlier(self, node: Node, hop: int) -> bool:
        is_leaf = not node.next_functions
        is_entry = custom_function_of(node) is GraphEntry
        is_apart = id(node) in self._made_apart
        return (
            not (is_leaf or is_entry or is_apart) and sequence_number(node) < self._first_nodes[hop]
        )

    def applies(self, context: Node, hop: int) -> None:
        """Note a custom function that is applied.

        Args:
            context: its node, which is the context of its backward.
            hop: the hop that it is applied on.
        """
        kind: Any = custom_function_of(context)
        # An application that holds the same objects as another one is no other code.
        key = kind, hop, *(id(value) for value in vars(context).values() if _is_state(value))
        if key not in self._known:
            self._known.add(key)
            for function in (kind.backward, kind.vjp):
                self.called.append(CalledInBackward(function, context, hop))

    def runs_again(self, recompute: Callable[..., Any], hop: int) -> None:
        """Note the context in which a checkpoint runs its function again."""
        context = recompute_context_of(recompute)
        if hasattr(context, "gen") and hasattr(context, "func"):  # made by contextlib
            self.calls(context.func, next(iter(context.args), None), hop)
            return
        for name in _OF_CONTEXT:
            method = getattr(type(context), name, None)
            if method is not None:
                self.calls(method, context, hop)
        if hasattr(context, _OF_POLICY):
            self.calls(getattr(context, _OF_POLICY), None, hop)

    def calls(self, function: Callable[..., Any], given: object, hop: int) -> None:
        """Note a function, as :class:`CalledInBackward` says."""
        key = id(function), id(given), hop
        if key not in self._known:
            self._known.add(key)
            self.called.append(CalledInBackward(function, given, hop))

    def read_by_libraries(self, model: nn.Module, result: Recording) -> Iterator[SharedChange]:
        """Yield the attributes of modules that the forward changes and that a library's custom
        function reads in its backward: a seed to draw the same dropout again. Unlike the user's,
        such code is not followed value by value, but by the names in it, through methods of the
        model's modules.

        Args:
            model: the model.
            result: the recording, with the attributes that the forward changes.
        """
        changed = {path.rpartition(".")[2]: path for path in sorted(result.changing)}
        methods = _methods_of({type(module) for module in model.modules()}) if changed else {}
        for function, given, hop in self.called:
            module = getattr(function, "__module__", None)
            if not isinstance(given, Node) or is_users(module) or f"{module}.".startswith("torch."):
                continue
            for code in _codes_behind(function, methods):
                names = mentioned(code)
                if _SEEDS in names and not result.hops[hop].draws:
                    continue
                for name in changed.keys() & names:
                    where = f"{code.co_filename}:{code.co_firstlineno}"
                    seen = "reads it in a backward"
                    yield SharedChange(changed[name], seen, [hop], where, _BETWEEN, settles=True)

    def held(self) -> Iterator[tuple[Any, int]]:
        """Yield what hooks hold, as far as it is theirs alone: what is bound to them, and variables
        around them; each with the hop in whose backward they are called."""
        for function, given, hop in self.called:
            if not isinstance(given, Node):
                yield from ((one, hop) for one in _held_by(function))

    def computes(self, function: Callable[..., Any], hop: int) -> None:
        """Note the function by which an operator of the user's computes on a hop."""
        self.operators[id(function), hop] = function, hop

    def begins_checkpoint(self, kept: object, hop: int) -> None:
        """Note what torch keeps of a checkpoint, in a module too."""
        self.checkpoints.append(weakref.ref(kept))

    def forget(self) -> None:
        """Release the graph that the functions' contexts are in, and which keeps itself where the
        function of a checkpoint has its result: no backward runs that."""
        self.called.clear()
        self._made_apart.clear()
        for kept in filter(None, [one() for one in self.checkpoints]):
            kept.recompute_fn = None


def _held_by(function: Callable[..., Any]) -> Iterator[Any]:
    if isinstance(function, functools.partial):
        yield from (function.args, function.keywords)
    cells: Iterable[types.CellType] = getattr(function, "__closure__", None) or ()
    yield from (member_of(cell, "") for cell in cells)
    yield from (getattr(function, "__defaults__", None), getattr(function, "__self__", None))
    if not isinstance(function, types.FunctionType | types.MethodType):
        yield function


def called_by_hooks(
    hooks: Iterable[Hook], result: Recording, adopted: Iterable[ParameterHome]
) -> Iterator[CalledInBackward]:
    """Yield the hooks of modules and leaves for each hop in whose backward they are called. Those
    of a leaf are called on the first hop that reads it.

    Args:
        hooks: those of modules, parameters and buffers.
        result: the recording, with its calls, parameters and buffers.
        adopted: the leaves that no module has.
    """
    hops = {
        name: {held.hop}
        for held in (*result.parameters, *result.buffers)
        if held.hop is not None
        for name in held.names
    }
    for call in result.calls:
        if not call.is_function and call.hop is not None:
            hops.setdefault(call.path, set()).add(call.hop)  # where its backward ends
    seen = set[tuple[int, ...]]()  # one function may be the hook of all parameters
    for hook in hooks:
        behind = getattr(hook.function, "__func__", hook.function)
        owner = getattr(hook.function, "__self__", None)
        for hop in sorted(hops.get(hook.name, ())):
            key = id(behind), id(owner), id(hook.given), hop
            if key not in seen:
                seen.add(key)
                yield CalledInBackward(hook.function, hook.given, hop)
    for home in adopted:
        for function, given in hooks_of(home.tensor):
            yield CalledInBackward(function, given, home.hop)


def _methods_of(classes: Iterable[type]) -> dict[str, list[types.CodeType]]:
    """Return the code of the methods that classes have beyond ``nn.Module``'s, by name."""
    found = dict[str, list[types.CodeType]]()
    for kind in {base for each in classes for base in each.__mro__ if issubclass(base, nn.Module)}:
        for name, member in vars(kind).items() if kind is not nn.Module else ():
            if isinstance(member, types.FunctionType):
                found.setdefault(name, []).append(member.__code__)
    return found


def _codes_behind(
    function: Callable[..., Any], methods: Mapping[str, list[types.CodeType]]
) -> Iterator[types.CodeType]:
    """Yield the code of a function and of the methods that it, or they, may call; what is inside of
    such code counts as a part of it."""
    todo, seen = [getattr(function, "__code__", None)], set[types.CodeType]()
    while todo:
        code = todo.pop()
        if isinstance(code, types.CodeType) and code not in seen:
            seen.add(code)
            yield code
            todo += [called for name in mentioned(code) for called in methods.get(name, ())]


def _nodes_behind(roots: Iterable[Tensor]) -> dict[int, Node]:
    """Return the nodes that tensors' graphs have on their hop, by id."""
    found = dict[int, Node]()
    todo = [tensor.grad_fn for tensor in roots]
    while todo:
        node = todo.pop()
        if (
            node is not None
            and id(node) not in found
            and custom_function_of(node) is not GraphEntry
        ):
            found[id(node)] = node
            todo += [following for following, _ in node.next_functions]
    return found


class NodeHooksSeen(Replacement):
    """A replacement by which hooks of nodes are noticed in a recording. Nodes are classes of C++,
    whose methods cannot be replaced, and cannot be asked for their hooks."""

    owner, name = NodeHooks, ADD_HOOK

    def replacement(self) -> Any:
        add = self._original.__func__

        def seen(hooks: Any, hook: Callable[..., Any]) -> Any:
            mode = active_mode()
            if mode is not None:
                mode.saw_node_hook(hook)
            return add(hooks, hook)

        return staticmethod(seen)


class ModuleHooksSeen(Replacement):
    """A replacement by which the backward hooks of a module are noticed where it is called:
    registered or not, and whether or not it has an operation."""

    owner, name = BackwardHook, "setup_input_hook"

    def replacement(self) -> Any:
        set_up = self._original

        def seen(around: Any, args: Any) -> Any:
            mode = active_mode()
            if mode is not None:
                mode.saw_module_hooks(around.module, [*around.user_pre_hooks, *around.user_hooks])
            return set_up(around, args)

        return seen


@contextmanager
def seeing_context() -> Iterator[list[Node]]:
    """Collect the context of a custom function that is applied while entered, where it makes no
    graph: in the forward of another one, which may run it again in its backward, as reentrant
    checkpoints do."""
    found: list[Any] = []

    def called(frame: types.FrameType, event: str, _: object) -> None:
        if event != "call" or found:
            return
        code = frame.f_code
        given = frame.f_locals.get(code.co_varnames[0]) if code.co_varnames else None
        given = given[0] if isinstance(given, tuple) and given else given
        if isinstance(given, PythonNode):
            found.append(given)

    with calls_seen_by(called) as sees:
        if not sees:
            raise StateError(
                "expected no profiler in the first step of a forward that applies an "
                f"autograd.Function inside of another one, got {sys.getprofile()!r} "
                f"({users_line()}): its backward cannot be looked at; begin to profile after the "
                "first step"
            )
        yield found


def tensors_bound_to(function: Callable[..., Any]) -> Iterator[Tensor]:
    """Yield the tensors that a hook without source reads: ``mask.mul``, ``partial(mul, mask)``."""
    given = [getattr(function, "__self__", None)]
    if isinstance(function, functools.partial):
        given += [*function.args, *function.keywords.values()]
    yield from (value for value in given if isinstance(value, Tensor))


def check_several(hooks: Iterable[tuple[Callable[..., Any], int]]) -> None:
    """Raise :class:`CrossingError` for a hook over tensors of several stages.

    Args:
        hooks: the hooks of single tensors, each with the hop in whose backward it is called.
    """
    hops: dict[int, set[int]] = {}
    for hook, hop in hooks:
        common = hook_of_several(hook)
        if common is not None:
            hops.setdefault(id(common), set()).add(hop)
            if len(found := hops[id(common)]) > 1:
                code = next(frames_of(hook)).f_code
                raise CrossingError(
                    "expected a hook over tensors of one hop, got register_multi_grad_hook over "
                    f"tensors of hops {sorted(found)}: each of their backwards would call it, with "
                    f"its own gradients alone ({code.co_filename}:{code.co_firstlineno}); register "
                    f"a hook on each tensor, or {UNCUT}"
                )


def _joins(function: type[Function], hop: int) -> CrossingError:
    code = getattr(function.forward, "__code__", None)
    where = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
    name = function.__qualname__
    return CrossingError(
        f"autograd.Function {name!r}{where} reads a tensor of an earlier hop on hop {hop}, but its "
        "apply was kept under another name, by which the call cannot be seen; call "
        f"{name}.apply(…), or put the call into a module of its own"
    )


def _is_state(value: object) -> bool:
    """Whether a value in a function's context may be something that other code uses too."""
    if isinstance(value, Tensor):
        return getattr(value, TAG, None) is None
    return not isinstance(value, _PLAIN)
