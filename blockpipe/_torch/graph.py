"""Autograd's graph: its engine, its nodes, and what it saves."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, _engine_run_backward, get_gradient_edge
from torch.utils import checkpoint

# --- the engine

engine: Callable[..., Any] = _engine_run_backward
"""Run a backward: (edges, gradients, retain_graph, create_graph, inputs, allow_unreachable,
accumulate_grad), the last three by position only.

``torch.autograd.backward`` and ``grad`` call it. They check the gradients first, and in torch 2.11
cannot look at an edge into a custom function such as ours. A split backward calls it for every node
of its frontier; on a tiny graph the checks made 147 µs out of 103 for ``grad``, and 151 out of 97
for ``backward`` (torch 2.15, CPU, medians)."""

at_end_of_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
"""Run a function when the backward that is under way is over, if it succeeds."""

will_run: Callable[[Node], bool] = torch._C._will_engine_execute_node
"""Whether the backward that is under way runs a node. No argument of a custom function's backward
says which gradients were asked for, ``needs_input_grad`` neither: it is settled in the forward."""

# --- nodes

PythonNode = torch._C._FunctionBase
"""The base of nodes of custom functions. torch has a public subclass, and says not to use it."""

sequence_number: Callable[[Node], int] = methodcaller("_sequence_nr")
"""When a node was made: those of later operations have higher numbers. A node has no public
number."""

nodes_made: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The :data:`sequence_number` of the next node of this thread."""

incoming: Callable[[Node], Iterable[Any]] = attrgetter("_input_metadata")
"""The gradients that come in at a node, each with ``shape`` and ``dtype``. In public they are known
only when they have come."""


def leaves_of_graph(roots: Iterable[Tensor], *, before: Iterable[Tensor] = ()) -> Iterator[Tensor]:
    """Yield the leaves that the gradients of tensors go to, each once.

    Args:
        roots: the tensors.
        before: the walk does not go behind these.
    """
    seen = {tensor.grad_fn for tensor in before}
    left = [tensor.grad_fn for tensor in roots]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        left += [inner for inner, _ in node.next_functions]


# --- hooks of leaves

gradient_hooks: Callable[[Tensor], dict[int, Any] | None] = attrgetter("_backward_hooks")
"""The hooks of ``Tensor.register_hook`` in a tensor; ``None`` or empty: none. They can be added in
public, but not asked for."""

stepping_hooks: Callable[[Tensor], dict[int, Any] | None] = attrgetter(
    "_post_accumulate_grad_hooks"
)
"""The hooks of ``Tensor.register_post_accumulate_grad_hook``, which may be an optimizer's step: a
run that must not step has to take them off, and only their handles could, which are the user's."""


def hooks_of_leaf(leaf: Tensor) -> list[Callable[..., Any]]:
    """Return the hooks in a leaf, of both kinds."""
    return [*(gradient_hooks(leaf) or {}).values(), *(stepping_hooks(leaf) or {}).values()]


def is_hooked(leaf: Tensor, node: Node) -> bool:
    """Return whether a leaf has hooks, or the node that adds up its gradient has. Those of a node
    are found beside one more, which is taken off again."""
    if hooks_of_leaf(leaf):
        return True
    for register in (node.register_prehook, node.register_hook):
        handle = register(_do_nothing)
        hooks = handle.hooks_dict_ref()
        is_one_of_several = hooks is not None and len(hooks) > 1
        handle.remove()
        if is_one_of_several:
            return True
    return False


def _do_nothing(*_: Any) -> None:
    pass


def share_hooks(tensor: Tensor, other: Tensor) -> None:
    """Give a tensor the hooks that another has, the same collections of them."""
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(tensor, hooks):
            setattr(other, hooks, getattr(tensor, hooks))


NodeHooks: Any = torch.autograd.function._HookMixin
"""The class whose :data:`ADD_HOOK` adds each hook to a node: ``node.register_hook`` and
``register_prehook`` call it. A node can be given hooks in public, but not asked for them."""

ADD_HOOK = "_register_hook"
"""The static method of :data:`NodeHooks`: (the node's hooks or ``None``, the hook)."""


def hook_of_several(hook: Callable[..., Any]) -> object:
    """Return what the hooks of one ``register_multi_grad_hook`` have in common, given one of them;
    ``None`` for other hooks."""
    code = getattr(hook, "__code__", None)
    is_torchs = code is not None and code.co_filename == torch.autograd.graph.__file__
    return _enclosed(hook, "lock") if is_torchs else None


def renew_hooks_of_several(parameter: Tensor) -> None:
    """Tell those of ``register_multi_grad_hook`` on a parameter that was moved of its new node.
    They ask the engine for the node of before, which never runs, and call no function then."""
    for hook in (gradient_hooks(parameter) or {}).values():
        nodes, index = _enclosed(hook, "grad_fns"), _enclosed(hook, "idx")
        if hook_of_several(hook) is not None and isinstance(index, int):
            with torch.enable_grad():
                nodes[index] = get_gradient_edge(parameter).node


def _enclosed(function: object, name: str) -> Any:
    """Return the value of a variable around a function; ``None`` if it has no such variable."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None or name not in code.co_freevars:
        return None
    return cells[code.co_freevars.index(name)].cell_contents


# --- the user's code in nodes


def custom_function_of(node: Node) -> type[torch.autograd.Function] | None:
    """Return the custom function that a node is of, whose context it is; ``None`` for torch's."""
    return getattr(type(node), "_forward_cls", None)


def custom_backward_of(info: object) -> Callable[..., Any] | None:
    """Return the backward that ``torch.library`` knows for an operation, given what its own custom
    function holds."""
    is_torchs = type(info).__module__.startswith("torch._library")
    return getattr(info, "_backward_fn", None) if is_torchs else None


def recompute_context_of(recompute: Callable[..., Any]) -> Any:
    """Return the second of the contexts that a checkpoint's ``context_fn`` made, given what torch
    calls to run the checkpoint's function again; ``None`` if there is none."""
    return _enclosed(recompute, "recompute_context")


# --- saved tensors

saved_tensor_hooks: Callable[[], tuple[Any, Any] | None] = partial(
    torch._C._autograd._top_saved_tensors_default_hooks,
    True,  # also while something is traced
)
"""The pack and unpack hooks that are on in this thread. They can be put on in public, but not asked
for, and so not handed on to another thread."""

push_saved_tensor_hooks: Callable[..., None] = torch._C._autograd._push_saved_tensors_default_hooks
"""What ``torch.autograd.graph.saved_tensors_hooks`` does when it is entered, for hooks that go on
and off where no block begins and ends. In a block that one serves."""

pop_saved_tensor_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
"""The other way. What a block left on that an interrupt kept from its end goes by this too."""

CHECKPOINT_HOOK = "_checkpoint_hook"
"""The name in ``torch.utils.checkpoint`` of :data:`CheckpointHook`, for who replaces it there."""

CheckpointHook: Any = checkpoint._checkpoint_hook
"""What torch puts on around the function of a checkpoint (of the kind that is not reentrant): made
with a frame, whose ``recompute_fn`` runs the function again. Nothing public tells that a checkpoint
begins: its function, the determinism check and the contexts are the user's."""
