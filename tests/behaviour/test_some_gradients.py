"""Backwards through ``pipe(x)`` that ask for some gradients only."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import UsageError

from ..parity import assert_same_gradients
from ..stage_devices import stages

Asks = Callable[[Tensor, list[nn.Parameter]], object]

ASKS: dict[str, Asks] = {
    "backward": lambda loss, parameters: loss.backward(inputs=parameters),
    "engine": lambda loss, parameters: torch.autograd.backward(loss, inputs=parameters),
    "grad": torch.autograd.grad,
    "unused": lambda loss, parameters: torch.autograd.grad(loss, parameters, allow_unused=True),
}


def _pipe(schedule: str = "1f1b") -> bp.Pipeline:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    marked = bp.begin_blocks(net, {"2": 1})
    return bp.Pipeline(marked, devices=stages(2), chunks=3, schedule=schedule)


@pytest.mark.parametrize("ask", ASKS)
def test_a_backward_when_it_asks_for_the_parameters_alone_is_refused(ask: str) -> None:
    """It would run no backward of the pipeline, and no parameter would have a gradient."""
    pipe = _pipe()
    loss = pipe(torch.randn(6, 4)).square().sum()
    with pytest.raises(UsageError, match=r"call backward\(\) and read .grad, or use schedule"):
        ASKS[ask](loss, list(pipe.parameters()))


def test_a_backward_when_parameters_have_hooks_calls_them_with_gradients_alone() -> None:
    """Once for each micro-batch, and not again from the caller's graph."""
    pipe, plain = _pipe(), _pipe("uncut")
    seen: list[Tensor | None] = []
    for parameter in [*pipe.parameters()][:2]:
        parameter.register_hook(seen.append)
    for each in (pipe, plain):
        torch.manual_seed(1)
        each(torch.randn(6, 4)).square().sum().backward()
    assert len(seen) == 6
    assert all(isinstance(gradient, Tensor) for gradient in seen)
    assert_same_gradients(pipe.module, plain.module)


def test_a_backward_when_nodes_of_parameters_have_hooks_calls_them_once_for_each_micro_batch() -> (
    None
):
    """torch adds a parameter's gradient up in a node, which older code hooks."""
    pipe = _pipe()
    pipe(torch.randn(6, 4))  # places the model
    calls: list[int] = []
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in pipe.parameters()]
    for at, node in enumerate(nodes):
        node.register_hook(lambda *_, at=at: calls.append(at))
    pipe(torch.randn(6, 4)).square().sum().backward()
    assert sorted(calls) == [at for at in range(4) for _ in range(3)]
