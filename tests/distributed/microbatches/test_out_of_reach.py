"""What only other processes have, while a step runs; failing_cases.py has it in processes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockpipe.distributed.microbatches.out_of_reach import OutOfReach
from blockpipe.errors import StateError

pytestmark = pytest.mark.cpu("nothing of it is on a device")


class Model(nn.Module):
    """Its second layer is in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(4), nn.Linear(4, 4)


@pytest.mark.parametrize(
    "read",
    [
        lambda w: w.sum(),
        lambda w: 2 * w,
        lambda w: torch.stack([w]),
        lambda w: w.data,
        lambda w: w.detach(),
        lambda w: w.grad,
        lambda w: w[0].item(),
        lambda w: w.tolist(),
        lambda w: w.numpy(),
        lambda w: F.linear(torch.ones(1, 4), w),
        lambda w: torch._foreach_norm([w]),
        repr,
        copy.deepcopy,
        list,
        lambda w: w.add_(1.0),
        lambda w: w.untyped_storage(),
        lambda w: w.register_hook(torch.neg),
    ],
)
@pytest.mark.parametrize("name", ["weight", "running_mean"])
def test_code_that_reads_it_is_refused_whatever_leads_there(
    read: Callable[[Tensor], Any], name: str
) -> None:
    model = Model()
    kept = getattr(model.first, name)
    before = kept.detach().clone()
    outside = OutOfReach(model, [model.second])
    with outside.during(), pytest.raises(StateError, match=rf"reads 'first.{name}', whose value"):
        read(kept)
    assert kept is getattr(model.first, name)
    assert type(kept) is (nn.Parameter if name == "weight" else Tensor)
    assert torch.equal(kept, before)


def test_what_is_the_same_in_every_process_is_answered():
    model = Model()
    with OutOfReach(model, [model.second]).during():
        weight = next(model.parameters())
        assert (weight.shape, weight.dtype, weight.device.type) == ((4,), torch.float32, "cpu")
        assert sum(p.numel() for p in model.parameters()) == 28
        assert [p.requires_grad for p in model.parameters()] == [True] * 4
        assert isinstance(weight, nn.Parameter)
        assert weight in {weight}
        assert len(weight) == weight.size(0) == 4
    assert model.first(torch.ones(2, 4)).shape == (2, 4)


def test_what_this_process_has_is_within_reach():
    """Also where a weight of another stage is tied to it."""
    model = Model()
    model.first.weight = model.second.bias
    with OutOfReach(model, [model.second]).during():
        model.second(torch.ones(2, 4)).sum().backward()
        assert model.first.weight.grad.sum() == 8.0
        with pytest.raises(StateError, match=r"'first.bias'"):
            model.first.bias.sum()
    assert model.first.bias.sum() == 0.0
