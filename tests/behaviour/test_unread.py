"""State that a forward writes and never reads: no harm to the numbers, and no error."""

import contextlib
import copy
import dataclasses
import time

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages

SPENT = 0.0


class Two(nn.Module):
    """Two stages, after each of which something is noted."""

    def __init__(self, note, read=None) -> None:
        super().__init__()
        self.a, self.b, self.note, self.read = nn.Linear(4, 4), nn.Linear(4, 4), note, read
        self.seconds, self.step, self.recent, self.logged = 0.0, 0, [], 0
        self.timer, self.largest, self.bar = Timer(), 0.0, Bar()

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.note(self, h, 1.0)
        with bp.Block(stage=1):
            h = self.b(h)
            self.note(self, h, 2.0)
            return h if self.read is None else h * self.read(self)


class Timer:
    def __init__(self) -> None:
        self.total = self.began = 0.0

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *failure: object) -> None:
        self.total += time.perf_counter() - self.began


class Bar:
    shown = 0.0

    def update(self, amount: float) -> None:
        self.shown = self.shown + amount


def _seconds(net: Two, h: Tensor, k: float) -> None:
    began = time.perf_counter()
    net.seconds += time.perf_counter() - began


def _logged(net: Two, h: Tensor, k: float) -> None:
    if net.step % 10 == 0:
        net.logged = k


def _recent(net: Two, h: Tensor, k: float) -> None:
    net.recent = [*net.recent[-3:], k]


def _largest(net: Two, h: Tensor, k: float) -> None:
    net.largest = max(net.largest, k)


def _timer(net: Two, h: Tensor, k: float) -> None:
    with net.timer:
        h.sin()


def _bar(net: Two, h: Tensor, k: float) -> None:
    net.bar.update(k)


def _of_a_class(net: Two, h: Tensor, k: float) -> None:
    Bar.shown = k


def _of_a_module(net: Two, h: Tensor, k: float) -> None:
    global SPENT
    SPENT += k / 2


NOTES = [_seconds, _logged, _timer, _bar, _of_a_class, _of_a_module]


@pytest.mark.parametrize("note", NOTES)
def test_what_two_stages_write_and_nobody_reads_is_fine(note):
    net, loss_fn = Two(note), nn.functional.mse_loss
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    for _ in range(2):
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        found = pipe.forward_backward(x, target=y, loss_fn=loss_fn)
        assert_close(found.loss, plain_step(plain, (x,), {}, y, loss_fn, 4))
    assert_same_gradients(net, plain)


def _by_a_default(net: Two) -> float:
    return getattr(net, "seconds", 1.0)


def _by_a_made_up_name(net: Two) -> float:
    return getattr(net, "sec" + "onds")


def _by_all_of_them(net: Two) -> float:
    return vars(net)["seconds"]


def _by_a_local(net: Two) -> float:
    spent = net.seconds
    return spent + 1


def _by_a_global(net: Two) -> float:
    return SPENT


def _when_it_is_late(net: Two) -> float:
    return net.seconds if net.step > 5 else 1.0


READS = [
    (_seconds, lambda net: net.seconds),
    (_seconds, _by_a_default),
    (_seconds, _by_a_made_up_name),
    (_seconds, _by_all_of_them),
    (_seconds, _by_a_local),
    (_seconds, _when_it_is_late),
    (_logged, lambda net: net.logged),
    (_recent, lambda net: net.recent[0]),
    (_recent, lambda net: sum(net.recent)),
    (_largest, lambda net: net.largest),
    (_timer, lambda net: net.timer.total),
    (_bar, lambda net: net.bar.shown),
    (_of_a_class, lambda net: net.bar.shown),
    (_of_a_module, _by_a_global),
]


@pytest.mark.parametrize(("note", "read"), READS)
def test_what_is_read_back_is_refused(note, read):
    pipe = bp.Pipeline(Two(note, read), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"sets it on hops \[0, 1\] .*pass it along"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)


