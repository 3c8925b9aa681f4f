"""What torch's own methods set: modes of modules, which parameters need a gradient, submodules."""

import copy
from collections import UserList, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ...models import square
from ...parity import assert_same_gradients, plain_step
from ...stage_devices import stages

Sets = Callable[["Net", bool], object]
Reads = Callable[["Net", Tensor], Tensor]


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def train(self, mode: bool = True) -> "Own":
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (2 if self.training else 1)


class Net(nn.Module):
    """What stage 0 sets follows from the data; stage 1 reads it."""

    def __init__(self, sets: Sets, reads: Reads) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.norm, self.own = nn.BatchNorm1d(4), Own()
        self.one, self.other = nn.Tanh(), nn.Sigmoid()
        self.now: nn.Module | None = self.one
        self.sets, self.reads = sets, reads

    def forward(self, x: Tensor) -> Tensor:
        is_large = float(x.mean()) > 0
        with bp.Block(stage=0):
            self.sets(self, is_large)
            h = self.a(x)
        with bp.Block(stage=1):
            return self.b(self.reads(self, h))


def _eval_or_train(net: Net, is_large: bool) -> None:
    if is_large:
        net.norm.eval()
    else:
        net.norm.train()


def _needs_gradient(net: Net, is_large: bool) -> None:
    net.c.bias.requires_grad = is_large


def _by_assignment(net: Net, is_large: bool) -> None:
    net.now = net.one if is_large else net.other


def _by_entry(net: Net, is_large: bool) -> None:
    net._modules["now"] = net.one if is_large else net.other


def _none(net: Net, is_large: bool) -> None:
    net.now = None if is_large else net.one


def _forward(net: Net, is_large: bool) -> None:
    net.c.forward = lambda x: x * (2 if is_large else 1)


PAIRS: list[tuple[Sets, Reads, str]] = [
    (_eval_or_train, lambda net, h: net.norm(h), "norm.training"),
    (lambda net, is_large: net.own.train(mode=is_large), lambda net, h: net.own(h), "own.training"),
    (
        lambda net, _: net.train(not net.training),
        lambda net, h: h * (2 if net.training else 1),
        "attribute 'training' of the model",
    ),
    (
        lambda net, is_large: setattr(net.own, "training", is_large),
        lambda net, h: net.own(h),
        "own.training",
    ),
    (
        _needs_gradient,
        lambda net, h: h * (2 if net.c.bias.requires_grad else 1),
        "c.bias.requires_grad",
    ),
    (
        lambda net, is_large: net.c.requires_grad_(is_large),
        lambda net, h: h * (2 if net.c.bias.requires_grad else 1),
        "c.bias.requires_grad",
    ),
    (_by_assignment, lambda net, h: net.now(h), "attribute 'now' of the model"),
    (_by_entry, lambda net, h: net.now(h), "attribute 'now' of the model"),
    (
        lambda net, is_large: net.add_module("now", net.one if is_large else net.other),
        lambda net, h: net.now(h),
        "attribute 'now' of the model",
    ),
    (_none, lambda net, h: h if net.now is None else h * 2, "attribute 'now' of the model"),
    (_forward, lambda net, h: net.c(h), "c.forward"),
    (
        lambda net, is_large: setattr(net.c, "forward", torch.tanh if is_large else torch.exp),
        lambda net, h: net.c(h),
        "c.forward",
    ),
]


@pytest.mark.parametrize(("sets", "reads", "what"), PAIRS)
@pytest.mark.parametrize("first", [1.0, -1.0])
def test_what_torchs_methods_set_and_another_stage_reads_is_refused(sets, reads, what, first):
    """Whatever the sample's data, and the value before: the later micro-batches' values were read,
    without a word."""
    pipe = bp.Pipeline(Net(sets, reads), devices=stages(2), chunks=2)
    with pytest.raises(
        StateError,
        match=rf"changes {what} on hops \[0\] \(.*places\.py:\d+\), and reads it on hops .*pass it",
    ):
        pipe.forward_backward(torch.full((4, 4), first), loss_fn=square)


