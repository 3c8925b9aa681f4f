"""Branches that later forwards take and that write to what backwards or recomputations need."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages

X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(0, 1, 32).view(8, 4)
HOT = torch.cat([X[:2], X[2:4] + 5, X[4:6], X[6:] + 5])


class Layer(nn.Module):
    """Reads its state, and writes to it where the data are large."""

    copies = False

    def __init__(self, write: Callable[["Layer", Tensor], object]) -> None:
        super().__init__()
        self.lin, self.write = nn.Linear(4, 4), write
        self.scale, self.norm = nn.Parameter(torch.ones(4)), nn.BatchNorm1d(4).eval()
        self.plain, self.number = torch.ones(4), 1.0
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x).tanh() * (self.mean.clone() if self.copies else self.mean) * self.scale
        h = self.norm(h * self.plain.to(h.device) * self.number).sin()
        if x.max() > 3:
            self.write(self, h.detach().abs().mean(0))
        return h


def _net(write: Callable[[Layer, Tensor], object]) -> nn.Sequential:
    net = nn.Sequential(nn.Identity(), Layer(write), nn.Linear(4, 4))
    return bp.begin_blocks(net, {"2": 1})


def _other_memory(layer: Layer, mean: Tensor) -> None:
    layer.scale.data = layer.scale.data * 0.5


DATA: dict[str, Callable[[Layer, Tensor], object]] = {
    "a weight": lambda layer, mean: layer.scale.data.mul_(0.5),
    "a buffer": lambda layer, mean: layer.mean.data.copy_(mean),
    "a clamp": lambda layer, mean: layer.scale.data.clamp_(-0.5, 0.5),
    "other memory": _other_memory,
}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("way", DATA)
def test_a_write_by_data_in_a_later_branch_is_refused_where_a_backward_needs_it(
    way: str, schedule: str
) -> None:
    """No version counts it, so that autograd had the values of a later micro-batch."""
    net = _net(DATA[way])
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    for _ in range(2):
        pipe.forward_backward(X, target=Y, loss_fn=mse_loss)
    with pytest.raises(StateError, match="may write to (parameter|buffer) '1"):
        pipe.forward_backward(HOT, target=Y, loss_fn=mse_loss)


class Turns(nn.Module):
    """A norm that learns its statistics where the data are large."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        self.norm.train(bool(x.max() > 3))
        return self.norm(self.lin(x)).tanh()


def test_statistics_that_a_later_forward_learns_are_refused_where_a_backward_needs_them() -> None:
    """A norm that does not learn has them saved, and torch counts no version of them."""
    net = bp.begin_blocks(nn.Sequential(Turns(), nn.Linear(4, 4)), {"1": 1})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="gpipe")
    pipe.forward_backward(X, target=Y, loss_fn=mse_loss)
    with pytest.raises(StateError, match=r"may write to buffer '0.norm.running_mean'"):
        pipe.forward_backward(HOT, target=Y, loss_fn=mse_loss)


class Counts(nn.Module):
    """A norm that learns its statistics now and then: ``mode`` says when."""

    def __init__(self, mode: Callable[["Counts", Tensor], object]) -> None:
        super().__init__()
        self.lin, self.norm, self.n, self.mode = nn.Linear(4, 4), nn.BatchNorm1d(4), 0, mode

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        self.mode(self, x)
        return self.norm(self.lin(x)).tanh()


def _by_attribute(net: Counts, x: Tensor) -> None:
    net.norm.training = net.n % 3 != 0


def _by_branch(net: Counts, x: Tensor) -> None:
    if net.n % 3 == 0:
        net.norm.eval()
    else:
        net.norm.train()


MODES: dict[str, Callable[[Counts, Tensor], object]] = {
    "a count": lambda net, x: net.norm.train(net.n % 3 != 0),
    "an attribute": _by_attribute,
    "a branch": _by_branch,
    "data": lambda net, x: net.norm.train(bool(x.max() > 0)),
    "data in a branch": lambda net, x: net.norm.train() if x.max() > 0 else net.norm.eval(),
}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("mode", MODES)
def test_a_norm_that_may_leave_off_learning_is_refused_where_backwards_are_late(
    mode: str, schedule: str
) -> None:
    """It is recorded as it learns, and its backward then reads no statistics."""
    net = bp.begin_blocks(nn.Sequential(Counts(MODES[mode]), nn.Linear(4, 4)), {"1": 1})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    with pytest.raises(StateError, match=r"writes? to buffer '0.norm.running_mean'"):
        pipe.forward_backward(HOT, target=Y, loss_fn=mse_loss)


