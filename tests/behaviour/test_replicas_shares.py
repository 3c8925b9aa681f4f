"""What the copies of a pipeline split and join, where a share's size is another argument's too."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import blockpipe as bp
from blockpipe.replicas import Replicas

from ..stage_devices import assert_close, stages


class Scaled(nn.Module):
    """Reads all of a table, wherever that is in an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, given, scale=None):
        if isinstance(given, dict):
            x, table = x + given["more"], given["table"]
            assert given["names"] == ["a", "b", "c", "d"]
        else:
            table = given[0] if isinstance(given, tuple) else given
        with bp.Block(stage=0):
            h = self.a(x) * table.sum()
        with bp.Block(stage=1):
            return self.b(h) if scale is None else self.b(h) * scale.mean()


def groups(copies: int = 2) -> list[list[str]]:
    devices = stages(2 * copies)
    return [devices[2 * copy : 2 * copy + 2] for copy in range(copies)]


def _table() -> torch.Tensor:
    return torch.rand(4, 4).requires_grad_()


GIVEN = {
    "tensor": lambda size, table: table,
    "tuple": lambda size, table: (table, torch.ones(1)),
    "dict": lambda size, table: {
        "more": torch.ones(size, 4),
        "table": table,
        "names": ["a", "b", "c", "d"],
    },
}


@pytest.mark.parametrize("schedule", ["1f1b", "uncut"])
@pytest.mark.parametrize("size", [8, 7])
@pytest.mark.parametrize("name", GIVEN)
def test_a_table_with_as_many_rows_as_a_share_goes_whole_to_each_copy(name, size, schedule):
    """As it does in a pipeline, which sees the whole batch. It gets its gradient."""
    net, table, scale = Scaled(), _table(), torch.rand(4)
    x, y = torch.randn(size, 4, requires_grad=True), torch.randn(size, 4)
    given = GIVEN[name](size, table)
    found = []
    for runner in (
        bp.Pipeline(net, devices=groups()[0], chunks=4, schedule=schedule),
        Replicas(net, groups(), chunks=2, schedule=schedule),
    ):
        net.zero_grad()
        x.grad = table.grad = None
        loss = runner.forward_backward(
            x, given, scale=scale, target=y, loss_fn=F.mse_loss, return_outputs=True
        )
        grads = [p.grad.clone() for p in net.parameters()]
        found.append([loss.loss, loss.outputs, x.grad, table.grad, *grads])
    for one, other in zip(*found, strict=True):
        assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_dims_that_are_named_are_those_of_the_batch():
    """A number is that of all arguments and of the outputs, a list has an element for each sample,
    and a target may be nested."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, factors=None):
            with bp.Block(stage=0):
                h = self.a(x.transpose(0, 1))
            with bp.Block(stage=1):
                factor = 1 if factors is None else torch.stack(factors).unsqueeze(1)
                return (self.b(h) * factor).transpose(0, 1)

    def loss_fn(output, target):
        return F.mse_loss(output, target["y"]) * target["table"].sum()

    net, x = Sums(), torch.randn(4, 8)
    factors = [*torch.rand(8)]
    for dims, given in (
        (1, ()),
        ({0: 1, "output": 1}, ()),
        ({0: 1, 1: "list", "output": 1}, (factors,)),
    ):
        pipe = bp.Pipeline(net, devices=groups()[0], chunks=4, batch_dims=dims)
        two = Replicas(net, groups(), chunks=2, batch_dims=dims)
        with torch.no_grad():
            assert_close(two(x, *given), pipe(x, *given))
    net, x = Scaled(), torch.randn(8, 4)
    target = {"y": torch.randn(8, 4), "table": torch.rand(())}
    pipe = bp.Pipeline(net, devices=groups()[0], chunks=4)
    two = Replicas(net, groups(), chunks=2)
    found = [
        r.forward_backward(x, torch.ones(1), target=target, loss_fn=loss_fn) for r in (pipe, two)
    ]
    assert_close(found[0].loss, found[1].loss)


class Reports(nn.Module):
    """Returns tensors that are not the batch's, with as many rows as a share."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            return self.b(h), self.a.weight, torch.arange(4), h.mean(), "text", [self.b.bias * 2]


def test_outputs_are_joined_once():
    """By the sizes of all micro-batches: the results are those of one pipeline with as many."""
    net, x = Reports(), torch.randn(8, 4)
    with torch.no_grad():
        expected = bp.Pipeline(net, devices=groups()[0], chunks=4)(x)
        found = Replicas(net, groups(), chunks=2)(x)
    for one, other in zip(found[:4], expected[:4], strict=True):
        assert_close(one, other)
    assert found[4] == "text"
    for one, other in zip(found[5][0], expected[5][0], strict=True):
        assert_close(one, other)


def test_a_loss_reduction_that_needs_labels_is_not_asked_when_there_are_none() -> None:
    """An evaluation ended in its ``KeyError``; a ``Pipeline`` asks for no weights there."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, labels=None):
            with bp.Block(stage=0):
                h = self.a(x)
            with bp.Block(stage=1):
                return self.b(h) if labels is None else (self.b(h) - labels).square().mean()

    def rows(args, kwargs, target):
        return len(kwargs["labels"])

    net, x = Net(), torch.randn(8, 4)
    two = Replicas(net, [["cpu"] * 2] * 2, chunks=2, loss_reduction=rows)
    two.forward_backward(x, labels=torch.randn(8, 4))
    with torch.no_grad():
        torch.testing.assert_close(two(x), net(x))


@pytest.mark.parametrize("schedule", ["1f1b", "uncut"])
def test_an_input_with_a_graph_gets_its_gradient_once(schedule):
    """Also one that goes whole to each copy; each copy has a backward of its own."""
    net, front, scale = Scaled(), nn.Linear(4, 4), nn.Linear(1, 4)
    x, y, one = torch.randn(8, 4), torch.randn(8, 4), torch.ones(1)
    parameters = [*front.parameters(), *scale.parameters()]
    wanted = torch.autograd.grad(
        F.mse_loss(net(front(x), torch.ones(4, 4), scale(one)[None]), y), parameters
    )
    two = Replicas(net, groups(), chunks=2, schedule=schedule, batch_dims={"scale": None, 1: None})
    two.forward_backward(front(x), torch.ones(4, 4), scale(one)[None], target=y, loss_fn=F.mse_loss)
    assert_close([p.grad for p in parameters], list(wanted))