def test_a_value_that_goes_on_is_read():
    """It is handed to code that nobody knows, or to two places."""

    def tells(net: Two, h: Tensor, k: float) -> None:
        net.seconds = float.__add__(net.seconds, k)

    def shares(net: Two, h: Tensor, k: float) -> None:
        net.seconds = net.logged = net.seconds + k

    for note in (tells, shares):
        pipe = bp.Pipeline(Two(note), devices=stages(2), chunks=4)
        with pytest.raises(StateError, match=r"sets it on hops \[0, 1\]"):
            pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)


@dataclasses.dataclass
class Statistics:
    seen: float = 0.0


def test_an_object_that_is_compared_is_read():
    def note(net: Two, h: Tensor, k: float) -> None:
        net.statistics.seen = k

    net = Two(note, lambda net: 2.0 if net.statistics == Statistics(2.0) else 1.0)
    net.statistics = Statistics()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"'seen' of a Statistics, and sets it on hops \[0, 1\]"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)


class Noting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.seconds = time.perf_counter()
        return super().forward(x)


class Scaled(Noting):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.seconds


class Alters(nn.Linear):
    """What it sets is read by torch's own code."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.inner = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        self.inner.p = 0.25 if self.inner.p else 0.5
        return self.inner(super().forward(x))


@pytest.mark.parametrize(("kind", "is_fine"), [(Noting, True), (Scaled, False), (Alters, False)])
def test_a_module_that_two_stages_call_may_note_what_nobody_reads(kind, is_fine: bool):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = kind()

        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=0):
                x = self.shared(x)
            with bp.Block(stage=1):
                return self.shared(x)

    pipe = bp.Pipeline(Twice(), devices=stages(2), chunks=4)
    refused = pytest.raises(StateError, match=r"hops \[0, 1\]")
    with contextlib.nullcontext() if is_fine else refused:
        pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)


# --- what looks like a switch


class Says(nn.Module):
    """Sets a string from the loop's count, and truth values from data."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.step, self.message, self.is_large, self.mode = 0, "", False, "warm"

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.message = f"step {self.step}"
        with bp.Block(stage=1):
            h = self.b(h)
            self.is_large = bool(h.sum() > 0)
            return h if self.mode == "warm" else h * 2


def test_what_nobody_reads_is_no_switch():
    net = Says()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    recordings = []
    for net.step in range(6):
        sign = 1 if net.step % 2 else -1
        pipe.forward_backward(sign * torch.ones(4, 4) * 100, loss_fn=torch.sum)
        recordings.append(pipe.recording)
    assert len({id(recording) for recording in recordings[2:]}) == 1
    net.mode = "go"
    pipe.forward_backward(torch.ones(4, 4), loss_fn=torch.sum)
    assert pipe.recording is not recordings[-1], "this one the forward asks for"


# --- torch's cache of parametrized tensors


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + weight.T


@pytest.mark.parametrize("around", [True, False])
def test_parametrizations_that_are_cached_in_the_forward_are_refused(around: bool):
    """The cache is the process's: a micro-batch got another one's graph, which was gone by then."""

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            for layer in (self.a, self.b):
                parametrize.register_parametrization(layer, "weight", Symmetric())

        def forward(self, x: Tensor) -> Tensor:
            with parametrize.cached() if around else contextlib.nullcontext():
                with bp.Block(stage=0), parametrize.cached():
                    h = self.a(x)
                with bp.Block(stage=1), parametrize.cached():
                    return self.b(h)

    x = torch.randn(8, 4)
    with pytest.raises(StateError, match=r"parametrize\.cached\(\), .*leave it out"):
        bp.Pipeline(Caching(), devices=stages(2), chunks=4).forward_backward(x, loss_fn=torch.sum)
    net = Caching()
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="sequential")
    found = pipe.forward_backward(x, loss_fn=torch.sum)
    assert_close(found.loss, plain_step(plain, (x,), {}, None, torch.sum, 4))
    assert_same_gradients(net, plain)


