"""What each forward begins anew and code beside it updates: in a recording, in which that code does
not run, the forward sets what was there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ...parity import assert_same_gradients, plain_step
from ...stage_devices import stages

Act = Callable[["Net"], object]
Hook = Callable[["Net", Tensor], Tensor | None]


class Norms:
    """A list of norms, and their sum."""

    def __init__(self) -> None:
        self.total, self.each = 0.0, list[float]()

    def reset(self) -> None:
        self.total, self.each = 0.0, []

    def note(self, value: float) -> None:
        self.total += value
        self.each.append(value)


class Net(nn.Module):
    """Its first stage begins something anew, and a hook on a tensor of it goes on with that."""

    def __init__(self, begin: Act, hook: Hook) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.count, self.log, self.table, self.norms = 0, list[float](), dict[str, Any](), Norms()
        self.total, self.phase = torch.zeros(4), ""
        self._begin, self._hook = begin, hook

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(x).tanh()
            self._begin(self)
            h.register_hook(lambda gradient: self._hook(self, gradient))
        with bp.Block(stage=1):
            return self.second(h)


def _sets_count(net: Net) -> None:
    net.count = 0


def _counts(net: Net, gradient: Tensor) -> None:
    net.count += 1


def _counts_by_name(net: Net, gradient: Tensor) -> Tensor:
    count = net.count
    net.count = count + 1
    return gradient * (1 + count)


def _next(net: Net) -> int:
    return net.count + 1


def _counts_by_function(net: Net, gradient: Tensor) -> Tensor:
    net.count = _next(net)
    return gradient * net.count


def _sets_entry(net: Net) -> None:
    net.table["n"] = 0


def _updates_to_zero(net: Net) -> None:
    net.table.update(n=net.table.get("n", 0) * 0)


def _sets_by_method(net: Net) -> None:
    net.table.__setitem__("n", len(net.table))


def _updates_entry(net: Net, gradient: Tensor) -> Tensor:
    net.table.update(n=net.table["n"] + 1)
    return gradient * float(net.table["n"])


def _new_list(net: Net) -> None:
    net.log = []


def _empties_slice(net: Net) -> None:
    net.log[:] = []


def _deletes(net: Net) -> None:
    del net.log[:]


def _clears(net: Net) -> None:
    net.log.clear()


def _appends(net: Net, gradient: Tensor) -> None:
    net.log.append(gradient.norm().item())


def _new_table(net: Net) -> None:
    net.table = {}


def _asks_table(net: Net, gradient: Tensor) -> Tensor:
    scale = 0.5 if "norm" in net.table else 1.0
    net.table["norm"] = 1.0
    return gradient * scale


def _counts_in_table(net: Net, gradient: Tensor) -> None:
    net.table["n"] = net.table.get("n", 0) + 1


def _clears_table(net: Net) -> None:
    net.table.clear()


def _new_tensor(net: Net) -> None:
    net.total = torch.zeros(4)


def _adds(net: Net, gradient: Tensor) -> None:
    net.total += gradient.mean(0).cpu()


def _resets(net: Net) -> None:
    net.norms.reset()


def _new_norms(net: Net) -> None:
    net.norms = Norms()


def _notes(net: Net, gradient: Tensor) -> None:
    net.norms.note(gradient.norm().item())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("begin", "hook"),
    [
        *((_sets_count, _counts), (_sets_count, _counts_by_name)),
        *((begin, _appends) for begin in (_new_list, _empties_slice, _deletes, _clears)),
        *((_new_table, _asks_table), (_clears_table, _counts_in_table), (_new_tensor, _adds)),
        *((_resets, _notes), (_new_norms, _notes)),
        *((_sets_count, _counts_by_function), (_sets_entry, _updates_entry)),
        *((_updates_to_zero, _updates_entry), (_sets_by_method, _updates_entry)),
    ],
)
def test_what_a_hook_updates_is_refused(begin: Act, hook: Hook, schedule: str) -> None:
    x = torch.randn(8, 4)
    pipe = bp.Pipeline(Net(begin, hook), devices=stages(2), chunks=4, schedule=schedule)
    with pytest.raises(StateError, match=r"on hops \[0\] \(.*in a backward on hops \[0\]"):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)


def _sets_phase(net: Net) -> None:
    net.phase = "forward"


def _sets_other_phase(net: Net, gradient: Tensor) -> None:
    net.phase = "backward"


def _notes_in_table(net: Net, gradient: Tensor) -> None:
    net.table["rows"] = len(gradient)


def _nothing(net: Net) -> None:
    """Begin nothing."""


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("begin", "hook"),
    [(_sets_phase, _sets_other_phase), (_new_table, _notes_in_table), (_nothing, _appends)],
)
def test_what_comes_to_the_same_in_any_order_is_not(begin: Act, hook: Hook, schedule: str) -> None:
    torch.manual_seed(0)
    net, plain = (Net(begin, hook) for _ in range(2))
    plain.load_state_dict(net.state_dict())
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    for _ in range(3):
        x = torch.randn(8, 4)
        net.zero_grad(), plain.zero_grad()
        plain_step(plain, (x,), {}, x, mse_loss, 4)
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)
        assert_same_gradients(net, plain)
    assert (net.phase, net.table) == (plain.phase, plain.table)
    assert net.log == pytest.approx(plain.log)


def test_what_the_loss_counts_and_the_first_stage_sets_back_is_refused() -> None:
    x, net = torch.randn(8, 4), Net(_sets_count, lambda net, gradient: None)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        net.count += 1
        return mse_loss(output, target)

    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="return it with the output"):
        pipe.forward_backward(x, target=x, loss_fn=loss)
