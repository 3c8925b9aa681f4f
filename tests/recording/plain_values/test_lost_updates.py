"""Updates of one value on several stages: where something is called meanwhile, some are lost."""

import copy
import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import StateError

from ...stage_devices import assert_close, stages

TOTAL = 0.0
Note = Callable[["Two", Tensor], None]


class Money:
    """A number of the user's own class, whose operators are functions."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __add__(self, other: float) -> "Money":
        return Money(self.value + other)


class State:
    """An object of the user's own, whose attributes Python sets itself."""

    def __init__(self) -> None:
        self.total, self.count, self.recent = 0.0, 0, [0.0]


class Two(nn.Module):
    """Two stages, each of which adds to what it has seen; nobody reads it in the forward."""

    def __init__(self, *notes: Note) -> None:
        super().__init__()
        self.a, self.b, self.notes = nn.Linear(4, 4), nn.Linear(4, 4), notes
        self.total, self.count, self.most, self.money = 0.0, 0, 0.0, Money(0.0)
        self.table, self.counter, self.names = {"all": 0}, Counter({"all": 0}), {"a"}
        self.sums, self.recent = [0.0], [0.0]
        self.state = State()

    @property
    def size(self) -> int:
        return 4

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.notes[0](self, h)
        with bp.Block(stage=1):
            h = self.b(h)
            self.notes[-1](self, h)
            return h


def _sums(net: Two, h: Tensor) -> None:
    net.state.total += h.sum().item()


def _sums_in_words(net: Two, h: Tensor) -> None:
    net.state.total = net.state.total + float(h.detach().sum())


def _sums_in_a_global(net: Two, h: Tensor) -> None:
    global TOTAL
    TOTAL = TOTAL + h.sum().item()


def _sums_in_a_list(net: Two, h: Tensor) -> None:
    net.sums[0] += h.sum().item()


def _sums_in_an_entry(net: Two, h: Tensor) -> None:
    net.table["all"] += len(h)


def _counts_by_get(net: Two, h: Tensor) -> None:
    net.table["all"] = net.table.get("all", 0) + 1


def _counts_rows(net: Two, h: Tensor) -> None:
    net.state.count += h.shape[0]


def _counts_by_a_property(net: Two, h: Tensor) -> None:
    net.state.count += net.size


def _finds_the_most(net: Two, h: Tensor) -> None:
    net.most = max(net.most, h.max().item())


def _adds_money(net: Two, h: Tensor) -> None:
    net.money += 1.0


def _counts_in_the_module(net: Two, h: Tensor) -> None:
    net.count += 1


def _rounds(net: Two, h: Tensor) -> None:
    value = h.sum().item()
    net.state.total = round(net.state.total + value, 3)


def _counts(net: Two, h: Tensor) -> None:
    net.state.count += 1


LOST = [
    *(_sums, _sums_in_words, _sums_in_a_global, _sums_in_a_list, _sums_in_an_entry),
    *(_counts_by_get, _counts_rows, _counts_by_a_property, _finds_the_most, _adds_money),
    *(_counts_in_the_module, _rounds),
]


@pytest.mark.parametrize("note", LOST)
def test_an_update_when_something_is_called_meanwhile_is_refused(note: Note) -> None:
    """Now and then the total lacked what the other stage had added, without a word."""
    pipe = bp.Pipeline(Two(note), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"on hops \[0, 1\] \(.*test_lost_updates\.py:\d+"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)


def test_an_update_when_only_the_other_stage_calls_something_is_refused_with_a_remedy() -> None:
    pipe = bp.Pipeline(Two(_counts, _counts_rows), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"reads it on hops \[1\].*update is lost: compute first"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)


def test_an_update_when_a_hook_makes_it_on_two_stages_is_refused() -> None:
    net = Two(lambda net, h: None)

    def hook(module: nn.Module, given: object, got: tuple[Tensor]) -> None:
        net.total += got[0].norm().item()

    net.a.register_full_backward_hook(hook)
    net.b.register_full_backward_hook(hook)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"in a backward on hops \[0, 1\].*update is lost"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)


def _sums_what_it_has(net: Two, h: Tensor) -> None:
    value = h.sum().item()
    net.state.total += value


def _counts_in_entries(net: Two, h: Tensor) -> None:
    net.table["all"] += 1
    net.counter["all"] += 1


def _counts_by_get_on_each(net: Two, h: Tensor) -> None:
    name = f"stage {bp.current_stage()}"
    net.table[name] = net.table.get(name, 0) + h.shape[0]


def _collects(net: Two, h: Tensor) -> None:
    net.names |= {str(len(h))}
    net.sums += [h.sum().item()]


def _keeps_the_recent(net: Two, h: Tensor) -> None:
    value = h.sum().item()
    net.state.recent = [*net.state.recent[-3:], value]


def _takes_the_time(net: Two, h: Tensor) -> None:
    began = time.perf_counter()
    net.total += time.perf_counter() - began


