"""Plain values that follow from the sizes of micro-batches, set on one stage and read on another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError
from blockpipe.testing import split

pytestmark = pytest.mark.cpu("whether lanes mix in plain values is the host's question")


class Net(nn.Module):
    """Notes something on stage 0, and uses it on stage 2."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.n: Any = 0
        self.full, self.mean, self.seen = 3, 3.0, {2: 0, 3: 0}
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.note(x)
        x = self.first(x).tanh()
        with bp.Block(stage=1):
            x = self.second(x).tanh()
        with bp.Block(stage=2):
            return self.third(x) / (1 + self.value())

    def note(self, x: Tensor) -> None:
        raise NotImplementedError

    def value(self) -> Any:
        return self.n

    def bump(self) -> None:
        self.n += 1


class Flag(Net):
    def note(self, x: Tensor) -> None:
        self.n = 1 if x.size(0) < self.full else 0


class Branch(Net):
    def note(self, x: Tensor) -> None:
        if x.size(0) < self.full:
            self.n += 1


class Data(Net):
    def note(self, x: Tensor) -> None:
        if len(x) < self.full:
            self.n = float(x.detach().norm())


class Twice(Net):
    def note(self, x: Tensor) -> None:
        self.n = 0
        if x.shape[0] < self.full:
            self.n = 1


class Returns(Net):
    def note(self, x: Tensor) -> None:
        if x.size(0) >= self.full:
            return
        self.n += 1


class Loop(Net):
    def note(self, x: Tensor) -> None:
        for _ in range(self.full - x.size(0)):
            self.n += 1


class While(Net):
    def note(self, x: Tensor) -> None:
        i = x.shape[0]
        while i < self.full:
            self.n += 1
            i += 1


class Match(Net):
    def note(self, x: Tensor) -> None:
        match x.size(0):
            case 3:
                pass
            case _:
                self.n += 1


class Circuit(Net):
    def note(self, x: Tensor) -> None:
        _ = x.size(0) < self.full and self.bump()


class Comprehension(Net):
    def note(self, x: Tensor) -> None:
        _ = [self.bump() for size in x.shape if size == 2]


class Caught(Net):
    def note(self, x: Tensor) -> None:
        try:
            {3: 0}[x.size(0)]
        except KeyError:
            self.n += 1


