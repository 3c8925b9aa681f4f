"""What ``_torch/graph.py`` relies on."""

import pytest
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils import checkpoint as torchs

from blockpipe._torch import graph


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def test_the_engine_returns_gradients_of_edges():
    x = torch.ones(2, requires_grad=True)
    unread = torch.ones(1, requires_grad=True)
    edges = (get_gradient_edge(x), get_gradient_edge(unread))
    root = get_gradient_edge((3 * x).sum())
    found = graph.engine((root,), (torch.ones(()),), False, False, edges, True, False)
    assert found[0].tolist() == [3, 3], "torch's engine takes its arguments in another order"
    assert found[1] is None, "torch's engine no longer allows inputs that nothing leads to"
    assert x.grad is None, "torch's engine adds to .grad what was only asked for"


def test_the_engine_adds_up_in_grad():
    x = torch.ones(2, requires_grad=True)
    root = get_gradient_edge((3 * x).sum())
    graph.engine((root,), (torch.ones(()),), True, False, (), True, True)
    graph.engine((root,), (torch.ones(()),), False, False, (), True, True)
    assert x.grad.tolist() == [6, 6], "torch's engine no longer keeps graphs, or adds up gradients"


def test_the_engine_begins_at_a_custom_function():
    """What ``torch.autograd.backward`` of torch 2.11 does not."""
    x = torch.ones(2, requires_grad=True)
    made = Double.apply(x)
    graph.engine((get_gradient_edge(made),), (torch.ones(2),), False, False, (), True, True)
    assert x.grad.tolist() == [2, 2], "torch's engine cannot begin at a custom function any more"


def test_will_run():
    """Of a backward with some inputs only what leads to them; of a whole one everything."""
    asked = []
    x, y = (torch.ones(1, requires_grad=True) for _ in range(2))
    token = get_gradient_edge(y).node

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return x + y

        @staticmethod
        def backward(ctx, gradient):
            asked.append(graph.will_run(token))
            return gradient, gradient

    torch.autograd.grad(Asks.apply(x, y), x)
    Asks.apply(x, y).backward()
    assert asked == [False, True], (
        "torch no longer says which nodes a backward runs, by which pipe(x) refuses autograd.grad"
    )


def test_python_nodes():
    x = torch.ones(2, requires_grad=True)
    assert isinstance(Double.apply(x).grad_fn, graph.PythonNode), (
        "torch's custom functions have nodes of another base: a split backward would run them twice"
    )
    assert not isinstance((2 * x).grad_fn, graph.PythonNode)


def test_sequence_numbers():
    x = torch.ones(2, requires_grad=True)
    begin = graph.nodes_made()
    first = x * 2
    between = graph.nodes_made()
    second = first * 2
    numbers = [graph.sequence_number(t.grad_fn) for t in (first, second)]
    assert begin <= numbers[0] < between <= numbers[1] < graph.nodes_made(), (
        "torch no longer numbers nodes as they are made, by which backwards are ordered and timed"
    )


def test_incoming():
    node = torch.ones(2, 3, requires_grad=True).mul(2).grad_fn
    (metadata,) = graph.incoming(node)
    assert (tuple(metadata.shape), metadata.dtype) == ((2, 3), torch.float32), (
        "torch's nodes no longer know their gradients' shapes, of which memory is predicted"
    )


def test_gradient_hooks():
    leaf = torch.ones(1, requires_grad=True)
    assert not graph.gradient_hooks(leaf)
    handle = leaf.register_hook(lambda gradient: None)
    assert len(graph.gradient_hooks(leaf)) == 1, (
        "torch's tensors have their hooks elsewhere: a split backward would call them twice"
    )
    handle.remove()
    assert not graph.gradient_hooks(leaf), "torch's removed hooks stay on the tensor"


