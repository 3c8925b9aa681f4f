"""What micro-batches leave for another stage beside their tensors: none, or how many."""

import copy
import enum
import gc
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import StateError
from blockpipe.recording.plain_values.evaluation.members import Names, member_of
from blockpipe.recording.plain_values.kinds import held

from ...alike import check_trains_alike
from ...parity import plain_step
from ...stage_devices import assert_close, stages

LOSS = nn.functional.mse_loss


class Mode(enum.Enum):
    SHORT, LONG = 1, 2


class Leaves(nn.Module):
    """The first stage leaves something, and the second one asks about it."""

    def __init__(self, make: Callable[..., Any], ask: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.make, self.ask = make, ask
        self.n, self.left = 0, None
        self.rng, self.random = np.random.RandomState(2), random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.n += 1
            self.left = self.make(self, h.detach())
        with bp.Block(stage=1):
            return self.b(h) * self.ask(self.left)


ONE_IN_THREE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "count": (lambda s, h: None if s.n % 3 else h, lambda k: 1 + (k is None)),
    "data": (lambda s, h: None if h.sum() > 0 else h, lambda k: 1 + (k is None)),
    "table": (lambda s, h: None if s.n % 3 else torch.ones(8), lambda k: 1 + (k is None)),
    "numpy": (lambda s, h: None if s.rng.rand() < 0.5 else h, lambda k: 1 + (k is None)),
    "random": (lambda s, h: None if s.random.random() < 0.5 else h, lambda k: 1 + (k is None)),
    "tuple": (lambda s, h: h if s.n % 3 else (h,), lambda k: 1 + isinstance(k, tuple)),
    "length": (lambda s, h: [h] * (1 + s.n % 3), len),
    "keys": (lambda s, h: {"a": h} | ({} if s.n % 3 else {"b": h}), lambda k: 1 + ("b" in k)),
    "element": (lambda s, h: (h, None if s.n % 3 else h), lambda k: 1 + (k[1] is None)),
    "number": (lambda s, h: (h, s.n % 3), lambda k: 1 + k[1]),
    "enum": (lambda s, h: (h, Mode(1 + (s.n % 3 == 0))), lambda k: k[1].value),
    "scalar": (lambda s, h: {"h": h, "n": np.int64(s.n % 3)}, lambda k: 1 + float(k["n"])),
    "array": (lambda s, h: {"h": h, "n": np.arange(2) * (s.n % 3)}, lambda k: 1 + float(k["n"][1])),
    "plan": (lambda s, h: (h, types.SimpleNamespace(n=s.n % 3)), lambda k: 1 + k[1].n),
    "function": (lambda s, h: (h, int if s.n % 3 else abs), lambda k: k[1](-1.0)),
    "closure": (lambda s, h: (h, lambda n=s.n % 3: 1 + n), lambda k: k[1]()),
    "dtype": (
        lambda s, h: (h, torch.float64 if s.n % 3 else torch.float32),
        lambda k: torch.finfo(k[1]).bits,
    ),
    "object": (
        lambda s, h: types.SimpleNamespace(h=h, last=s.n % 3 == 0),
        lambda k: 1 + k.last,
    ),
}


@pytest.mark.parametrize("what", ONE_IN_THREE)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_what_differs_from_one_micro_batch_to_another_is_refused(what: str, schedule: str):
    """Attack 19: guidance is dropped by a draw, and a later stage asks ``is None``. A recording may
    see one kind only; a step sees all, whatever the timing."""
    pipe = bp.Pipeline(Leaves(*ONE_IN_THREE[what]), devices=stages(2), chunks=8, schedule=schedule)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    with pytest.raises(StateError, match=r"attribute 'left'.* read"):
        [pipe.forward_backward(x, target=y, loss_fn=LOSS) for _ in range(3)]