def _piped(net: nn.Sequential, schedule: str) -> bp.Pipeline:
    net = bp.begin_blocks(net, {"1": 1})
    return bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)


class ChecksNowAndThen(nn.Module):
    """Runs a module that keeps statistics in a checkpoint, in each second forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.lin, self.inner, self.n = nn.Linear(4, 4), inner, 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        h = self.lin(x)
        return checkpoint(self.inner, h, use_reentrant=False) if self.n % 2 == 0 else h


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_checkpoint_of_a_norm_that_no_recording_has_met_is_refused(schedule: str) -> None:
    """Attack 49: the norm learned once more, behind later forwards."""
    net = nn.Sequential(ChecksNowAndThen(nn.BatchNorm1d(4)), nn.Linear(4, 4))
    pipe = _piped(net, schedule)
    with pytest.raises(StateError, match="torch.utils.checkpoint began on stage 0"):
        pipe.forward_backward(X, target=Y, loss_fn=mse_loss)


class ReadsAgain(nn.Module):
    """Runs a function in a checkpoint, in each second forward; ``sets`` says what forwards set."""

    def __init__(self, sets: str, read: Callable[["ReadsAgain", Tensor], Tensor]) -> None:
        super().__init__()
        self.lin, self.n, self.sets, self.read = nn.Linear(4, 4), 0, sets, read
        self.scale, self.mask, self.still = 1.0, torch.ones(4), torch.ones(4)
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x).tanh()
        self.n += 1
        if self.sets == "scale":
            self.scale *= 0.9
        elif self.sets == "mask":
            self.mask = (h.detach().mean(0) > 0).float()
        elif self.sets == "mean":
            self.mean.mul_(0.9).add_(h.detach().mean(0))
        return checkpoint(self.again, h, use_reentrant=False) if self.n % 2 == 0 else h

    def again(self, h: Tensor) -> Tensor:
        return self.read(self, h).sin()


READS: dict[str, Callable[[ReadsAgain, Tensor], Tensor]] = {
    "scale": lambda net, h: h * net.scale,
    "mask": lambda net, h: h * net.mask,
    "mean": lambda net, h: h + net.mean,
}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("name", READS)
def test_what_a_checkpoint_reads_once_more_that_no_recording_has_met_is_refused(
    name: str, schedule: str
) -> None:
    """Attack 50: it read what a later forward had set."""
    net = nn.Sequential(ReadsAgain(name, READS[name]), nn.Linear(4, 4))
    pipe = _piped(net, schedule)
    with pytest.raises(StateError, match=f"changes 0.{name}|changes buffer|writes to buffer"):
        pipe.forward_backward(X, target=Y, loss_fn=mse_loss)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_checkpoint_that_reads_what_nobody_sets_trains_as_plain(schedule: str) -> None:
    net = nn.Sequential(
        ReadsAgain("", lambda net, h: h * net.still.to(h.device) * net.scale), nn.Linear(4, 4)
    )
    plain = copy.deepcopy(net)
    pipe = _piped(net, schedule)
    for _ in range(2):
        plain_step(plain, (X,), {}, Y, mse_loss, 4)
        pipe.forward_backward(X, target=Y, loss_fn=mse_loss)
        assert_same_gradients(net, plain)


class CountsAsItself(nn.BatchNorm1d):
    """A norm that says in its own forward whether it learns: ``ways`` of each count."""

    def __init__(self, ways: Callable[["CountsAsItself", Tensor], Tensor]) -> None:
        super().__init__(4)
        self.n, self.ways = 0, ways

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return self.ways(self, x)

    def normed(self, x: Tensor, learns: bool) -> Tensor:
        statistics = self.running_mean, self.running_var
        return F.batch_norm(x, *statistics, self.weight, self.bias, learns)


def _by_count(net: CountsAsItself, x: Tensor) -> Tensor:
    return F.batch_norm(x, net.running_mean, net.running_var, training=net.n % 3 != 0)


def _by_local_variable(net: CountsAsItself, x: Tensor) -> Tensor:
    learns = net.training and net.n % 3 == 0
    return F.batch_norm(x, net.running_mean, net.running_var, net.weight, net.bias, learns)


def _torchs_own_by_name(net: CountsAsItself, x: Tensor) -> Tensor:
    return torch.batch_norm(
        x, net.weight, net.bias, net.running_mean, net.running_var, net.n > 2, 0.1, 1e-5, False
    )


def _now_and_then_as_its_class(net: CountsAsItself, x: Tensor) -> Tensor:
    if net.n % 3:
        return F.batch_norm(x, net.running_mean, net.running_var, training=False)
    return nn.BatchNorm1d.forward(net, x)


def _mostly_as_its_class(net: CountsAsItself, x: Tensor) -> Tensor:
    if net.n % 3:
        return nn.BatchNorm1d.forward(net, x)
    return F.batch_norm(x, net.running_mean, net.running_var, training=False)


def _by_data(net: CountsAsItself, x: Tensor) -> Tensor:
    return F.batch_norm(x, net.running_mean, net.running_var, training=bool(x.mean() > 0))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(
    "ways",
    [
        *(_by_count, _by_local_variable, _torchs_own_by_name, _by_data),
        *(_now_and_then_as_its_class, _mostly_as_its_class),
    ],
)
def test_a_function_that_normalizes_and_may_learn_is_refused_where_backwards_are_late(
    ways: Callable[[CountsAsItself, Tensor], Tensor], schedule: str
) -> None:
    """Attack 49: a mode that is an argument, and a branch to the class's own forward."""
    layers = nn.Linear(4, 4), CountsAsItself(ways), nn.Linear(4, 4)
    net = bp.begin_blocks(nn.Sequential(*layers), {"2": 1})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    x = HOT * torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]).repeat(2, 1)
    with pytest.raises(StateError, match=r"writes? to buffer '1.running_mean'"):
        pipe.forward_backward(x, target=Y, loss_fn=mse_loss)