class Mean(Net):
    def note(self, x: Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * x.size(0)

    def value(self) -> float:
        return self.mean


class Seen(Net):
    def note(self, x: Tensor) -> None:
        self.seen[x.size(0)] += 1

    def value(self) -> int:
        return self.seen[2]


class SeenBy(Seen):
    def note(self, x: Tensor) -> None:
        self.count(x.size(0))

    def count(self, n: int) -> None:
        self.seen[n] = self.seen.get(n, 0) + 1


class Mode(Net):
    def note(self, x: Tensor) -> None:
        self.inner.train(x.size(0) >= self.full)

    def value(self) -> int:
        return int(self.inner.training)


class ReadByKey(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.seen[2] += 1
        size = x.size(0)
        x = self.first(x)
        with bp.Block(stage=1):
            return self.third(x) / (1 + self.seen[size])


class ForEachLayer(Net):
    """Each stage has an entry of its own, whatever the size is."""

    def forward(self, x: Tensor) -> Tensor:
        for stage, layer in enumerate([self.first, self.second, self.third]):
            with bp.Block(stage=stage):
                self.seen[stage] = self.seen.get(stage, 0) + 1
                x = layer(x) / self.seen[stage]
        return x


class Longest(Net):
    """A module of all stages that keeps a table, which grows."""

    def __init__(self) -> None:
        super().__init__()
        self.longest, self.table = 3, torch.ones(3, 1)

    def scale(self, n: int) -> Tensor:
        if n > self.longest:
            self.longest = n
            self.table = torch.ones(n, 1)
        return self.table[:n]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scale(x.size(0))
        with bp.Block(stage=1):
            return self.third(x) * self.scale(x.size(0))


TURNING = [
    *(Flag, Branch, Data, Twice, Returns, Loop, While, Match, Circuit, Comprehension, Caught),
    *(Mean, Seen, SeenBy, Mode, ReadByKey),
]


def _batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 8, generator=generator), torch.randn(size, 8, generator=generator)


def _step(pipe: bp.Pipeline, step: int, size: int) -> float:
    x, y = _batch(step, size)
    return pipe.forward_backward(x, target=y, loss_fn=mse_loss).loss.item()


def _plain(net: Net, step: int, size: int) -> float:
    x, y = _batch(step, size)
    total = torch.zeros(())
    for part in split((x,), {}, y, 3):
        loss = mse_loss(net(*part.args), part.target) * (part.size / size)
        loss.backward()
        total = total + loss.detach()
    return total.item()


def _pipeline(net: Net) -> bp.Pipeline:
    return bp.Pipeline(net, devices=["cpu"] * 3, chunks=3)


def _recordings(pipe: bp.Pipeline) -> int:
    return len(pipe._preparer.known)


@pytest.mark.parametrize("kind", TURNING)
def test_a_recording_of_one_size_knows_what_others_change(kind: type[Net]) -> None:
    """Nothing of it happens at the recorded size, or it leaves the same value."""
    recording = bp.record(kind(), torch.zeros(3, 8))
    assert recording.settles or recording.turns_by_size
    assert not recording.shared_changes


@pytest.mark.parametrize("kind", TURNING)
def test_steps_with_several_sizes_are_the_plain_loops(kind: type[Net]) -> None:
    """Micro-batches have 3, 2 and 2 samples, in one order for all stages."""
    plain = kind()
    pipe = _pipeline(copy.deepcopy(plain))
    for step in range(4):
        assert _step(pipe, step, 7) == _plain(plain, step, 7)
    for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert theirs.grad is None or torch.equal(ours.grad, theirs.grad)


def test_entries_of_each_stage_turn_by_no_size() -> None:
    """A key that is the number of a layer follows from no size."""
    recording = bp.record(ForEachLayer(), torch.zeros(3, 8))
    assert not recording.settles
    assert not recording.turns_by_size


def test_real_runs_know_sizes_too() -> None:
    """A model that reads values is recorded for real, where a size is still no value."""

    class Reads(Branch):
        def value(self) -> float:
            return self.n + 0 * float(self.third.weight.sum())

    recording = bp.record(Reads(), torch.zeros(3, 8))
    assert not recording.fake
    assert recording.turns_by_size


def test_a_size_that_stays_is_recorded_where_it_changes_something() -> None:
    """The first step of another size runs one by one, and the second one finds the conflict."""
    plain = Branch()
    pipe = _pipeline(copy.deepcopy(plain))
    for step, size in enumerate([9, 7, 9, 6, 7, 6]):
        assert _step(pipe, step, size) == _plain(plain, step, size)
    assert _recordings(pipe) == 1
    with pytest.raises(StateError, match="attribute 'n' of the model"):
        _step(pipe, 6, 6)
    assert _step(pipe, 7, 9) == _plain(plain, 7, 9)


def test_a_size_that_stays_runs_on_lanes_again_where_it_changes_nothing() -> None:
    """A count that only sizes 7 and 8 change is constant for all others."""

    class Rare(Net):
        def note(self, x: Tensor) -> None:
            if x.size(0) in (7, 8):
                self.n += 1

    plain = Rare()
    pipe = _pipeline(copy.deepcopy(plain))
    for step, size in enumerate([9, 6, 6, 6, 9, 6]):
        assert _step(pipe, step, size) == _plain(plain, step, size)
    assert _recordings(pipe) == 2
    sizes = {prepared.recording.samples for prepared in pipe._preparer.known.values()}
    assert sizes == {2, 3}


@pytest.mark.parametrize("kind", [Flag, Longest])
def test_what_each_size_sets_anew_needs_no_recording(kind: type[Net]) -> None:
    """It settles in one step, and later steps of the size run on lanes."""
    plain = kind()
    pipe = _pipeline(copy.deepcopy(plain))
    for step, size in enumerate([9, 12, 12, 12, 6, 6, 7, 9]):
        assert _step(pipe, step, size) == _plain(plain, step, size)
    assert _recordings(pipe) == 1
    assert not pipe._preparer.recording.turns_by_size
