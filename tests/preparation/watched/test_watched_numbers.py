"""Numbers that a training loop sets anew for each step: what a forward does with them counts."""

import copy
import fractions
import logging
import math
import statistics
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import StateError

from ...parity import assert_same_gradients, plain_step
from ...stage_devices import assert_close, stages

STACK = [1.0]
Ask = Callable[["Gated"], object]


class Gated(nn.Module):
    """Pushes a factor on a list for each stage, where a gate says so."""

    def __init__(self, is_on: Ask) -> None:
        super().__init__()
        self.a, self.b, self.is_on = nn.Linear(4, 4), nn.Linear(4, 4), is_on
        self.step, self.rate, self.note = 0, 0.0, ""
        self.seen: list[str] = []
        self.milestones, self.ends = {0, 1, 2, 8}, {9: "a", 12: "b"}

    def scaled(self, h: Tensor, factor: float) -> Tensor:
        if not self.is_on(self):
            return h
        STACK.append(factor)
        try:
            return h * STACK[-1]
        finally:
            STACK.pop()

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.scaled(self.a(x), 0.5)
        with bp.Block(stage=1):
            return self.scaled(self.b(h), 2.0)


USES: dict[str, Ask] = {
    "f-string": lambda n: f"{n.step}" == "3",
    "format": lambda n: format(n.step, "03d") == "003",
    "str": lambda n: str(n.step) == "3",
    "repr": lambda n: repr(n.step) == "3",
    "percent": lambda n: "%s" % n.step == "3",  # noqa: UP031
    "dict": lambda n: {3: True}.get(n.step, False),
    "set": lambda n: n.step in {3},
    "own set": lambda n: n.step not in n.milestones,
    "set of texts": lambda n: n.step in {"a", 3},
    "hash": lambda n: hash(n.step) == 3,
    "int": lambda n: int(n.step) == 3,
    "int of a float": lambda n: int(n.rate) == 1,
    "float": lambda n: float(n.step) == 3.0,
    "math": lambda n: math.sqrt(n.step) > 1.5,
    "round": lambda n: round(n.rate) == 2,
    "floor": lambda n: math.floor(n.rate) == 1,
    "minus": lambda n: -n.step == -3,
    "divmod": lambda n: divmod(n.step, 3)[0] == 1,
    "xor": lambda n: n.step ^ 3 == 0,
    "and": lambda n: 3 & n.step == 3,
    "power": lambda n: pow(n.step, 2, 7) == 2,
    "bytes": lambda n: n.step.to_bytes(1, "big") == b"\3",
    "bits": lambda n: n.step.bit_count() == 2 and n.step > 1,
    "part": lambda n: n.step.numerator == 3,
    "copy": lambda n: copy.deepcopy(n.step) == 3,
    "fraction": lambda n: n.step == fractions.Fraction(3),
    "numpy": lambda n: n.step > np.int64(2),
    "class": lambda n: n.step.__class__(n.step) == 3,
    "type": lambda n: type(n.step)(3) == n.step,
    "mean": lambda n: statistics.mean([n.step, 4]) == 3.5,
}


@pytest.mark.parametrize("use", USES)
def test_a_number_when_it_is_used_is_noticed_in_the_step_in_which_it_leads_elsewhere(
    use: str,
) -> None:
    """That step was wrong, without a word: only comparisons were remembered."""
    net = Gated(USES[use])
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    x = torch.randn(8, 4)
    for net.step in range(3):
        net.rate = 0.25 * net.step
        pipe.forward_backward(x, loss_fn=torch.sum)
    net.step, net.rate = 3, 1.75
    with pytest.raises(StateError, match="the forward changes a list, and sets it on hops"):
        pipe.forward_backward(x, loss_fn=torch.sum)


def _recorded(pipe: bp.Pipeline, count: int) -> list[int]:
    """In which of some steps the model was recorded."""
    recorded, known, x = [], {}, torch.randn(8, 4)
    for pipe.module.step in range(count):
        pipe.forward_backward(x, loss_fn=torch.sum)
        if id(pipe.recording) not in known:
            recorded.append(pipe.module.step)
        known[id(pipe.recording)] = pipe.recording
    return recorded


def _prints(net: Gated) -> bool:
    print(f"step {net.step}")
    return False


def _logs(net: Gated) -> bool:
    logging.getLogger("steps").warning("step %s", net.step)
    return False


def _notes(net: Gated) -> bool:
    net.note = f"step {net.step}"
    return False


def _dumps(net: Gated) -> bool:
    if net.step % 8 == 5:
        net.seen.append(f"step {net.step}")
    return False


def _is_late(net: Gated) -> bool:
    return int(net.step * 0.125) > 9


def _looks_for_it(net: Gated) -> bool:
    return net.step in net.ends and net.step in {6, 20}


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (_looks_for_it, [0, 1, 9, 12]),
        (_prints, [0, 1]),
        (_logs, [0, 1]),
        (_notes, [0, 1]),
        (_is_late, [0, 1, 8, 16]),
        (_dumps, [0, 1, 5, 13]),
    ],
)
def test_a_number_when_nothing_can_follow_from_it_is_not_recorded_anew(
    use: Ask, expected: list[int]
) -> None:
    """It may be printed, logged or noted; a recording that was given none of it goes on."""
    pipe = bp.Pipeline(Gated(use), devices=stages(2), chunks=4)
    assert _recorded(pipe, 20) == expected


def test_a_number_when_each_step_uses_it_leads_to_steps_in_one_thread() -> None:
    """To record in each step is slow, and to stop was wrong in the step that goes another way."""
    net = Gated(lambda net: str(net.step) == "14")
    plain, loss_fn = copy.deepcopy(net), nn.functional.mse_loss
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    recordings = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(16):
            net.step = plain.step = step
            x, y = torch.randn(8, 4), torch.randn(8, 4)
            found = pipe.forward_backward(x, target=y, loss_fn=loss_fn)
            assert_close(found.loss, plain_step(plain, (x,), {}, y, loss_fn, 4))
            recordings.append(pipe.recording)
    assert_same_gradients(net, plain)
    assert len({id(recording) for recording in recordings[9:]}) == 1
    assert recordings[-1].given_at
    assert not recordings[8].given_at
    (one,) = [str(w.message) for w in caught if "one by one" in str(w.message)]
    assert "test_watched_numbers.py" in one
