"""A Python module of the user's that an attribute of the model is."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..alike import check_trains_alike
from ..stage_devices import stages

OPS = """
N = 0


class Counter:
    total = 0

    @classmethod
    def bump(cls):
        cls.total += 1
        return cls.total


def put(value):
    global N
    N = value


def get():
    return N


def bump():
    global N
    N += 1
    return N
"""


@pytest.fixture
def ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "chosen_ops.py").write_text(OPS)
    importlib.invalidate_caches()
    yield importlib.import_module("chosen_ops")
    sys.modules.pop("chosen_ops", None)


class Net(nn.Module):
    def __init__(self, ops: Any, first: Callable[..., Any], last: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.ops = nn.Linear(4, 4), nn.Linear(4, 4), ops
        self.first, self.last = first, last

    def __deepcopy__(self, memo: dict[int, Any]) -> "Net":
        copied = Net(self.ops, self.first, self.last)
        copied.load_state_dict(self.state_dict())
        return copied

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.first(self.ops, 2.0)
        with bp.Block(stage=1):
            return self.b(h) * (1 + 0.1 * self.last(self.ops))


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (lambda ops, value: ops.put(ops.N + value), lambda ops: ops.get()),
        (lambda ops, value: ops.bump(), lambda ops: ops.bump()),
        (lambda ops, value: ops.Counter.bump(), lambda ops: ops.Counter.bump()),
    ],
    ids=["number", "count", "class"],
)
def test_what_its_functions_set_and_read_on_several_stages_is_refused(
    ops: Any, first: Callable[..., Any], last: Callable[..., Any]
) -> None:
    """Attack 41: by a global's name it was, and by an attribute of the model not."""
    pipe = bp.Pipeline(Net(ops, first, last), devices=stages(2), chunks=4)
    x = torch.randn(8, 4)
    with pytest.raises(StateError, match=r"N|total"):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)
    assert (ops.N, ops.Counter.total) == (0, 0)


def test_what_they_set_on_one_stage_is_its_own(ops: Any) -> None:
    check_trains_alike(Net(ops, lambda ops, value: None, lambda ops: 1.0 + 0 * ops.bump()))
