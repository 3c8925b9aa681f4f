"""State in branches that the recorded micro-batch did not take, and another one may."""

import copy
import functools
import operator
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ....parity import assert_same_gradients, plain_step
from ....stage_devices import assert_close, stages


class Keeps(nn.Module):
    """Keeps a statistic of what it returns on the model."""

    def __init__(self, model: "Net") -> None:
        super().__init__()
        self.layer, self.model = nn.Linear(4, 4), [model]

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.model[0].keep(h)
        return h


class Net(nn.Module):
    """Its first stage reads the statistic of the second one, if the data says so."""

    def __init__(self, keep: Callable[..., None], read: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), Keeps(self)
        self.last, self._keep, self._read = torch.zeros(()), keep, read

    def keep(self, h: Tensor) -> None:
        self._keep(self, h)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(x).tanh()
            if x.mean() > 0:
                h = h + self._read(self)
        with bp.Block(stage=1):
            return self.second(h)


def _always(net: Net, h: Tensor) -> None:
    net.last = h.detach().mean()


def _sometimes(net: Net, h: Tensor) -> None:
    if h.detach().mean() > 0:
        net.last = h.detach().mean()


def _tensor(net: Net) -> Tensor:
    return net.last * 0.5


def _number(net: Net) -> Tensor:
    return torch.tensor(net.last.item() * 0.5)


@pytest.mark.parametrize("keep", [_always, _sometimes])
@pytest.mark.parametrize("read", [_tensor, _number])
def test_a_read_in_a_branch_that_was_not_taken_is_refused(
    keep: Callable[..., None], read: Callable[..., Tensor]
) -> None:
    pipe = bp.Pipeline(Net(keep, read), devices=stages(2), chunks=2)
    x = torch.rand(8, 4) - 2  # no micro-batch takes the branch
    with pytest.raises(StateError, match=r"last"):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)


STATISTICS = {"last": 0.0}


def _entry(net: Net, h: Tensor) -> None:
    STATISTICS["last"] = h.detach().mean().item()


class Scope:
    """A context manager that reads an entry where it is entered."""

    def __init__(self, statistics: dict[str, float] = STATISTICS) -> None:
        self.statistics, self.scale = statistics, 0.0

    def __enter__(self) -> "Scope":
        self.scale = self.statistics["last"]
        return self

    def __exit__(self, *_: object) -> None:
        pass


class LeftScope(Scope):
    """One that reads it where it is left."""

    def __enter__(self) -> "Scope":
        return self

    def __exit__(self, *_: object) -> None:
        self.scale = STATISTICS["last"]


SCOPE = Scope()


def _enters(net: Net) -> Tensor:
    with Scope(STATISTICS) as scope:
        return torch.tensor(scope.scale)


def _enters_its_own(net: Net) -> Tensor:
    with torch.no_grad(), SCOPE:
        return torch.tensor(SCOPE.scale)


def _enters_one_of_two(net: Net) -> Tensor:
    with LeftScope() if net.training else Scope() as scope:
        pass
    return torch.tensor(scope.scale)


def _made_scope() -> Scope:
    return Scope()


def _enters_one_that_a_function_makes(net: Net) -> Tensor:
    with _made_scope() as scope:
        return torch.tensor(scope.scale)


class Reads(nn.Module):
    def __init__(self, statistics: dict[str, float]) -> None:
        super().__init__()
        self.statistics = statistics

    def forward(self, h: Tensor) -> Tensor:
        return h + self.statistics["last"]


LAYERS = [Reads(STATISTICS)]


class Window:
    """An object that syntax asks for its numbers, which are an entry."""

    def __init__(self, statistics: dict[str, float]) -> None:
        self.statistics = statistics

    def __iter__(self) -> Iterator[float]:
        yield self.statistics["last"]

    def __mul__(self, h: Tensor) -> Tensor:
        return h * self.statistics["last"]

    def __len__(self) -> int:
        return int(self.statistics["last"])

    def scaled(self) -> Tensor:
        return torch.tensor(self.statistics["last"])


def _reduces(net: Net) -> Tensor:
    return functools.reduce(lambda h, layer: layer(h), LAYERS, torch.zeros(()))


def _calls_by_name(net: Net) -> Tensor:
    return operator.methodcaller("scaled")(Window(STATISTICS))


class InBranch(Net):
    """The same, written in the branch itself."""

    def changed(self, x: Tensor, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(x).tanh()
            h = self.changed(x, h)
        with bp.Block(stage=1):
            return self.second(h)


class Enters(InBranch):
    def changed(self, x: Tensor, h: Tensor) -> Tensor:
        if x.mean() > 0:
            with Scope(STATISTICS) as scope:
                h = h + scope.scale
        return h


class LoopsOverNew(InBranch):
    def changed(self, x: Tensor, h: Tensor) -> Tensor:
        if x.mean() > 0:
            for scale in Window(STATISTICS):
                h = h + scale
        return h


class Multiplies(InBranch):
    def changed(self, x: Tensor, h: Tensor) -> Tensor:
        return Window(STATISTICS) * h if x.mean() > 0 else h


class Measures(InBranch):
    def changed(self, x: Tensor, h: Tensor) -> Tensor:
        return h * len(Window(STATISTICS)) if x.mean() > 0 else h


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        *((Net, read) for read in (_enters, _enters_its_own, _enters_one_of_two)),
        *((Net, read) for read in (_enters_one_that_a_function_makes, _reduces, _calls_by_name)),
        *((kind, _enters) for kind in (Enters, LoopsOverNew, Multiplies, Measures)),
    ],
)
def test_an_entry_that_an_object_made_in_a_branch_reads_counts(
    kind: type[Net], read: Callable[[Net], Tensor]
) -> None:
    pipe = bp.Pipeline(kind(_entry, read), devices=stages(2), chunks=2)
    x = torch.rand(8, 4) - 2  # no micro-batch takes the branch
    with pytest.raises(StateError, match=r"last"):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)