ALIKE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "none": (lambda s, h: None, lambda k: 1 + (k is None)),
    "tensor": (lambda s, h: h, lambda k: 1 + (k is None)),
    "made once": (
        lambda s, h: torch.ones(8, device=h.device) if s.left is None else s.left,
        lambda k: 1 + (k is None),
    ),
    "real run": (lambda s, h: h * float(h.sum().item() < 1e9), lambda k: 1 + (k is None)),
    "training": (
        lambda s, h: h if s.training and h.dim() == 2 else None,
        lambda k: 1 + (k is None),
    ),
    "step": (lambda s, h: None if s.n > 8 else h, lambda k: 1 + (k is None)),
    "length": (lambda s, h: [h, (h, 3)], len),
    "objects": (
        lambda s, h: {"h": h, "n": types.SimpleNamespace(h=h, n=[1]), "f": lambda: 2, "m": s.a},
        lambda k: len(k) + k["f"](),
    ),
    "sizes": (lambda s, h: {"a": h[:, : 1 + s.n % 3]}, len),
}


@pytest.mark.parametrize("what", ALIKE)
def test_what_all_micro_batches_of_a_step_leave_alike_runs(what: str):
    check_trains_alike(Leaves(*ALIKE[what]), width=8, chunks=8)


@pytest.mark.parametrize("what", ONE_IN_THREE)
def test_one_by_one_each_micro_batch_has_its_own(what: str):
    net = Leaves(*ONE_IN_THREE[what])
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=8, schedule="sequential")
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    loss = pipe.forward_backward(x, target=y, loss_fn=LOSS).loss
    assert_close(loss, plain_step(plain, (x,), {}, y, LOSS, 8))


class ForAWhile(nn.Module):
    """The second stage alone turns a flag on, and off again."""

    def __init__(self, *, reads_elsewhere: bool) -> None:
        super().__init__()
        self.a, self.b, self.fast, self.reads = nn.Linear(8, 8), nn.Linear(8, 8), False, False
        self.reads = reads_elsewhere

    def act(self, h: Tensor) -> Tensor:
        return h.sin() if self.fast else h.cos()

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.act(self.a(x)) if self.reads else self.a(x)
        with bp.Block(stage=1):
            before, self.fast = self.fast, True
            h = self.act(h)
            self.fast = before
            return self.b(h)


def test_what_one_stage_sets_for_a_while_and_alone_reads_runs():
    """It was refused, as the whole model is called on both stages."""
    net, x, y = ForAWhile(reads_elsewhere=False), torch.randn(8, 8), torch.randn(8, 8)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    loss = pipe.forward_backward(x, target=y, loss_fn=LOSS).loss
    assert_close(loss, plain_step(plain, (x,), {}, y, LOSS, 4))
    with pytest.raises(StateError, match="attribute 'fast' of the model"):
        bp.Pipeline(ForAWhile(reads_elsewhere=True), devices=stages(2), chunks=4).forward_backward(
            x, target=y, loss_fn=LOSS
        )


class Completes(nn.Module):
    """The first stage leaves an object with a tensor, the second one completes it, the third one
    asks for what it has got."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.what, self.n = what, 0

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.layers[0](x)
            self.context = types.SimpleNamespace(h=h.detach(), mask=None, repeat=0, more=[])
        with bp.Block(stage=1):
            h = self.layers[1](h)
            self.n += 1
            if self.what == "none" and self.n % 3:
                self.context.mask = h.detach()
            if self.what == "number":
                self.context.repeat = self.n % 3
            if self.what == "length" and self.n % 3:
                self.context.more.append(h.detach())
        with bp.Block(stage=2):
            found = self.context
            scale = 1 + (found.mask is None) + found.repeat + len(found.more)
            return self.layers[2](h) * scale


@pytest.mark.parametrize("what", ["none", "number", "length"])
def test_what_a_stage_in_between_completes_is_refused(what: str):
    """Attack 20: the first stage left the same for all micro-batches."""
    pipe = bp.Pipeline(Completes(what), devices=stages(3), chunks=8)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    with pytest.raises(StateError, match=r"attribute '(context|mask|repeat|more)'|a list"):
        [pipe.forward_backward(x, target=y, loss_fn=LOSS) for _ in range(3)]


def test_the_names_of_a_module_are_held_as_long_as_they_are_asked_for() -> None:
    """What stands for them is made for one recording: steps compared ``None`` with ``None``."""
    place = held(Names({"scale": 2.0}))
    gc.collect()
    assert member_of(place(), "scale") == 2.0
