"""Batches whose data lead a forward elsewhere."""

import copy
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockpipe as bp
from blockpipe.errors import StateError

from ...parity import plain_step
from ...stage_devices import assert_close, stages


def named(wild: bool) -> str:
    return ["calm", "wild"][wild]


def by_name(wild: bool, act: Any) -> Any:
    return getattr(types.SimpleNamespace(calm=lambda: None, wild=act), named(wild))()


def wilds(*microbatches: int, rows: int = 8) -> Tensor:
    """A batch of four micro-batches, some of them with large values."""
    x = torch.randn(rows, 4)
    for m in microbatches:
        x[m * rows // 4] += 100
    return x


def raises_at(net: nn.Module, *batches: Tensor, match: str, **options: Any) -> None:
    """All but the last one are right."""
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, **options)
    *before, last = batches
    for x in before:
        found = pipe.forward_backward(x, target=x, loss_fn=F.mse_loss).loss
        assert_close(found, plain_step(plain, (x,), {}, x, F.mse_loss, 4))
    with pytest.raises(StateError, match=match):
        pipe.forward_backward(last, target=last, loss_fn=F.mse_loss)
