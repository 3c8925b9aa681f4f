"""Rows of arrays that have a name of their own, in code that a recording does not run."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ...parity import assert_same_gradients, plain_step
from ...stage_devices import stages


class Net(nn.Module):
    """Its first stage reads counts, and a hook of the second one does something with them."""

    def __init__(self, hook: Callable[["Net"], object], *, reads: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.reads = nn.Linear(4, 4), nn.Linear(4, 4), reads
        self.counts, self.flat, self._hook = np.ones((2, 3)), np.ones(3), hook

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x).tanh()
            if self.reads:
                h = h * float(self.counts.mean() + self.flat.mean())
        with bp.Block(stage=1):
            h = self.b(h)
            h.register_hook(lambda gradient: self._hook(self))
            return h


def _adds(net: Net) -> None:
    row = net.counts[0]
    row += 1


def _sets(net: Net) -> None:
    row = net.counts[0]
    row[0] = 2.0


def _sets_all(net: Net) -> None:
    row = net.counts[0, :2]
    row[:] += 1


def _fills(net: Net) -> None:
    rows = net.counts
    rows.T[1].fill(3)


def _turns(net: Net) -> None:
    for row in net.counts:
        row += 1


def _renamed(net: Net) -> None:
    rows = net.counts[:1]
    row = rows[0]
    row *= 2


WRITES = [_adds, _sets, _sets_all, _fills, _turns, _renamed]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("hook", WRITES)
def test_a_row_that_a_hook_changes_under_a_name_is_refused_where_another_stage_reads(
    hook: Callable[[Net], object], schedule: str
) -> None:
    x = torch.randn(8, 4)
    pipe = bp.Pipeline(Net(hook), devices=stages(2), chunks=4, schedule=schedule)
    with pytest.raises(StateError, match=r"ndarray in a backward on hops \[1\]"):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)


def test_a_row_that_the_loss_changes_under_a_name_is_refused() -> None:
    x, net = torch.randn(8, 4), Net(lambda net: None)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        row = net.counts[1]
        row += 1
        return mse_loss(output, target)

    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="changes an ndarray on hops"):
        pipe.forward_backward(x, target=x, loss_fn=loss)


def _counts_a_number(net: Net) -> None:
    number = net.flat[0]
    number += 1


def _counts_an_element(net: Net) -> None:
    row = net.counts[0]
    element = row[1]
    element += 1


def _counts_elements(net: Net) -> None:
    for element in net.flat:
        element += 1


def _copies(net: Net) -> None:
    row = net.counts[0] * 2
    row += 1


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(
    "hook", [_counts_a_number, _counts_an_element, _counts_elements, _copies, *WRITES]
)
def test_a_number_and_rows_of_one_stage_alone_are_not(
    hook: Callable[[Net], object], reads: bool
) -> None:
    if reads and hook in WRITES:
        return
    torch.manual_seed(0)
    net, plain = (Net(hook, reads=reads) for _ in range(2))
    plain.load_state_dict(net.state_dict())
    pipe, x = bp.Pipeline(net, devices=stages(2), chunks=4), torch.randn(8, 4)
    for _ in range(3):
        net.zero_grad(), plain.zero_grad()
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)
        plain_step(plain, (x,), {}, x, mse_loss, 4)
        assert_same_gradients(net, plain)
    np.testing.assert_allclose(net.counts, plain.counts)
