"""Values that a step sets for some data, and that its recording has not."""

import copy
import warnings
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockpipe as bp
from blockpipe.batches.microbatch import split
from blockpipe.errors import StateError
from blockpipe.execution.microbatch.attribute_uses import AttributeUses
from blockpipe.preparation.after_steps import second_looks
from blockpipe.preparation.watched.watched_values import Change
from blockpipe.restoring.holders import DictHolder

from ...models import square
from ...parity import assert_same_gradients, plain_step
from ...stage_devices import assert_close, stages


class Expert(nn.Linear):
    load = 0.0


class Mixture(nn.Module):
    """The data choose what one stage sets; ``get`` says what the other one reads."""

    def __init__(self, put: Any, get: Any) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(4, 4) for _ in range(4))
        self.b, self.put, self.get, self.calm, self.wild = nn.Linear(4, 4), put, get, 1.0, 1.0
        self.loads, self.stats = {}, {"calm": 0.0, "wild": 0.0}

    def forward(self, x: Tensor) -> Tensor:
        k = int(x.max() > 5) * 2
        with bp.Block(stage=0):
            h = self.experts[k](x)
            self.put(self, k, float(h.detach().abs().mean()))
        with bp.Block(stage=1):
            return self.b(h) * (1 + self.get(self))


def _own(net: Any, k: int, value: float) -> None:
    for index, expert in enumerate(net.experts):
        if index == k:
            expert.load = value


PUTS = {
    "the attribute of an expert": (
        lambda net, k, v: setattr(net.experts[k], "load", v),
        lambda net: net.experts[2].load,
    ),
    "in a loop": (_own, lambda net: net.experts[2].load),
    "an entry": (lambda net, k, v: net.loads.update({k: v}), lambda net: net.loads.get(2, 0.0)),
    "an entry by name": (
        lambda net, k, v: net.stats.__setitem__("wild" if k else "calm", v),
        lambda net: net.stats["wild"],
    ),
    "a name": (
        lambda net, k, v: setattr(net, "wild" if k else "calm", v),
        lambda net: net.wild,
    ),
    "a mode": (
        lambda net, k, v: k and net.experts[2].train(v < 0),
        lambda net: float(net.experts[2].training),
    ),
}


def _batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(16, 4), torch.randn(16, 4)
    x[4:10] += 6  # of eight micro-batches, the third to the fifth; the first is recorded
    return x, y


@pytest.mark.parametrize("name", PUTS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_the_data_choose_to_set_is_looked_at_when_a_step_sets_it(name: str, schedule: str):
    """The recording's micro-batch had set another one; each step was wrong, without a word."""
    net = Mixture(*PUTS[name])
    pipe = bp.Pipeline(net, devices=stages(2), chunks=8, schedule=schedule)
    x, y = _batch()
    with pytest.raises(StateError, match=r"during the step|on hops \[0\]"):
        pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)


def test_what_is_set_by_one_stage_alone_goes_on():
    net = Mixture(PUTS["the attribute of an expert"][0], lambda net: 0.0)
    plain = Mixture(net.put, net.get)
    plain.load_state_dict(net.state_dict())
    pipe = bp.Pipeline(net, devices=stages(2), chunks=8, schedule="gpipe")
    x, y = _batch()
    for _ in range(3):
        found = pipe.forward_backward(x, target=y, loss_fn=F.mse_loss).loss
        wanted = plain_step(plain, (x,), {}, y, F.mse_loss, 8)
        assert_close(found, wanted)
    assert_same_gradients(plain, net)
    assert net.experts[2].load == pytest.approx(plain.experts[2].load)


def test_there_is_an_end_of_looking():
    """Values at ever other places are let be after some recordings, with a warning."""

    def puts(net: Any, k: int, value: float) -> None:
        net.loads[f"{value:.9f}"] = value

    net = Mixture(puts, lambda net: 0.0)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(24):
            pipe.forward_backward(torch.randn(4, 4), loss_fn=torch.sum)
    told = [str(one.message) for one in caught if "nobody looks whether" in str(one.message)]
    assert len(told) <= 1


def test_nobody_looks_behind_the_end():
    """Sixteen recordings, one warning, and then none."""
    net = Mixture(lambda net, k, value: None, lambda net: 0.0)
    x, _ = _batch()
    recording = bp.record(net, x)
    looks, batches, recorded = second_looks.SecondLooks(net), split((x,), {}, None, 1, None), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(20):
            change = Change(DictHolder({}, object()), f"name {step}", 1.0)
            looks.at_values(
                recording, [change], batches, "gpipe", lambda b: recorded.append(b) or recording
            )
    assert len(recorded) == 16
    assert ["nobody looks" in str(one.message) for one in caught] == [True]


