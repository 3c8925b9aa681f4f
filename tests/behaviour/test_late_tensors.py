"""Tensors that one forward leaves for the next one, on another hop than that which reads them."""

import types
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages

LAST: Tensor | None = None


class Held:
    """An object of the user's."""

    def __init__(self) -> None:
        self.last: Tensor | None = None


class Net(nn.Module):
    """Two layers on two stages: the first stage reads what the second one stores, by default."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.setup()

    def setup(self) -> None:
        self.last: Any = None

    def read(self) -> Tensor | None:
        return self.last

    def store(self, first: Tensor, second: Tensor) -> None:
        self.last = first

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            last = self.read()
            h = self.a(x if last is None else x + last).tanh()
            first = h.detach().mean(0)
        with bp.Block(stage=1):
            out = self.b(h)
            self.store(first, out.detach().mean(0))
            return out


class AfterAll(Net):
    """It stores behind the last block."""

    def store(self, first: Tensor, second: Tensor) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x if self.last is None else x + self.last).tanh()
            first = h.detach().mean(0)
        with bp.Block(stage=1):
            h = self.b(h)
        self.last = first
        return h


class Memories(Net):
    """A list of a tensor for each stage, which is replaced as a whole."""

    def setup(self) -> None:
        self.last = [torch.zeros(4), torch.zeros(4)]

    def read(self) -> Tensor:
        return self.last[0].to(self.a.weight.device)

    def store(self, first: Tensor, second: Tensor) -> None:
        self.last = [first, second]


class Element(Memories):
    def store(self, first: Tensor, second: Tensor) -> None:
        self.last[0] = first


class Entry(Net):
    def setup(self) -> None:
        self.last = {}

    def read(self) -> Tensor | None:
        return self.last.get("a")

    def store(self, first: Tensor, second: Tensor) -> None:
        self.last["a"] = first


class Entries(Entry):
    def read(self) -> Tensor | None:
        return self.last["a"] if len(self.last) else None

    def store(self, first: Tensor, second: Tensor) -> None:
        self.last.update(a=first)


class Appended(Net):
    def setup(self) -> None:
        self.last = deque(maxlen=1)

    def read(self) -> Tensor | None:
        return self.last[-1] if self.last else None

    def store(self, first: Tensor, second: Tensor) -> None:
        self.last.append(first)


class OfObject(Net):
    def setup(self) -> None:
        self.held: Any = Held()

    def read(self) -> Tensor | None:
        return self.held.last

    def store(self, first: Tensor, second: Tensor) -> None:
        self.held.last = first


class OfNamespace(OfObject):
    def setup(self) -> None:
        self.held = types.SimpleNamespace(last=None)


class OfObjectMadeLater(OfObject):
    """The first forward makes the object."""

    def setup(self) -> None:
        self.held = None

    def read(self) -> Tensor | None:
        if self.held is None:
            self.held = Held()
        return self.held.last


class ByName(Net):
    def read(self) -> Tensor | None:
        return getattr(self, "last")  # noqa: B009

    def store(self, first: Tensor, second: Tensor) -> None:
        setattr(self, "last", first)  # noqa: B010


class InClosure(Net):
    def setup(self) -> None:
        last: Tensor | None = None

        def read() -> Tensor | None:
            return last

        def store(first: Tensor, second: Tensor) -> None:
            nonlocal last
            last = first

        self.__dict__.update(read=read, store=store)


class InGlobal(Net):
    def read(self) -> Tensor | None:
        return LAST

    def store(self, first: Tensor, second: Tensor) -> None:
        global LAST
        LAST = first


class Buffer(Net):
    def setup(self) -> None:
        self.register_buffer("last", torch.zeros(4))


class Registered(Buffer):
    def store(self, first: Tensor, second: Tensor) -> None:
        self.register_buffer("last", first)


class OfModule(Net):
    """A sealed module reads its buffer, and the model sets that."""

    def setup(self) -> None:
        self.a = Shifted()

    def read(self) -> None:
        return None

    def store(self, first: Tensor, second: Tensor) -> None:
        self.a.shift = first


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.shift)


class FromHook(Net):
    """A forward hook of the model stores."""

    def setup(self) -> None:
        super().setup()
        self.new: Any = None
        self.register_forward_hook(lambda model, given, out: setattr(model, "last", model.new))

    def store(self, first: Tensor, second: Tensor) -> None:
        self.new = second


class OfLastStage(Net):
    """The tensor is made on the stage that stores it."""

    def store(self, first: Tensor, second: Tensor) -> None:
        self.last = second


class Returned(nn.Module):
    """The third hop is on the first stage again, and reads a tensor that was made there."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(4, 4), nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x).tanh()
            self.last = h.detach()
        with bp.Block(stage=1):
            h = self.b(h)
        with bp.Block(stage=0):
            return h + self.last


class Emptied(Returned):
    """The first stage begins with nothing there, which says of no micro-batch that it is its."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.last = None
            h = self.a(x).tanh()
            self.last = h.detach()
        with bp.Block(stage=1):
            h = self.b(h)
            return h if self.last is None else h + self.last


class Chosen(Returned):
    """The first stage sets a tensor that is of no micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.masks, self.turn = [torch.zeros(4), torch.ones(4)], 0

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x).tanh()
            self.turn += 1
            self.last = self.masks[self.turn % 2]
        with bp.Block(stage=1):
            return self.b(h) + self.last


