"""Plain values that a recomputed module sets, and that later forwards read."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages

Use = Callable[["Wide", Tensor], Tensor]
X = torch.randn(8, 4)


class State:
    """An object that a module holds."""

    def __init__(self) -> None:
        self.count = 0


class Wide(nn.Module):
    """Saves much; a test says what it does besides."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.use, self.up, self.down = use, nn.Linear(4, 32), nn.Linear(32, 4)
        self.count, self.counter, self.seen, self.state = 0, itertools.count(1), [1.0], State()

    def forward(self, h: Tensor) -> Tensor:
        return self.use(self, h)

    def wide(self, h: Tensor) -> Tensor:
        return self.down(self.up(h).tanh().exp().sin())


class Net(nn.Module):
    """Two stages, the first with such a module and with code of its own around it."""

    def __init__(self, use: Use, *, divides: bool = False, sets: bool = False) -> None:
        super().__init__()
        self.a, self.middle, self.b = nn.Linear(4, 4), Wide(use), nn.Linear(4, 4)
        self.divides, self.sets = divides, sets

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            if self.sets:
                self.middle.count = x.detach().abs().sum().item()
            h = self.middle(self.a(x))
            h = h / self.middle.count if self.divides else h
        with bp.Block(stage=1):
            return self.b(h)


def _step(net: Net, schedule: str) -> None:
    plain = copy.deepcopy(net)
    options = {"chunks": 4, "schedule": schedule, "checkpoint": "always"}
    pipe = bp.Pipeline(net, devices=stages(2), **options)
    for _ in range(2):
        plain_step(plain, (X,), {}, X, mse_loss, 4)
        pipe.forward_backward(X, target=X, loss_fn=mse_loss)
    assert pipe.recording.recomputable["middle"].is_recomputed
    assert_same_gradients(net, plain)


def _divides_by_a_count(module: Wide, h: Tensor) -> Tensor:
    module.count += 1
    return module.wide(h) / module.count


def _divides_by_an_objects(module: Wide, h: Tensor) -> Tensor:
    module.state.count += 1
    return module.wide(h) / module.state.count


def _divides_by_an_iterators(module: Wide, h: Tensor) -> Tensor:
    count = next(module.counter)
    return module.wide(h) / count


def _divides_by_an_element(module: Wide, h: Tensor) -> Tensor:
    module.seen[0] += 1
    return module.wide(h) / module.seen[0]


def _counts(module: Wide, h: Tensor) -> Tensor:
    module.count += 1
    return module.wide(h)


@pytest.mark.every
@pytest.mark.parametrize("schedule", ["1f1b", "sequential"])
@pytest.mark.parametrize(
    ("use", "divides", "what"),
    [
        (_divides_by_a_count, False, r"middle\.count"),
        (_divides_by_an_objects, False, "attribute 'count' of a State"),
        (_divides_by_an_iterators, False, "a count"),
        (_divides_by_an_element, False, "a list"),
        (_counts, True, r"middle\.count"),
    ],
)
def test_a_count_that_later_forwards_read_when_a_recomputation_counts_too_is_refused(
    use: Use, what: str, schedule: str, *, divides: bool
) -> None:
    """Nothing that is saved depends on it, so that only the numbers of later micro-batches did."""
    with pytest.raises(
        StateError,
        match=rf"'middle' on stage 0 sets {what}, which the next forward reads \(.*counts\.py:\d+\)"
        r", and set it once more when it was recomputed for micro-batch 0.*is_recomputing\(\)",
    ):
        _step(Net(use, divides=divides), schedule)


def _asks(module: Wide, h: Tensor) -> Tensor:
    if not bp.is_recomputing():
        module.count += 1
    return module.wide(h) / module.count


def _counts_at_the_end(module: Wide, h: Tensor) -> Tensor:
    h = module.wide(h)
    module.count += 1
    return h / module.count


def _reads(module: Wide, h: Tensor) -> Tensor:
    return module.wide(h) / module.count


