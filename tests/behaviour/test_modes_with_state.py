"""Modes of the user's around a step that change what the forward computes, by what they have seen."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import blockpipe as bp
from blockpipe.errors import StateError

from ..models import linears
from ..parity import assert_same_gradients, plain_step
from ..stage_devices import stages


class Doubles(TorchFunctionMode):
    """Doubles each third linear layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is linear:
            self.count += 1
            if self.count % 3 == 0:
                return result * 2
        return result


class DoublesBelow(TorchDispatchMode):
    """The same, of what a linear layer calls."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.addmm.default:
            self.count += 1
            if self.count % 3 == 0:
                return result * 2
        return result


class Counts(TorchFunctionMode):
    """Changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.names, self.table = 0, [], {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear:
            self.count += 1
            self.names.append(func.__name__)
            self.table.setdefault(func.__name__, set()).add(len(args))
        return func(*args, **(kwargs or {}))

    def report(self) -> str:
        return f"{self.count} of {len(self.names)}"


def _pair(**options: Any) -> tuple[bp.Pipeline, nn.Module, nn.Module, Tensor, Tensor]:
    net = linears(2)
    plain = copy.deepcopy(net).to(stages(1)[0])
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, **options)
    return pipe, net, plain, torch.randn(8, 4), torch.randn(8, 4)


@pytest.mark.parametrize("kind", [Doubles, DoublesBelow])
def test_a_mode_when_its_count_changes_results_is_refused(kind: type) -> None:
    """Stages counted for each other: results depended on timing, silently."""
    pipe, _, _, x, y = _pair()
    with pytest.raises(StateError, match=rf"attribute 'count' of a {kind.__name__} on hops \[0, 1"):
        with kind():
            pipe.forward_backward(x, target=y, loss_fn=mse_loss)


def test_such_a_mode_when_it_comes_after_a_step_is_refused() -> None:
    pipe, _, _, x, y = _pair()
    pipe.forward_backward(x, target=y, loss_fn=mse_loss)
    with pytest.raises(StateError, match="attribute 'count' of a Doubles"):
        with Doubles():
            pipe.forward_backward(x, target=y, loss_fn=mse_loss)
    pipe.forward_backward(x, target=y, loss_fn=mse_loss)


def test_such_a_mode_when_the_schedule_is_sequential_changes_what_the_plain_loop_does() -> None:
    pipe, net, plain, x, y = _pair(schedule="sequential")
    for _ in range(2):
        with Doubles():
            pipe.forward_backward(x, target=y, loss_fn=mse_loss)
        with Doubles():
            plain_step(plain, (x.to(stages(1)[0]),), {}, y, mse_loss, 4)
        assert_same_gradients(net, plain)


def test_a_mode_when_it_only_counts_is_fine() -> None:
    pipe, net, plain, x, y = _pair()
    with Counts() as counts:
        pipe.forward_backward(x, target=y, loss_fn=mse_loss)
    plain_step(plain, (x.to(stages(1)[0]),), {}, y, mse_loss, 4)
    assert_same_gradients(net, plain)
    assert counts.report() == f"{4 * 2} of {4 * 2}"