@pytest.mark.parametrize(
    "note",
    [
        *(_counts, _sums_what_it_has, _counts_in_entries, _counts_by_get_on_each, _collects),
        *(_keeps_the_recent, _takes_the_time),
    ],
)
def test_an_update_when_nothing_is_called_meanwhile_is_fine(note: Note) -> None:
    pipe = bp.Pipeline(Two(note), devices=stages(2), chunks=4)
    for _ in range(2):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)


def test_an_update_when_one_stage_makes_it_is_fine() -> None:
    pipe = bp.Pipeline(Two(_sums, lambda net, h: None), devices=stages(2), chunks=4)
    pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)


class Returns(nn.Module):
    """The route comes back to stage 0, which adds up on both of its hops."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.state = nn.Linear(4, 4), nn.Linear(4, 4), State()

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.state.total += h.sum().item()
        with bp.Block(stage=1):
            h = self.b(h)
        with bp.Block(stage=0):
            h = self.a(h)
            self.state.total += h.sum().item()
            return h


def test_an_update_when_hops_of_one_stage_make_it_is_fine() -> None:
    """One thread runs them."""
    net, x = Returns(), torch.randn(8, 4)
    plain = copy.deepcopy(net)
    plain(x)
    bp.Pipeline(net, devices=stages(2), chunks=4).forward_backward(x, loss_fn=torch.sum)
    assert net.state.total == pytest.approx(plain.state.total, abs=1e-4)


class Loads(nn.Module):
    """Stage 1 counts in a buffer, beside an operation that looks at values."""

    def __init__(self, add: Callable[[nn.Module, Tensor], None]) -> None:
        super().__init__()
        self.a, self.b, self.add = nn.Linear(4, 4), nn.Linear(4, 4), add
        self.register_buffer("load", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            assert (h > 0).nonzero().shape[1] == 2
            self.add(self, h)
            return self.b(h)


def _adds_rows(net: nn.Module, h: Tensor) -> None:
    net.load += (h.detach() > 0).sum(0)


def _decays(net: nn.Module, h: Tensor) -> None:
    net.load *= 0.9
    net.load += h.detach().mean(0)


@pytest.mark.parametrize("add", [_adds_rows, _decays])
def test_a_buffer_when_it_is_added_to_in_place_is_no_value_that_is_set(add) -> None:
    """Where a forward is recorded for real, ``net.load += …`` was taken to set another object."""
    net = Loads(add)
    plain = copy.deepcopy(net).to(stages(1)[0])
    pipe, x = bp.Pipeline(net, devices=stages(2), chunks=4), torch.randn(8, 4)
    pipe.forward_backward(x, loss_fn=torch.sum)
    for part in x.to(stages(1)[0]).chunk(4):
        plain(part)
    assert_close(net.load, plain.load)


class Twice(nn.Module):
    """One stage, to which the forward comes back, keeps a number that nobody reads there."""

    def __init__(self, note: Callable[["Twice", float], None]) -> None:
        super().__init__()
        self.a, self.b, self.note, self.kept = nn.Linear(4, 4), nn.Linear(4, 4), note, 0.0

    def seen(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.note(self, float(h.shape[0]))
        return h

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.seen(x)
        with bp.Block(stage=1):
            h = self.b(h)
        with bp.Block(stage=0):
            return self.seen(h)


def _averages(net: Twice, value: float) -> None:
    net.kept = 0.9 * net.kept + 0.1 * value


def _approaches(net: Twice, value: float) -> None:
    net.kept += 0.1 * (value - net.kept)


def _halves(net: Twice, value: float) -> None:
    net.kept = (net.kept + value) / 2


def _adds(net: Twice, value: float) -> None:
    net.kept = value + net.kept - 1


def _is_largest(net: Twice, value: float) -> None:
    net.kept = max(net.kept, value)


def _grows(net: Twice, value: float) -> None:
    net.kept = net.kept * 1.5 + 1


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("note", [_averages, _approaches, _halves], ids=lambda note: note.__name__)
def test_updates_whose_order_counts_on_hops_of_one_stage_are_refused(note, schedule) -> None:
    """They came in the order of the lane: all first calls, and then all second ones."""
    pipe = bp.Pipeline(Twice(note), devices=stages(2), chunks=2, schedule=schedule)
    with pytest.raises(
        StateError, match=r"'kept' of the model on hops \[0, 2\].*and reads it on hops \[0, 2\]"
    ):
        pipe.forward_backward(torch.randn(4, 4), loss_fn=torch.sum)


@pytest.mark.parametrize("note", [_adds, _is_largest, _grows], ids=lambda note: note.__name__)
def test_updates_of_any_order_on_hops_of_one_stage_are_fine(note) -> None:
    net, x = Twice(note), torch.randn(4, 4)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, schedule="gpipe")
    pipe.forward_backward(x, loss_fn=torch.sum)
    for part in x.chunk(2):
        plain(part)
    assert net.kept == pytest.approx(plain.kept)