def test_stepping_hooks_are_those_that_run():
    leaf = torch.ones(1, requires_grad=True)
    assert graph.stepping_hooks(leaf) is None
    ran = []
    leaf.register_post_accumulate_grad_hook(ran.append)
    hooks = graph.stepping_hooks(leaf)
    before = dict(hooks)
    hooks.clear()
    leaf.sum().backward()
    assert not ran, "torch runs hooks after accumulation that are not in the dictionary any more"
    hooks.update(before)
    leaf.sum().backward()
    assert len(ran) == 1, "torch no longer runs hooks after accumulation that were put back"


@pytest.mark.parametrize("of_node", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_a_leaf_is_hooked_as_long_as_it_or_its_node_has_a_hook(of_node, before):
    leaf = torch.zeros(2, requires_grad=True)
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    assert not graph.is_hooked(leaf, node)
    if of_node:
        handle = (node.register_prehook if before else node.register_hook)(print)
    elif before:
        handle = leaf.register_hook(print)
    else:
        handle = leaf.register_post_accumulate_grad_hook(print)
    assert graph.is_hooked(leaf, node)
    assert graph.is_hooked(leaf, node)
    handle.remove()
    assert not graph.is_hooked(leaf, node)


def test_share_hooks():
    one, other = (torch.ones(1, requires_grad=True) for _ in range(2))
    one.register_hook(lambda gradient: 2 * gradient)
    one.register_post_accumulate_grad_hook(lambda leaf: None)
    graph.share_hooks(one, other)
    other.sum().backward()
    assert graph.gradient_hooks(other) is graph.gradient_hooks(one)
    assert graph.stepping_hooks(other) is graph.stepping_hooks(one)
    assert other.grad.tolist() == [2], "torch no longer runs hooks that were set on a tensor"


def pack(tensor):
    return tensor.detach()


def unpack(tensor):
    return tensor


def test_saved_tensor_hooks():
    assert graph.saved_tensor_hooks() is None
    with saved_tensors_hooks(pack, unpack):
        assert graph.saved_tensor_hooks() == (pack, unpack), (
            "torch no longer tells the innermost saved-tensor hooks, which lanes hand on"
        )
    assert graph.saved_tensor_hooks() is None


def test_saved_tensor_hooks_are_pushed_and_popped():
    graph.push_saved_tensor_hooks(pack, unpack)
    try:
        there = graph.saved_tensor_hooks()
    finally:
        graph.pop_saved_tensor_hooks()
    assert there == (pack, unpack), "torch's hooks are no longer those that were pushed last"
    assert graph.saved_tensor_hooks() is None, "torch's popped hooks stay on"


def test_the_hook_of_a_checkpoint(monkeypatch):
    """It is looked up by name where a checkpoint begins; its frame has the function."""
    frames = []

    class Watched(graph.CheckpointHook):
        def __init__(self, frame):
            frames.append((frame, frame.recompute_fn))
            super().__init__(frame)

    monkeypatch.setattr(torchs, graph.CHECKPOINT_HOOK, Watched)
    x = torch.ones(2, requires_grad=True)
    ran = []

    def function(x):
        ran.append(x)
        module = getattr(graph.saved_tensor_hooks()[0], "__module__", "")
        assert module == torchs.__name__, "torch's checkpoints pack with functions of other modules"
        return x.sin()

    result = torchs.checkpoint(function, x, use_reentrant=False)
    assert len(frames) == 1, (
        f"torch's checkpoints no longer look up {graph.CHECKPOINT_HOOK}, by which the glue sees them"
    )
    assert callable(frames[0][1]), "torch's frame of a checkpoint has no recompute_fn any more"
    result.sum().backward()
    assert len(ran) == 2


@pytest.mark.parametrize("count", [1, 2])
def test_edges_into_a_graph_can_be_made(count):
    """``GradientEdge(node, number)``, as a split backward makes them."""
    x = torch.ones(2, requires_grad=True)
    node = (x * 2).grad_fn
    edges = (GradientEdge(node, 0),) * count
    graph.engine(edges, (torch.ones(2),) * count, False, False, (), True, True)
    assert x.grad.tolist() == [2 * count] * 2