def test_parametrizations_that_are_cached_around_an_evaluation_are_fine():
    """The recording left its fake tensors in the cache, and was refused for it."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in net:
        parametrize.register_parametrization(layer, "weight", Symmetric())
    pipe = bp.Pipeline(bp.begin_blocks(net, {"1": 1}), devices=stages(2), chunks=4)
    plain, x = copy.deepcopy(net), torch.randn(8, 4)
    with torch.no_grad(), parametrize.cached():
        found = pipe(x)
    with torch.no_grad():
        assert_close(found, plain.to(stages(1)[0])(x.to(stages(1)[0])))


# --- what one forward leaves for the next


class Rotary(nn.Module):
    """A table of its own, for the length that came last."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", 1 / 10 ** torch.arange(4.0))
        self.length = None

    def forward(self, x: Tensor) -> Tensor:
        if self.length != x.shape[1]:
            self.length = x.shape[1]
            positions = torch.arange(self.length, device=x.device).type_as(self.inverse)
            self.cos = torch.outer(positions, self.inverse).cos()
        return x * self.cos[: x.shape[1]]


class Follows(nn.Module):
    """It keeps what it has seen, and reads it back: no table."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = None

    def forward(self, x: Tensor) -> Tensor:
        scale = x.detach().abs().max()
        self.seen = scale if self.seen is None else torch.maximum(self.seen, scale)
        return x * self.seen


class FollowsNumbers(Follows):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = max(self.seen or 0.0, float(x.detach().abs().max()))
        return x * self.seen


class Shares(nn.Module):
    """Two stages call one module."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.shared = nn.Linear(4, 4), nn.Linear(4, 4), shared

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.shared(self.a(x))
        with bp.Block(stage=1):
            return self.shared(self.b(h))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_shared_module_may_make_a_table_at_its_first_call(schedule: str):
    net, loss_fn = Shares(Rotary()), nn.functional.mse_loss
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    for length in (3, 3, 5, 5, 3, 3):
        x, y = torch.randn(8, length, 4), torch.randn(8, length, 4)
        found = pipe.forward_backward(x, target=y, loss_fn=loss_fn)
        assert_close(found.loss, plain_step(plain, (x,), {}, y, loss_fn, 4))
    assert_same_gradients(net, plain)


@pytest.mark.parametrize("kind", [Follows, FollowsNumbers])
def test_a_shared_module_that_follows_the_data_is_refused(kind: type[nn.Module]):
    pipe = bp.Pipeline(Shares(kind()), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"changes shared\.seen, and calls 'shared' on hops"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)


class Auxiliary(nn.Module):
    """Each forward empties a list, its stages add to it, and the last one adds it up."""

    def __init__(self, empties) -> None:
        super().__init__()
        self.a, self.b, self.losses, self.empties = nn.Linear(4, 4), nn.Linear(4, 4), [], empties

    def forward(self, x: Tensor) -> Tensor:
        self.empties(self)
        with bp.Block(stage=0):
            h = self.a(x)
            self.losses.append(h.square().mean())
        with bp.Block(stage=1):
            h = self.b(h)
            self.losses.append(h.square().mean())
            return h + sum(self.losses)


def _clear(net: Auxiliary) -> None:
    net.losses.clear()


def _cut(net: Auxiliary) -> None:
    del net.losses[:]


@pytest.mark.parametrize("empties", [_clear, _cut])
def test_a_list_that_each_forward_empties_and_several_stages_fill_is_refused_at_once(empties):
    """Another micro-batch emptied it in between: an error in some later step, or a sum too small."""
    x = torch.randn(8, 4)
    with pytest.raises(StateError, match=r"changes a list.* on hops \[0, 1\]"):
        bp.Pipeline(Auxiliary(empties), devices=stages(2), chunks=4).forward_backward(
            x, loss_fn=torch.sum
        )
    net = Auxiliary(empties)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="sequential")
    found = pipe.forward_backward(x, loss_fn=torch.sum)
    assert_close(found.loss, plain_step(plain, (x,), {}, None, torch.sum, 4))
    assert_same_gradients(net, plain)
