"""Memory that stages of several processes would share, each with a copy of it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.distributed.state.shared_memory import check_memory
from blockpipe.errors import StateError


class Shares(nn.Module):
    """Its second stage reads something beside its layer."""

    def __init__(self, share: Callable[["Shares"], object]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.mask = torch.ones(4, 4)
        share(self)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(x)
        with bp.Block(stage=1):
            return self.second(h) @ self.mask


def check(share: Callable[[Shares], object], *ranks: int) -> None:
    """Check a model whose two stages have these ranks."""
    model = Shares(share)
    check_memory(model, bp.record(model, torch.ones(2, 4)), ranks)


def _shares_parameter(model: Shares) -> None:
    model.second.weight = nn.Parameter(model.first.weight.data)


def _shares_buffer(model: Shares) -> None:
    del model.mask
    model.register_buffer("mask", model.first.weight.detach())


def _shares_attribute(model: Shares) -> None:
    model.mask = model.first.weight.detach().t()


@pytest.mark.parametrize("share", [_shares_parameter, _shares_buffer, _shares_attribute])
def test_memory_of_a_parameter_is_refused_in_another_process(share: Callable[..., object]) -> None:
    """With both lines; in one process it is right."""
    said = r"got 'first\.weight', which changes on rank 0 .* read on rank 1 \(.*test_shared_memory"
    with pytest.raises(StateError, match=said):
        check(share, 0, 1)
    check(share, 1, 1)


def _takes_parts_of_one(model: Shares) -> None:
    flat = torch.randn(2, 4, 4)
    model.first.weight, model.second.weight = map(nn.Parameter, flat)


def _takes_what_stays(model: Shares) -> None:
    model.first.weight.requires_grad_(False)
    model.mask = model.first.weight.detach()


@pytest.mark.parametrize("share", [_takes_parts_of_one, _takes_what_stays])
def test_memory_is_shared_that_no_process_changes_for_another(share: Callable[..., object]) -> None:
    """Parts of one memory that do not overlap, and what is not trained."""
    check(share, 0, 1)
