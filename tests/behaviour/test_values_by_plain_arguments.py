"""Plain values that follow from lengths, texts and other arguments without tensors, set on one stage
and read on another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp

pytestmark = pytest.mark.cpu("whether lanes mix in plain values is the host's question")

TEXTS = ["a b", "c d", "e f", "a", "b", "dog", "a b c", "d e f", "g h i"]


class Net(nn.Module):
    """Notes something of its texts on stage 0, and uses it on stage 2."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.n: Any = 0
        self.seen = dict.fromkeys(TEXTS, 0)

    def forward(self, x: Tensor, texts: Any) -> Tensor:
        self.note(texts)
        x = self.first(x).tanh()
        with bp.Block(stage=1):
            x = self.second(x).tanh()
        with bp.Block(stage=2):
            return self.third(x) / (1 + self.value())

    def note(self, texts: Any) -> None:
        raise NotImplementedError

    def value(self) -> Any:
        return self.n


class Longest(Net):
    def note(self, texts: list[str]) -> None:
        self.n = max(len(text) for text in texts)


class Keeps(Net):
    def note(self, texts: list[str]) -> None:
        self.n = texts

    def value(self) -> Tensor:
        return torch.tensor([float(len(text)) for text in self.n])[:, None]


class Flag(Net):
    def note(self, texts: list[str]) -> None:
        self.n = float("dog" in texts)


class Branch(Net):
    def note(self, texts: list[str]) -> None:
        if max(map(len, texts)) > 3:
            self.n += 1


class Loop(Net):
    def note(self, texts: list[str]) -> None:
        for text in texts:
            if text == "dog":
                self.n += 1


class Counts(Net):
    def note(self, texts: list[str]) -> None:
        for text in texts:
            self.count(text)

    def count(self, text: str) -> None:
        self.seen[text] += 1

    def value(self) -> int:
        return self.seen["dog"]


class Words:
    """An object of the user's that says how many words each sample has."""

    def __init__(self, text: str) -> None:
        self.count = len(text.split())


class OfObjects(Net):
    def note(self, texts: list[Words]) -> None:
        self.n = sum(words.count for words in texts)


class Unshared(Net):
    """The same arguments, of which no stage keeps anything."""

    def note(self, texts: list[str]) -> None:
        pass


KINDS = [Longest, Keeps, Flag, Branch, Loop, Counts, OfObjects]


def _arguments(kind: type[Net]) -> list[Any]:
    return [Words(text) for text in TEXTS] if kind is OfObjects else list(TEXTS)


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(9, 8, generator=generator), torch.randn(9, 8, generator=generator)


def _plain(net: Net, step: int, texts: list[Any]) -> float:
    x, y = _batch(step)
    total = torch.zeros(())
    for at in (0, 3, 6):
        part = slice(at, at + 3)
        loss = mse_loss(net(x[part], texts[part]), y[part]) * (3 / 9)
        loss.backward()
        total = total + loss.detach()
    return total.item()


def _pipeline(net: Net) -> bp.Pipeline:
    return bp.Pipeline(net, devices=["cpu"] * 3, chunks=3, batch_dims={"texts": "list"})


def _step(pipe: bp.Pipeline, step: int, texts: list[Any]) -> float:
    x, y = _batch(step)
    return pipe.forward_backward(x, texts, target=y, loss_fn=mse_loss).loss.item()


@pytest.mark.parametrize("kind", KINDS)
def test_a_recording_knows_what_other_arguments_change(kind: type[Net]) -> None:
    """The texts of the recorded micro-batch may leave the value as it was."""
    recording = bp.record(kind(), (torch.zeros(3, 8), _arguments(kind)[:3]))
    assert recording.settles or recording.turns_by_size


@pytest.mark.parametrize("kind", KINDS)
def test_steps_with_equal_lists_run_one_by_one_where_micro_batches_differ(kind: type[Net]) -> None:
    """Each step brings the same texts, and each of its micro-batches other ones."""
    plain, texts = kind(), _arguments(kind)
    pipe = _pipeline(copy.deepcopy(plain))
    for step in range(4):
        assert _step(pipe, step, texts) == _plain(plain, step, texts)
        assert pipe._preparer._step_sizes.latest is not None
        assert len(pipe._preparer._step_sizes.latest) == 3
    for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_equal_micro_batches_settle() -> None:
    """Where all of a step's micro-batches have the lengths of the step before, lanes run."""
    pipe, texts = _pipeline(Longest()), ["a b", "c d", "e"] * 3
    for step in range(3):
        _step(pipe, step, texts)
    assert pipe._preparer._step_sizes.latest is not None
    assert len(pipe._preparer._step_sizes.latest) == 1


def test_arguments_do_not_matter_to_models_that_keep_nothing_of_them() -> None:
    """No step of theirs asks for sizes."""
    pipe = _pipeline(Unshared())
    for step in range(3):
        _step(pipe, step, list(TEXTS))
    assert pipe._preparer._step_sizes.latest is None