class Added(Returned):
    """Each stage adds to a sum, in an attribute of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x).tanh()
            self.last = self.last + h.detach().mean()
        with bp.Block(stage=1):
            h = self.b(h)
            self.last = self.last + h.detach().mean()
            return h


LATE = [
    *(Net, AfterAll, Memories, Element, Entry, Entries, Appended, OfObject, OfNamespace),
    *(OfObjectMadeLater, ByName, InClosure, InGlobal, Buffer, Registered, OfModule, FromHook),
    OfLastStage,
]
MIXED = [Returned, Emptied, Chosen, Added]


@pytest.fixture(autouse=True)
def _nothing_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "LAST", None)


class ForReal(nn.Module):
    """It reads a value, so that it is recorded with real tensors."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if x.abs().max() > 0 else x


def step(net: nn.Module, schedule: str = "1f1b") -> None:
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    pipe.forward_backward(torch.randn(8, 4), target=torch.randn(8, 4), loss_fn=mse_loss)


@pytest.mark.parametrize("around", [lambda net: net, ForReal])
@pytest.mark.parametrize("kind", LATE)
def test_what_is_stored_after_the_next_forward_may_have_read_it_is_refused(
    kind: type[Net], around: Callable[[nn.Module], nn.Module]
) -> None:
    """Stage 0 read an older micro-batch's tensor: its own, so that nothing said whose it was."""
    with pytest.raises(
        StateError,
        match=r"the forward changes .* on hops \[1\] \(.*tensors\.py:\d+\), and reads it on hops "
        r"\[0(, 1)?\] \(.*tensors\.py:\d+\).*: (set it inside the block of the stage that reads it|"
        r"read it on the stage that makes it)",
    ):
        step(around(kind()))


@pytest.mark.parametrize("kind", MIXED)
def test_a_tensor_that_does_not_say_whose_it_is_where_another_hop_reads_it_is_refused(
    kind: type[nn.Module],
) -> None:
    """Another micro-batch's came in between, or none at all, without a word."""
    with pytest.raises(StateError, match=r"the forward changes attribute '(last|turn)' of the mod"):
        step(kind())


def test_the_remedy_for_a_tensor_of_the_last_stage_is_one_that_runs() -> None:
    """Even one by one, a stage does not read another micro-batch's tensor of another stage."""
    with pytest.raises(StateError, match=r"or use schedule='uncut'$"):
        step(OfLastStage())
    step(OfLastStage(), "uncut")


# --- what is fine


class InItsBlock(Net):
    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x if self.last is None else x + self.last).tanh()
            self.last = h.detach().mean(0)
        with bp.Block(stage=1):
            return self.b(h)


class BetweenBlocks(Net):
    """It stores before the next stage begins."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x if self.last is None else x + self.last).tanh()
            first = h.detach().mean(0)
        self.last = first
        with bp.Block(stage=1):
            return self.b(h)


class EntryOfEach(Net):
    """An entry for each stage, which only that stage asks for."""

    def setup(self) -> None:
        self.last = {}

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate([self.a, self.b]):
            with bp.Block(stage=index):
                last = self.last.get(index)
                if index in self.last:
                    x = x + last
                x = layer(x).tanh()
                self.last[index] = x.detach().mean(0)
        return x


class Table(Net):
    """The first forward makes it, and all stages read it."""

    def table(self, x: Tensor) -> Tensor:
        if self.last is None:
            self.last = torch.arange(4.0, device=x.device)
        return self.last

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x).tanh() + self.table(x)
        with bp.Block(stage=1):
            return self.b(h) + self.table(h)


class Unread(Net):
    """It is for the training loop alone."""

    def read(self) -> None:
        return None


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("around", [lambda net: net, ForReal])
@pytest.mark.parametrize("kind", [InItsBlock, BetweenBlocks, EntryOfEach, Table, Unread])
def test_what_one_stage_stores_and_reads_is_the_plain_loops(
    kind: type[Net], around: Callable[[nn.Module], nn.Module], schedule: str
) -> None:
    net, plain = around(kind()), around(kind())
    plain.load_state_dict(net.state_dict())
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    for _ in range(2):
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        found = pipe.forward_backward(x, target=y, loss_fn=mse_loss)
        assert_close(found.loss, plain_step(plain, (x,), {}, y, mse_loss, 4))
    assert_same_gradients(net, plain)


@pytest.mark.parametrize("kind", [AfterAll, Memories, OfObjectMadeLater, Buffer])
def test_what_is_stored_late_is_the_plain_loops_one_by_one(kind: type[Net]) -> None:
    net, plain = kind(), kind()
    plain.load_state_dict(net.state_dict())
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="sequential")
    found = pipe.forward_backward(x, target=y, loss_fn=mse_loss)
    assert_close(found.loss, plain_step(plain, (x,), {}, y, mse_loss, 4))
    assert_same_gradients(net, plain)