@pytest.mark.parametrize(
    "sets", [_needs_gradient, lambda net, is_large: net.c.requires_grad_(is_large)]
)
@pytest.mark.parametrize("first", [1.0, -1.0])
def test_a_parameter_when_its_stage_is_another_may_not_be_told_whether_it_needs_a_gradient(
    sets, first
):
    """It was found only if the sample's data changed it."""
    pipe = bp.Pipeline(Net(sets, lambda net, h: net.c(h)), devices=stages(2), chunks=2)
    with pytest.raises(StateError, match=r"changes c.(weight|bias).requires_grad"):
        pipe.forward_backward(torch.full((4, 4), first), loss_fn=square)


def _eval(net: Net, _: bool) -> None:
    net.norm.eval()
    net.own.train(False)


def _as_it_is(net: Net, _: bool) -> None:
    net.own.train(net.training)


def _trains(net: Net, _: bool) -> None:
    net.c.requires_grad_(True)


@pytest.mark.parametrize("sets", [_eval, _as_it_is, _trains])
def test_a_mode_that_follows_from_no_data_is_fine(sets):
    """A part that is frozen in each forward, on whatever stage it is called."""
    net = Net(sets, lambda net, h: net.c(net.own(net.norm(h))))
    plain = copy.deepcopy(net)
    x = torch.randn(4, 4)
    plain_step(plain, (x,), {}, None, square, 2)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    pipe.forward_backward(x, loss_fn=square)
    assert_same_gradients(net, plain)


def test_a_mode_that_a_checkpoint_reads_again_is_refused():
    """It ran again with the next micro-batch's."""

    def reads_again(net: Net, h: Tensor) -> Tensor:
        net.c.train(not net.c.training)
        factor = lambda x: x.exp() * (2 if net.c.training else 1)  # noqa: E731
        return torch.utils.checkpoint.checkpoint(factor, h, use_reentrant=False)

    pipe = bp.Pipeline(Net(lambda *_: None, reads_again), devices=stages(2), chunks=2)
    with pytest.raises(StateError, match="c.training.*in a backward.*runs its function again"):
        pipe.forward_backward(torch.randn(4, 4), loss_fn=square)


def _two(net: Any, v: float) -> None:
    net.n[0][0] = v


def _row(net: Any, v: float) -> None:
    row = net.n[0]
    row[0] = v


def _rows(net: Any, v: float) -> None:
    for row in net.n:
        row[:] = v


def _mean(net: Any, v: float) -> None:
    row = net.n[0]
    row *= 0.9
    row += 0.1 * v


def _flat(net: Any, v: float) -> None:
    net.n.flat[0] = v


def _ravelled(net: Any, v: float) -> None:
    net.n.T.ravel()[:2] = v


def _filled(net: Any, v: float) -> None:
    net.n[0].fill(v)


def _copied(net: Any, v: float) -> None:
    np.copyto(net.n[0], v)


class Writes(nn.Module):
    """The first stage writes to an array through a view of it, and the second one reads the array."""

    def __init__(self, write: Callable[[Any, float], None]) -> None:
        super().__init__()
        self.a, self.b, self.write = nn.Linear(4, 4), nn.Linear(4, 4), write
        self.n = np.ones((2, 2))

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.write(self, x.sum().item())
            h = self.a(x)
        with bp.Block(stage=1):
            return self.b(h) * float(self.n.sum())


@pytest.mark.parametrize(
    "write",
    [_two, _row, _rows, _mean, _flat, _ravelled, _filled, _copied],
    ids=lambda f: f.__name__,
)
def test_a_write_through_a_view_of_an_array_is_a_write_to_it(write):
    """Attack 23: a view is another object each time."""
    pipe = bp.Pipeline(Writes(write), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"an? (numpy )?array|attribute 'n'|ndarray"):
        pipe(torch.randn(8, 4))