def test_a_read_on_the_stage_that_sets_it_is_not() -> None:
    class Later(Net):
        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=0):
                h = self.first(x).tanh()
            with bp.Block(stage=1):
                h = self.second(h)
                return h * self.last if x.mean() > 0 else h

    torch.manual_seed(0)
    net, plain = Later(_always, _tensor), Later(_always, _tensor)
    plain.load_state_dict(net.state_dict())
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    for shift in (-2.0, 1.0):
        x = torch.rand(8, 4) + shift
        net.zero_grad(), plain.zero_grad()
        expected = plain_step(plain, (x,), {}, x, mse_loss, 2)
        assert_close(pipe.forward_backward(x, target=x, loss_fn=mse_loss).loss, expected)
        assert_same_gradients(net, plain)


def test_a_list_that_a_variable_names_may_be_added_to_in_such_a_branch() -> None:
    def keep(net: Net, h: Tensor) -> None:
        kept = net.kept
        if h.mean() > 100:
            kept += [h.shape]

    net = Net(keep, lambda net: torch.tensor(float(len(net.kept))))
    net.kept = []
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    x = torch.rand(8, 4) + 1
    with pytest.raises(StateError, match=r"changes a list"):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)


class Level:
    """A number that operators, loops and questions read."""

    def __init__(self) -> None:
        self.value = 1.0

    def __add__(self, other: float) -> float:
        return self.value + other

    def __neg__(self) -> float:
        return -self.value

    def __iter__(self) -> Iterator[float]:
        yield self.value

    def __gt__(self, other: float) -> bool:
        return self.value > other

    def __bool__(self) -> bool:
        return self.value > 1

    def __contains__(self, other: float) -> bool:
        return other < self.value

    def __getattr__(self, name: str) -> float:
        if name == "missing":
            return self.value
        raise AttributeError(name)


class Levels(nn.Module):
    """Its first stage reads the level of the second one by syntax, if the data says so."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.level = nn.Linear(4, 4), nn.Linear(4, 4), Level()

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.read(x, self.a(x))
        with bp.Block(stage=1):
            h = self.b(h)
            self.level.value = 1.0 + h.abs().mean().item()
            return h

    def read(self, x: Tensor, h: Tensor) -> Tensor:
        raise NotImplementedError


class Adds(Levels):
    def read(self, x: Tensor, h: Tensor) -> Tensor:
        return h * (self.level + 0.0) if x.mean() > 0 else h


class Negates(Levels):
    def read(self, x: Tensor, h: Tensor) -> Tensor:
        return h * -self.level if x.mean() > 0 else h


class Loops(Levels):
    def read(self, x: Tensor, h: Tensor) -> Tensor:
        if x.mean() > 0:
            for value in self.level:
                h = h * value
        return h


class Compares(Levels):
    def read(self, x: Tensor, h: Tensor) -> Tensor:
        if x.mean() > 0 and self.level > 1.5:
            h = h * 2
        return h


class Asks(Levels):
    def read(self, x: Tensor, h: Tensor) -> Tensor:
        if x.mean() > 0:
            return h * 2 if self.level else h
        return h


class Contains(Levels):
    def read(self, x: Tensor, h: Tensor) -> Tensor:
        return h * (1.5 in self.level) if x.mean() > 0 else h


class Misses(Levels):
    def read(self, x: Tensor, h: Tensor) -> Tensor:
        return h * self.level.missing if x.mean() > 0 else h


@pytest.mark.parametrize("kind", [Adds, Negates, Loops, Compares, Asks, Contains, Misses])
def test_what_syntax_reads_in_a_branch_that_was_not_taken_is_refused(kind: type[Levels]) -> None:
    """Only calls and properties were followed there, and operators in functions that it calls."""
    pipe = bp.Pipeline(kind(), devices=stages(2), chunks=2)
    x = torch.rand(8, 4) - 2  # no micro-batch takes the branch
    with pytest.raises(StateError, match=r"value"):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)


class _Noisy(nn.Module):
    """Adds noise after some calls, by an option: from a generator that others may have as well."""

    def __init__(self, kind: str, generator: torch.Generator) -> None:
        super().__init__()
        self.kind, self.generator, self.calls = kind, generator, 0

    def add(self, h: Tensor) -> Tensor:
        if self.kind == "own":
            return h + torch.rand(h.shape, generator=self.generator)
        return h * 2

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        return self.add(h) if self.calls > 6 else h


@pytest.mark.parametrize("kind", ["none", "own"])
def test_what_a_helper_in_another_branch_draws_counts_unless_an_option_keeps_it_closed(
    kind: str,
) -> None:
    one = torch.Generator()
    net = nn.Sequential(nn.Linear(4, 4), _Noisy(kind, one), nn.Linear(4, 4), _Noisy(kind, one))
    plain = copy.deepcopy(net)
    bp.begin_blocks(net, {"2": 1})
    pipe, x = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4), torch.randn(8, 4)
    if kind == "own":
        with pytest.raises(StateError, match="torch.Generator is drawn from"):
            pipe.forward_backward(x, target=x, loss_fn=mse_loss)
        return
    for _ in range(3):
        net.zero_grad(), plain.zero_grad()
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)
        plain_step(plain, (x,), {}, x, mse_loss, 4)
        assert_same_gradients(net, plain)
