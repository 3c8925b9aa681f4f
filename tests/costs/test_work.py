"""What a recording counts of operations, forward and backward."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockpipe as bp
from blockpipe.costs.meter import Meter
from blockpipe.costs.work import ADDITION, KINDS, Operation, Work


def work_of(function, *operands: Tensor) -> Work:
    """All work of a function."""
    found = Work()
    with Meter(lambda work, _: found.add(work)):
        function(*operands)
    return found


def kinds(counter: Counter[Operation]) -> dict[str, int]:
    found = Counter[str]()
    for operation, count in counter.items():
        found[operation.kind] += count
    return dict(found)


def needy(*shape: int) -> Tensor:
    return torch.ones(*shape).requires_grad_()


@pytest.mark.parametrize(
    ("function", "operands", "forward", "backward"),
    [
        (torch.mm, [needy(4, 4), needy(4, 4)], {"product": 1}, {"product": 2}),
        (torch.mm, [torch.ones(4, 4), needy(4, 4)], {"product": 1}, {"product": 1}),
        (
            F.linear,
            [needy(4, 4), needy(4, 4), needy(4)],
            {"product": 1},
            {"product": 2, "addition": 1},
        ),
        (F.conv2d, [needy(1, 3, 8, 8), needy(4, 3, 3, 3)], {"convolution": 1}, {"convolution": 2}),
        (F.relu, [needy(4)], {"pass": 1}, {"pass": 1}),
        (F.relu, [torch.ones(4)], {"pass": 1}, {}),
        (torch.mul, [needy(4), needy(4)], {"pass": 1}, {"pass": 2}),
        (torch.add, [needy(4), needy(4)], {"pass": 1}, {}),
        (torch.cat, [[needy(4), needy(4)]], {"pass": 1}, {}),
        (torch.argmax, [needy(4)], {"pass": 1}, {}),
        (Tensor.t, [needy(4, 4)], {}, {}),
        (lambda x: x[1:], [needy(4, 4)], {}, {"addition": 1}),
        (F.gelu, [needy(4)], {"function": 1}, {"function": 1}),
        (F.group_norm, [needy(2, 4, 3), 2], {"groups": 1}, {"groups": 1}),
        (F.max_pool2d, [needy(1, 1, 4, 4), 2], {"window": 1}, {"window": 1}),
        (torch.empty_like, [needy(4)], {}, {}),
        (torch.bernoulli, [torch.ones(4)], {"random": 1}, {}),
    ],
)
def test_operations_are_counted_by_kind_forward_and_backward(function, operands, forward, backward):
    """Each is of a kind; its backward does as much for each operand that needs a gradient."""
    found = work_of(function, *operands)
    assert kinds(found.forward) == forward
    assert kinds(found.backward) == backward
    assert set(forward) | set(backward) <= set(KINDS)


def test_without_grad_nothing_goes_back():
    with torch.no_grad():
        assert not work_of(torch.mm, needy(4, 4), needy(4, 4)).backward


def test_an_embedding_reads_its_rows_alone():
    """Of a table of a million numbers four are read; its gradient is as large as the table."""
    table = needy(1000, 1000)
    found = work_of(F.embedding, torch.zeros(1, dtype=torch.long), table)
    (operation,) = found.forward
    assert operation.bytes < 10_000
    (gradient,) = found.backward
    assert gradient == Operation(ADDITION, "", 0.0, 3 * 4_000_000)


def test_products_have_their_type():
    """A device may be faster in one than in another."""
    x = torch.ones(4, 4, dtype=torch.bfloat16)
    (operation,) = work_of(torch.mm, x, x).forward
    assert operation.dtype == "bfloat16"


class Residual(nn.Module):
    """Reads ``x`` twice, and its parameter three times."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        y = x * self.weight
        return y * self.weight + y * self.weight


def test_gradients_are_added_where_something_is_read_again():
    """To `.grad`, for each read of a parameter; and where a tensor is read a second time."""
    (hop,) = bp.record(Residual(), torch.ones(4)).hops
    assert kinds(hop.work.backward)[ADDITION] == 3 + 1


def test_alike_operations_are_counted_and_not_listed():
    """A deep model's recording stays small."""
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(50)))
    (hop,) = bp.record(net, torch.ones(2, 8)).hops
    assert hop.work.forward.total() == 50
    assert len(hop.work.forward) == 1