@pytest.mark.parametrize("learns", [lambda n: True, lambda n: False, lambda n: n.training])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_function_that_normalizes_in_one_mode_trains_as_plain(
    learns: Callable[[nn.Module], bool], schedule: str
) -> None:
    layers = (
        nn.Linear(4, 4),
        CountsAsItself(lambda n, x: n.normed(x, learns(n))),
        nn.Linear(4, 4),
    )
    net = nn.Sequential(*layers)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(
        bp.begin_blocks(net, {"2": 1}), devices=stages(2), chunks=4, schedule=schedule
    )
    for _ in range(2):
        net.zero_grad(), plain.zero_grad()
        plain_step(plain, (X,), {}, Y, mse_loss, 4)
        pipe.forward_backward(X, target=Y, loss_fn=mse_loss)
        assert_same_gradients(net, plain)


@pytest.mark.parametrize(
    ("mode", "stage", "schedule"),
    [
        (MODES["a count"], 1, "1f1b"),
        *((lambda net, x: net.norm.train(), 0, one) for one in ("1f1b", "gpipe")),
        *((lambda net, x: net.norm.eval(), 0, one) for one in ("1f1b", "gpipe")),
        *((lambda net, x: net.norm.train(net.training), 0, one) for one in ("1f1b", "gpipe")),
    ],
)
def test_a_norm_that_keeps_its_mode_or_whose_backwards_come_at_once_trains_as_plain(
    mode: Callable[[Counts, Tensor], object], stage: int, schedule: str
) -> None:
    layers: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4)]
    layers.insert(stage * 2, Counts(mode))
    net = nn.Sequential(*layers)
    plain = copy.deepcopy(net)
    net = bp.begin_blocks(net, {"1": 1})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    for _ in range(3):
        net.zero_grad(), plain.zero_grad()
        plain_step(plain, (X,), {}, Y, mse_loss, 4)
        pipe.forward_backward(X, target=Y, loss_fn=mse_loss)
        assert_same_gradients(net, plain)


def test_a_branch_that_is_never_taken_costs_no_refusal() -> None:
    net = _net(DATA["a weight"]).to(stages(1)[0])
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, checkpoint="always")
    for _ in range(3):
        loss = pipe.forward_backward(X, target=Y, loss_fn=mse_loss).loss
        x = X.to(stages(1)[0])
        assert_close(loss, plain_step(plain, (x,), {}, Y, mse_loss, 4))
        assert_same_gradients(net, plain)


STATE: dict[str, Callable[[Layer, Tensor], object]] = {
    "a number": lambda layer, mean: setattr(layer, "number", mean.sum().item()),
    "a tensor": lambda layer, mean: layer.plain.copy_(mean.cpu()),
    "another tensor": lambda layer, mean: setattr(layer, "plain", mean.cpu()),
}