@pytest.mark.every
@pytest.mark.parametrize("schedule", ["1f1b", "sequential"])
@pytest.mark.parametrize(
    ("use", "sets"), [(_asks, False), (_counts_at_the_end, False), (_counts, False), (_reads, True)]
)
def test_a_count_when_no_recomputation_changes_what_forwards_read_is_fine(
    use: Use, schedule: str, *, sets: bool
) -> None:
    """It asks, or counts behind what is saved, or counts only; or its forward sets another one."""
    _step(Net(use, sets=sets), schedule)


def _most(module: Wide, h: Tensor) -> Tensor:
    module.count = max(module.count, h.detach().abs().max().item() // 100)
    return module.wide(h / (1 + module.count))


def _outliers(module: Wide, h: Tensor) -> Tensor:
    module.seen.extend(one for one in h.detach().flatten().abs().tolist() if one > 100)
    return module.wide(h / len(module.seen))


def _table(module: Wide, h: Tensor) -> Tensor:
    module.state.__dict__.update({"count": 1} if h.detach().abs().max() > 100 else {})
    return module.wide(h / (1 + module.state.count))


def _by_a_function(module: Wide, h: Tensor) -> Tensor:
    (_nothing, _moves)[int(h.detach().abs().max() > 100)](module)
    return module.wide(h / (1 + module.state.count))


def _nothing(module: Wide) -> None:
    pass


def _moves(module: Wide) -> None:
    module.state.count = 1


@pytest.mark.every
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("use", [_most, _outliers, _table, _by_a_function])
def test_what_data_move_in_a_later_step_is_found_then(use: Use, schedule: str) -> None:
    """In the recording and in the first steps nothing changed, so that nobody compared."""
    net = Net(use)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule, checkpoint="always")
    for _ in range(3):
        loss = pipe.forward_backward(X, target=X, loss_fn=mse_loss).loss
        assert_close(loss, plain_step(plain, (X,), {}, X, mse_loss, 4))
    assert_same_gradients(net, plain)
    x = X.clone()
    x[3] *= 1e4
    with pytest.raises(StateError, match=r"recomputed"):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)


class Criterion(nn.Module):
    """Counts, or keeps a tensor that it writes to."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place, self.count = in_place, torch.zeros(()) if in_place else 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.count += 1
        return mse_loss(output, target)


class Warm(nn.Module):
    """The last stage is another one from the sixth loss on."""

    def __init__(self, criterion: Criterion, *, by_loss: bool) -> None:
        super().__init__()
        self.a, self.head, self.by_loss = nn.Linear(4, 4), Wide(self.use), by_loss
        self.criterion = [criterion]

    def use(self, module: Wide, h: Tensor) -> Tensor:
        is_warm = self.by_loss and self.criterion[0].count > 5
        return module.wide(h * 2 if is_warm else h)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            return self.head(h)


@pytest.mark.every
@pytest.mark.parametrize("schedule", ["1f1b", "sequential"])
@pytest.mark.parametrize("in_place", [False, True])
def test_what_the_loss_sets_is_compared_in_each_step(schedule: str, *, in_place: bool) -> None:
    """A loss comes between a forward and its recomputation."""
    criterion = Criterion(in_place=in_place)
    options = {"chunks": 4, "schedule": schedule, "checkpoint": "always"}
    pipe = bp.Pipeline(Warm(criterion, by_loss=True), devices=stages(2), **options)
    pipe.forward_backward(X, target=X, loss_fn=criterion)
    with pytest.raises(StateError, match=r"'head' on stage 1 saved .* when it was recomputed"):
        pipe.forward_backward(X, target=X, loss_fn=criterion)


def test_a_loss_that_counts_for_itself_is_fine() -> None:
    criterion = Criterion(in_place=False)
    net = Warm(criterion, by_loss=False)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, checkpoint="always")
    for _ in range(3):
        pipe.forward_backward(X, target=X, loss_fn=criterion)
        plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert criterion.count == 12
    assert_same_gradients(net, plain)
