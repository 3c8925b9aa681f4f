"""Tensors that a forward leaves are saved as they would be without a pipeline."""

import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn

import blockpipe as bp

from ..models import linears
from ..stage_devices import stages


def _loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)  # weights only


def test_features_that_a_hook_collects_are_saved_without_notes() -> None:
    """``torch.load`` refused the file: it had a class in it that no file of weights has."""
    net, kept, during = linears(2), list[Tensor](), list[Any]()

    def keep(module: nn.Module, args: object, output: Tensor) -> None:
        kept.append(output.detach())
        if not isinstance(output, torch._subclasses.FakeTensor):
            during.append(_loaded(kept[-1]))

    net[0].register_forward_hook(keep)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    with torch.no_grad():
        pipe(torch.randn(4, 4))
    assert len(kept) == 2
    kept[0].label = "kept"
    first, second = _loaded(kept)
    assert vars(first) == {"label": "kept"}
    assert not vars(second)
    torch.testing.assert_close([first, second], [*kept])
    torch.testing.assert_close(during[-2:], [*kept])
    assert not vars(pickle.loads(pickle.dumps(kept[1])))