@pytest.mark.parametrize("way", STATE)
def test_a_recomputation_that_finds_another_value_in_a_later_step_is_refused(way: str) -> None:
    """What was made again was compared in the first step alone."""
    net = _net(STATE[way])
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="gpipe", checkpoint="always")
    for _ in range(2):
        pipe.forward_backward(X, target=Y, loss_fn=mse_loss)
    with pytest.raises(StateError, match="with other numbers when it was recomputed"):
        pipe.forward_backward(HOT, target=Y, loss_fn=mse_loss)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "sequential"])
def test_a_buffer_that_a_later_branch_writes_is_recomputed_as_it_was(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was copied only where the recorded forward wrote to it."""
    monkeypatch.setattr(Layer, "copies", True)  # of what is saved otherwise, torch sees the write
    net = _net(lambda layer, mean: layer.mean.copy_(mean)).to(stages(1)[0])
    plain = copy.deepcopy(net)
    options = {"chunks": 4, "schedule": schedule, "checkpoint": "always"}
    pipe = bp.Pipeline(net, devices=stages(2), **options)
    for x in (X, X, HOT, X, HOT):
        loss = pipe.forward_backward(x, target=Y, loss_fn=mse_loss).loss
        x = x.to(stages(1)[0])
        assert_close(loss, plain_step(plain, (x,), {}, Y, mse_loss, 4))
        assert_same_gradients(net, plain)


class Decays(nn.Module):
    """Its bias, which autograd does not save, decays where the data are large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 3:
            with torch.no_grad():
                self.second.bias.mul_(0.5)
        return self.second(self.first(x).tanh())


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "sequential"])
def test_a_module_that_may_write_to_its_parameter_is_not_run_again(schedule: str) -> None:
    """Attack 47: each recomputation wrote once more."""
    net = bp.begin_blocks(nn.Sequential(Decays(), nn.Tanh(), Decays()), {"2": 1})
    plain = copy.deepcopy(net).to(stages(1)[0])
    options = {"chunks": 4, "schedule": schedule, "checkpoint": "always"}
    pipe = bp.Pipeline(net, devices=stages(2), **options)
    for x in (X, HOT, X, HOT):
        loss = pipe.forward_backward(x, target=Y, loss_fn=mse_loss).loss
        assert_close(loss, plain_step(plain, (x.to(stages(1)[0]),), {}, Y, mse_loss, 4))
    assert_close(net[2].second.bias, plain[2].second.bias)


class Parts(nn.Module):
    """Changes what it consists of."""

    def __init__(self, change: Callable[["Parts"], object]) -> None:
        super().__init__()
        self.first, self.second, self.change = nn.Linear(4, 8), nn.Linear(8, 4), change
        self.layers, self.frozen = nn.Sequential(), nn.Parameter(torch.zeros(4), False)

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 3:
            self.change(self)
        return self.layers(self.second(self.first(x).tanh()) + self.frozen)  # type: ignore[no-any-return]


def _another_parameter(parts: Parts) -> None:
    parts.frozen = nn.Parameter(parts.frozen + 1, requires_grad=False)


CHANGES: dict[str, Callable[[Parts], object]] = {
    "a layer more": lambda parts: parts.layers.append(nn.Softsign()),
    "another parameter": _another_parameter,
    "a hook": lambda parts: parts.second.register_forward_hook(lambda m, i, o: o * 1.1),
    "loaded weights": lambda parts: parts.second.load_state_dict(
        {name: tensor + 0.1 for name, tensor in parts.second.state_dict().items()}
    ),
}


@pytest.mark.filterwarnings("ignore:.*was written during the step")
@pytest.mark.parametrize("schedule", ["1f1b", "sequential"])
@pytest.mark.parametrize("way", CHANGES)
def test_a_recomputation_that_changes_a_module_once_more_is_refused(
    way: str, schedule: str
) -> None:
    """Attack 47: it was another module after each backward."""
    net = bp.begin_blocks(nn.Sequential(Parts(CHANGES[way]), nn.Linear(4, 4)), {"1": 1})
    options = {"chunks": 4, "schedule": schedule, "checkpoint": "always"}
    pipe = bp.Pipeline(net, devices=stages(2), **options)
    pipe.forward_backward(X, target=Y, loss_fn=mse_loss)
    with pytest.raises(StateError, match="once more when it was recomputed"):
        pipe.forward_backward(HOT, target=Y, loss_fn=mse_loss)
