"""Losses that read what is in another process; refused_cases.py has them in processes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from blockpipe.distributed.microbatches.loss_watch import LossWatch
from blockpipe.errors import StateError, UsageError

from ..ranks import NEEDS_SCHEDULES

pytestmark = [pytest.mark.cpu("nothing of it is on a device"), NEEDS_SCHEDULES]


class Model(nn.Module):
    """Its second layer is in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.left, self.factor = torch.ones(()), torch.ones(())


def watched(
    loss_fn: Callable[[Tensor], Tensor], model: Model, watch: LossWatch | None = None
) -> Tensor:
    """Compute a loss as a step does."""
    watch = watch or LossWatch(
        model, model.second.parameters(), [(model.first, "first", "left")], is_alone=False
    )
    output = model.second(torch.ones(2, 4))
    with watch.watching(loss_fn):
        loss = loss_fn(output)
    watch.check(loss, [output])
    return loss


@pytest.mark.parametrize(
    ("penalty", "what"),
    [
        (lambda m: m.first.weight.square().sum(), "'first.weight'"),
        (lambda m: sum(p.square().sum() for p in m.parameters()), "'first.weight'"),
        (lambda m: m.first.bias.detach().sum(), "'first.bias'"),
        (lambda m: m.first(torch.ones(1, 4)).sum(), "'first.weight'"),
        (lambda m: m.first.left * 2, "'left' of 'first'"),
    ],
)
def test_a_loss_that_reads_what_another_process_has_is_refused(
    penalty: Callable[[Any], Tensor], what: str
) -> None:
    model = Model()
    with pytest.raises(StateError, match=f"reads {what}"):
        watched(lambda output: output.sum() + penalty(model), model)


def test_a_loss_that_reads_a_view_of_what_another_process_has_is_refused():
    """Such as the tensors of a state dict, made before; the memory of its own weights is free."""
    model = Model()
    kept = model.state_dict()
    with pytest.raises(StateError, match=r"reads the memory of 'first.weight'"):
        watched(lambda output: output.sum() + kept["first.weight"][0].sum(), model)
    watched(lambda output: output.sum() + kept["second.weight"][0].sum(), model)


def test_a_weight_of_another_process_when_a_later_loss_reads_it_is_refused():
    """Then nothing watches what it reads; but its gradient is found."""
    model, reads = Model(), False
    own = [*model.second.parameters()]
    watch = LossWatch(model, own, [], is_alone=False)

    def loss_fn(output: Tensor) -> Tensor:
        return output.sum() + (model.first.weight.sum() if reads else 0)

    watched(loss_fn, model, watch)
    reads = True
    with pytest.raises(StateError, match=r"reads 'first.weight'"):
        watched(loss_fn, model, watch)


def test_a_loss_of_what_is_here_is_computed():
    """Weights of its own stage, and constants in attributes."""
    model = Model()
    loss = watched(lambda output: output.sum() + model.second.weight.sum() * model.factor, model)
    loss.backward()
    assert model.second.weight.grad is not None


def test_a_scaler_is_refused_unless_processes_share_it():
    model = Model()
    single = torch.amp.GradScaler("cpu")
    with pytest.raises(UsageError, match="got GradScaler .*ShardedGradScaler"):
        watched(lambda output: single.scale(output.sum()), model)
    off = torch.amp.GradScaler("cpu", enabled=False)
    assert watched(lambda output: off.scale(output.sum()), model).isfinite()
    assert "_scale" not in repr(torch.amp.GradScaler.scale)
    shared = ShardedGradScaler("cpu", init_scale=2.0)
    assert watched(lambda output: shared.scale(output.sum()), model).isfinite()
