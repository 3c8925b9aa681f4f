"""What libraries' modules read where they are called: nobody traces their code."""

import dataclasses
import time
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..alike import check_trains_alike
from ..models import square
from ..stage_devices import stages


class Sets(nn.Module):
    """Sets a slope on the first stage, which a library's module of a plain container has."""

    def __init__(self, held: Any, *, called_on: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.held, self.called_on, self.n = held, called_on, 0

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.n += 1
            self.held[0].negative_slope = 0.1 * self.n
            if self.called_on == 0:
                h = self.held[0](h)
        with bp.Block(stage=1):
            h = self.b(h)
            return self.held[0](h) if self.called_on else h


@pytest.mark.parametrize("container", [list, lambda modules: {0: modules[0]}, nn.ModuleList])
def test_an_attribute_of_a_module_that_another_stage_calls_is_refused(container: Any):
    """Attack 23: in a plain list, micro-batches under way at once changed it for each other."""
    net = Sets(container([nn.LeakyReLU(0.5)]), called_on=1)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="negative_slope"):
        pipe.forward_backward(torch.randn(8, 4), target=torch.randn(8, 4), loss_fn=mse_loss)


def test_an_attribute_of_a_module_that_its_own_stage_calls_is_its_own():
    """Only where another stage calls the module does it matter."""
    check_trains_alike(Sets([nn.LeakyReLU(0.5)], called_on=0))


class Parametrized(Sets):
    """Gives such a module a parameter of each micro-batch's."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.n += 1
            self.held[0].weight = nn.Parameter(torch.full((1,), 0.1 * self.n))
        with bp.Block(stage=1):
            time.sleep(0.05)
            return self.held[0](self.b(h))


class Kept(Sets):
    """Keeps a parameter of each micro-batch's in a dictionary."""

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.n += 1
            self.held["weight"] = nn.Parameter(torch.full((4,), 0.1 * self.n))
        with bp.Block(stage=1):
            time.sleep(0.05)
            return self.b(h) * self.held["weight"]


@pytest.mark.cpu("on accelerators one thread runs the forwards, one after the other")
@pytest.mark.parametrize(("kind", "held"), [(Parametrized, [nn.PReLU()]), (Kept, {})])
def test_a_parameter_of_another_micro_batch_is_refused(kind: type[Sets], held: Any):
    """A parameter that the forward made was nobody's: another micro-batch's was read."""
    pipe = bp.Pipeline(kind(held, called_on=1), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="belongs to micro-batch"):
        [pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum) for _ in range(3)]


def test_a_value_of_a_configuration_that_a_librarys_module_reads_is_refused():
    """Attack 23: one stage set it, and the code of the other one's module was not looked at."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=8)

    class Configures(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.n = nn.Linear(8, 8), transformers.GPT2Model(config), 0

        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=0):
                self.n += 1
                config.use_cache = self.n % 2 == 0
                h = self.a(x)
            with bp.Block(stage=1):
                return self.b(inputs_embeds=h).last_hidden_state

    pipe = bp.Pipeline(Configures(), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="use_cache"):
        pipe.forward_backward(torch.randn(8, 3, 8), loss_fn=torch.sum)


class Asks(nn.Module):
    """One stage sets an attribute of a library's object, and the other one calls its methods."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(4, 4), nn.Linear(4, 4), kind
        if kind == "metric":
            self.held: Any = pytest.importorskip("torchmetrics").MeanMetric()
        elif kind == "parameters":
            self.held = nn.ParameterDict({"n": 0})
        elif kind == "mapped":
            self.held = pytest.importorskip("transformers").GPT2Config()
        else:
            self.held = pytest.importorskip("transformers").PretrainedConfig(n=0)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            x = self.a(x)
            if self.kind == "metric":
                self.held.update(1.0)
            elif self.kind == "parameters":
                self.held.update({"n": self.held["n"] + 1})
            elif self.kind == "mapped":
                self.held.n_layer += 1
            else:
                self.held.n += 1
        with bp.Block(stage=1):
            x = self.b(x)
            if self.kind == "metric":
                return x * self.held.update_count
            if self.kind == "parameters":
                return x * self.held["n"]
            if self.kind == "mapped":  # to n_layer, by the class
                return x * self.held.num_hidden_layers
            return x * self.held.to_dict()["n"]


@pytest.mark.parametrize("kind", ["configuration", "mapped", "metric", "parameters"])
def test_what_a_librarys_method_reads_of_an_object_is_refused(kind: str) -> None:
    """By the method's code, or that of a property: other numbers, silently."""
    pipe = bp.Pipeline(Asks(kind), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="under way at once"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=square)


class Stats(UserDict[str, float]):
    """A class of the user's with the methods of a library's."""