class Late(nn.Module):
    """The first stage reads what a backward of the second one changes."""

    def __init__(self, held: Any, change: Callable[[Any], object], read: Callable[[Any], float]):
        super().__init__()
        self.a, self.b, self.held = nn.Linear(4, 4), nn.Linear(4, 4), held
        self.change, self.read = change, read

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x) * (1 + self.read(self.held))
        with bp.Block(stage=1):
            h = self.b(h)
            if h.requires_grad:
                h.register_hook(lambda _: self.change(self.held))
            return h


def _adds(held: Any) -> None:
    held[0] += 1


def _adds_to_field(held: Any) -> None:
    held["n"] += 1


def _adds_to_attribute(held: Any) -> None:
    held.n += 1


def _adds_behind(held: Any) -> None:
    memory, _ = held
    memory[0] += 1


def _looks_up(held: Any) -> None:
    held[len(held)]


def _appends(held: Any) -> None:
    held.append(1)


def _bytes() -> tuple[bytearray, Any]:
    memory = bytearray(2)
    return memory, np.frombuffer(memory, np.uint8)


FIELDS = [("n", int)]
LATE: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], float]]] = {
    "masked": (lambda: np.ma.zeros(2), _adds, lambda a: float(a[0])),
    "fields": (lambda: np.zeros(1, FIELDS), _adds_to_field, lambda a: float(a["n"][0])),
    "attributes": (
        lambda: np.zeros(1, FIELDS).view(np.recarray),
        _adds_to_attribute,
        lambda a: float(a.n[0]),
    ),
    "bytes": (_bytes, _adds_behind, lambda held: float(held[1][0])),
    "defaults": (lambda: defaultdict(int), _looks_up, len),
    "a list of collections": (UserList, _appends, len),
    "objects": (lambda: np.array([0.0, None]), _adds, lambda a: float(a[0])),
}


@pytest.mark.parametrize("case", LATE)
def test_what_a_backward_changes_and_an_earlier_stage_reads_is_refused(case: str) -> None:
    """These containers are no lists: a hook changed them for micro-batches that were over."""
    make, change, read = LATE[case]
    x = torch.randn(4, 4)
    pipe = bp.Pipeline(Late(make(), change, read), devices=stages(2), chunks=2)
    with pytest.raises(StateError, match=r"in a backward on hops \[1\]"):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)


class Names:
    """A loss that keeps what a table says of the outputs."""

    def __init__(self, table: Any) -> None:
        self.table, self.last = table, None

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.last = self.table[output.argmax(1).numpy()].tolist()
        return mse_loss(output, target)


@pytest.mark.parametrize(
    "table",
    [
        np.array(["cat", "dog", "owl", "emu"]),
        np.array(["cat", 1, None, {}], dtype=object),
        np.array(["2026-01-01"] * 4, dtype="datetime64[D]"),
        np.zeros(4, FIELDS),
        np.zeros(4, np.longdouble),
        np.zeros(4, ">f4"),
        np.arange(4.0)[::-1],
    ],
    ids=["texts", "objects", "dates", "fields", "long", "swapped", "backwards"],
)
@pytest.mark.cpu("the loss asks numpy")
def test_a_loss_may_read_an_array_that_is_no_tensors(table: Any) -> None:
    """torch cannot share its memory: an error said that the forward fails on the sample."""
    net, x, loss = Net(lambda *_: None, lambda _, h: h), torch.randn(8, 4), Names(table)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, schedule="sequential")
    pipe.forward_backward(x, target=x, loss_fn=loss)
    expected = table[net(x[4:]).argmax(1).numpy()].tolist()
    assert loss.last == expected


LOGGED: list[str] = []


def test_a_log_of_classes_that_several_stages_fill_is_fine() -> None:
    """``__class__`` made each use of a method a read of the list."""

    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=0):
                h = self.a(x)
                LOGGED.append(h.__class__.__name__)
            with bp.Block(stage=1):
                h = self.b(h)
                LOGGED.append(h.__class__.__name__)
                return h

    LOGGED.clear()
    bp.Pipeline(Logs(), devices=stages(2), chunks=2)(torch.randn(4, 4))
    assert LOGGED == ["Tensor"] * 4
