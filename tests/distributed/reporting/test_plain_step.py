"""The step of several shares in one process, against the whole batch."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockpipe.distributed.reporting.plain_step import (
    Share,
    StepOptions,
    joined_shares,
    plain_outcomes,
)
from blockpipe.errors import MicrobatchError

BY_CLASS = nn.CrossEntropyLoss(torch.tensor([1.0, 3.0, 0.2, 1.0]))


class Net(nn.Module):
    """A layer and a buffer, which counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, scale: Any = 1.0) -> Tensor:
        self.calls += 1
        return self.linear(x) * scale


def options(loss_fn: Any = F.cross_entropy, **other: Any) -> StepOptions:
    given: dict[str, Any] = {"loss_reduction": "mean", "batch_dims": None, "is_deferred": False}
    return StepOptions(2, loss_fn, **{**given, **other})


def shares_of(model: nn.Module, x: Tensor, y: Tensor, **kwargs: Any) -> list[Share]:
    buffers = dict(model.named_buffers())
    return [Share((x[own],), kwargs, y[own], buffers) for own in (slice(0, 5), slice(5, 8))]


@pytest.mark.parametrize(
    ("loss_fn", "reduction"),
    [
        (F.cross_entropy, "mean"),
        (BY_CLASS, "mean"),
        (nn.CrossEntropyLoss(reduction="sum"), "sum"),
        (F.cross_entropy, lambda args, kwargs, target: len(target)),
    ],
)
def test_shares_of_different_sizes_have_the_gradients_of_the_whole_batch(loss_fn, reduction):
    """Each has its own outputs and buffers."""
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    x, y = torch.randn(8, 6), torch.tensor([0, 0, 0, 1, 2, 2, 1, 3])
    loss = loss_fn(plain(x), y)
    loss.backward()
    shares = shares_of(model, x, y)
    shares[1].buffers = {"calls": torch.tensor(5.0)}
    found = plain_outcomes(model, shares, options(loss_fn, loss_reduction=reduction), [])
    assert [outcome.values["buffers"]["calls"] for outcome in found] == [2, 7]
    torch.testing.assert_close(
        torch.cat([outcome.values["outputs"]["output"] for outcome in found]), plain(x).detach()
    )
    for outcome in found:
        torch.testing.assert_close(outcome.values["loss"]["loss"], loss.detach())
        gradient = outcome.values["gradients"]["linear.weight"]
        torch.testing.assert_close(gradient, plain.linear.weight.grad)
    assert model.calls == 0


def test_shares_are_joined_as_they_would_be_split():
    """Tensors on their dim, lists by elements; what all have alike is kept."""
    x, y = torch.randn(8, 6), torch.arange(8)
    shares = shares_of(Net(), x, y, scale=torch.ones(4))
    for share in shares:
        share.kwargs["scale"] = {"by": torch.ones(4), "name": "one"}
    found = joined_shares(Net(), shares, options())
    assert torch.equal(found.args[0], x)
    assert torch.equal(found.target, y)
    assert found.kwargs["scale"]["name"] == "one"
    assert torch.equal(found.kwargs["scale"]["by"], torch.ones(4))
    turned = [Share((s.args[0].T,), {}, [*s.target], s.buffers) for s in shares]
    how = options(batch_dims={0: 1, "target": "list"})
    found = joined_shares(Net(), turned, how)
    assert torch.equal(found.args[0], x.T)
    assert found.target == [*y]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"args": (torch.zeros(3, 5),)}, "the replicas' shares differ in argument 0: Sizes"),
        ({"kwargs": {"scale": 2.0}}, "argument 'scale': it has no samples to join"),
        ({"target": None}, "the replicas' shares differ in the target: it has no samples"),
        ({"buffers": {"calls": torch.ones(())}}, "the replicas differ in the buffer 'calls'"),
    ],
    ids=["length", "value", "target", "buffer"],
)
def test_shares_that_make_no_batch_are_refused(change, said):
    """With the argument that differs."""
    shares = shares_of(Net(), torch.zeros(8, 6), torch.zeros(8, 2), scale=1.0)
    vars(shares[1]).update(change)
    with pytest.raises(MicrobatchError, match=said):
        joined_shares(Net(), shares, options())