class Keeps(nn.Module):
    """One stage counts by an entry, and the other one reads by a method that it inherits."""

    def __init__(self, reads: Callable[[Stats], float]) -> None:
        super().__init__()
        self.a, self.b, self.stats, self.reads = nn.Linear(4, 4), nn.Linear(4, 4), Stats(n=0), reads

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.stats["n"] += 1
            x = self.a(x)
        with bp.Block(stage=1):
            return self.b(x) * self.reads(self.stats)


@pytest.mark.parametrize(
    "reads", [lambda s: s["n"], lambda s: s.get("n", 0), lambda s: sum(s.values()), len]
)
def test_what_a_class_of_the_users_keeps_in_a_librarys_is_refused(
    reads: Callable[[Stats], float],
) -> None:
    """By a method that is inherited: other numbers, silently."""
    pipe = bp.Pipeline(Keeps(reads), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="under way at once"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=square)


@dataclasses.dataclass
class Found:
    """Has a list that one stage fills."""

    names: list[int] = dataclasses.field(default_factory=list)


class Tells(nn.Module):
    """One stage fills a list in an object, and the other one hands the object to a library."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.found = nn.Linear(4, 4), nn.Linear(4, 4), Found()

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.found.names.append(1)
            x = self.a(x)
        with bp.Block(stage=1):
            return self.b(x) * len(dataclasses.astuple(self.found)[0])


def test_what_an_object_has_when_it_is_handed_to_a_library_is_read() -> None:
    """Its containers, too: other numbers, silently."""
    pipe = bp.Pipeline(Tells(), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="changes a list"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=square)


class Sparse(nn.Module):
    """One stage sets an entry of a library's array, and the other one sums it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.table = pytest.importorskip("scipy.sparse").csr_array(np.eye(2))

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            x = self.a(x)
            self.table.data[0] = x.sum().item()
        with bp.Block(stage=1):
            return self.b(x) * float(self.table.sum())


def test_arrays_that_a_librarys_object_holds_are_read_where_it_is_used() -> None:
    """Other numbers, silently."""
    pipe = bp.Pipeline(Sparse(), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="changes an ndarray"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=square)


class Measured(nn.Module):
    """Its second stage calls a metric, and its first one reads it."""

    def __init__(self, metric: nn.Module, read: Callable[[Any], Tensor], *, on: int) -> None:
        super().__init__()
        self.a, self.b, self.metric = nn.Linear(4, 4), nn.Linear(4, 4), metric
        self.read, self.on = read, on

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x) * (1 + self.read(self.metric)) if self.on == 0 else self.a(x)
        with bp.Block(stage=1):
            self.metric(h.detach().abs().mean())
            h = self.b(h)
            return h * (1 + self.read(self.metric)) if self.on else h


@pytest.mark.cpu("a metric of torchmetrics keeps its state on the host")
@pytest.mark.parametrize("on", [0, 1])
@pytest.mark.parametrize(
    "read",
    [lambda metric: metric.sum_value.item(), lambda metric: metric.sum_value],
    ids=["number", "tensor"],
)
def test_what_the_call_of_a_librarys_module_replaces_is_refused_where_another_stage_reads_it(
    read: Callable[[Any], Tensor], on: int
) -> None:
    """Attack 41: in a metric that is called, and not updated, it was another micro-batch's."""
    torchmetrics = pytest.importorskip("torchmetrics")
    net = Measured(torchmetrics.SumMetric(), read, on=on)
    if on:
        check_trains_alike(net)
        return
    with pytest.raises(StateError, match="sum_value|belongs to micro-batch"):
        check_trains_alike(net)


@pytest.mark.cpu("a metric of torchmetrics keeps its state on the host")
@pytest.mark.filterwarnings("ignore:The ``compute``")
def test_what_a_method_of_a_library_reads_is_refused_where_another_stage_replaces_it():
    """The method is put around itself in the object."""
    torchmetrics = pytest.importorskip("torchmetrics")
    net = Measured(torchmetrics.SumMetric(), lambda metric: metric.compute().item(), on=0)
    with pytest.raises(StateError, match="under way at once"):
        check_trains_alike(net)


class TwoMetrics(nn.Module):
    """Its second stage updates a metric, and calls another one."""

    def __init__(self, updated: Any, called: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.updated, self.called = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            updated,
            called,
        )

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            h = self.b(h)
            self.updated.update(h.detach().mean())
            self.called(h.detach().mean(), x.mean())
            return h


@pytest.mark.cpu("a metric of torchmetrics keeps its state on the host")
def test_metrics_of_one_stage_may_be_updated_and_called() -> None:
    """Attack 46: the first run's tags of what it wrote to opened calls after their recording."""
    torchmetrics = pytest.importorskip("torchmetrics")
    net = TwoMetrics(torchmetrics.MeanMetric(), torchmetrics.MeanSquaredError())
    check_trains_alike(net)
    assert (int(net.updated.weight), int(net.called.total)) == (8, 8)  # micro-batches