def test_a_look_that_an_interrupt_ends_is_made_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(AttributeUses, "sets", Mock())  # else nobody looks at all
    net = Mixture(*PUTS["the attribute of an expert"])
    pipe = bp.Pipeline(net, devices=stages(2), chunks=8, schedule="1f1b")
    x, y = _batch()
    pipe.forward_backward(torch.zeros_like(x), target=y, loss_fn=F.mse_loss)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt("now")

    with monkeypatch.context() as patched:
        patched.setattr(second_looks, "RestoredWhole", interrupted)
        with pytest.raises(KeyboardInterrupt, match="now"):
            pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
    with pytest.raises(StateError, match="experts.2.load was set during the step"):
        pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)


class Recent(nn.Module):
    """The second stage keeps its latest keys, which the data choose, and how often they came."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.recent = nn.Linear(4, 4), nn.Linear(4, 4), {}
        self.norms: dict[Any, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            k = int(h.detach().sum().abs() * 10) % 5
            self.recent[k] = self.recent.pop(k, 0) + 1
            if len(self.recent) > 3:
                del self.recent[next(iter(self.recent))]
            for parameter in self.b.parameters():
                self.norms[parameter] = self.norms.get(parameter, 0.0) + 1.0
            return self.b(h)


def test_a_look_leaves_keys_in_their_order():
    """Those that the step has added are out of the dictionary meanwhile; parameters may be keys."""
    net = Recent()
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="gpipe")
    for _ in range(4):
        x = torch.randn(8, 4)
        pipe.forward_backward(x, loss_fn=square)
        plain_step(plain, (x,), {}, None, square, 4)
        assert [*net.recent.items()] == [*plain.recent.items()]
        assert [p.shape for p in net.norms] == [p.shape for p in plain.norms]


class Norms:
    """Collects norms of gradients by name."""

    def __init__(self) -> None:
        self.stats: dict[str, dict[str, float]] = {}
        self.latest: dict[str, float] = {}

    def note(self, name: str, gradient: Tensor) -> None:
        stats = self.stats.setdefault(name, {"mean": 0.0, "max": 0.0, "n": 0})
        norm = gradient.norm().item()
        stats["mean"] = 0.9 * stats["mean"] + 0.1 * norm
        stats["max"] = max(stats["max"], norm)
        stats["n"] += 1

    def keep(self, name: str, gradient: Tensor) -> None:
        self.latest.update({name: self.latest.get(name, 0.0) + gradient.norm().item()})


@pytest.mark.parametrize("way", [Norms.note, Norms.keep])
def test_what_hooks_set_is_not_looked_at_again(
    way: Any, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Their source has told it. Each of the first steps recorded all its micro-batches."""
    net = bp.begin_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"1": 1})
    norms = Norms()

    def register(name: str, parameter: nn.Parameter) -> None:
        parameter.register_hook(lambda gradient: way(norms, name, gradient))

    for name, parameter in net.named_parameters():
        register(name, parameter)
    monkeypatch.setattr(second_looks.SecondLooks, "_recorded", lambda *_: pytest.fail("recorded"))
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    for _ in range(3):
        pipe.forward_backward(torch.randn(4, 4), loss_fn=torch.sum)
    assert {*norms.stats, *norms.latest} == {name for name, _ in net.named_parameters()}
    assert not recwarn.list
    if way is Norms.note:
        assert {one["n"] for one in norms.stats.values()} == {6}


class OneStage(nn.Module):
    """Two hooks of one stage: one writes into a table, and the other one reads an entry."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.norms = {"n": 1.0}
        self.c.register_full_backward_hook(self.note)
        self.b.register_full_backward_hook(self.clip)

    def note(self, module: nn.Module, inner: Any, outer: Any) -> None:
        self.norms.update(n=outer[0].norm().item())

    def clip(self, module: nn.Module, inner: Any, outer: Any) -> tuple[Tensor]:
        return (inner[0] / max(1.0, self.norms["n"]),)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x).tanh()
        with bp.Block(stage=1):
            return self.c(self.b(h).tanh())


def test_an_entry_of_a_table_that_code_changes_as_a_whole_is_no_surprise(
    recwarn: pytest.WarningsRecorder,
) -> None:
    net, plain = OneStage(), OneStage()
    plain.load_state_dict(net.state_dict())
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    for _ in range(3):
        net.zero_grad(), plain.zero_grad()
        pipe.forward_backward(x, target=y, loss_fn=F.mse_loss)
        plain_step(plain, (x,), {}, y, F.mse_loss, 4)
        assert_same_gradients(plain, net)
    assert not recwarn.list
