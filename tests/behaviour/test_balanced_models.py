"""Models of other libraries, cut by `balance`."""

import copy

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp

from ..parity import any_loss, difference, plain_step
from ..stage_devices import stages

# --- real models


def _huggingface(name: str) -> tuple[nn.Module, dict]:
    pytest.importorskip("transformers")
    from ..zoo import find

    entry = find("huggingface", name)
    torch.manual_seed(0)
    return entry.build(), entry.batch()[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "t5"])
@pytest.mark.parametrize("by", ["time", "flops"])
def test_a_hugging_face_model_is_cut_and_trains_as_plain(name: str, by: str) -> None:
    """Tied weights, an encoder and a decoder, masks that cross."""
    net, kwargs = _huggingface(name)
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    reference = copy.deepcopy(net)
    plan = bp.balance(net, (), 3, by, kwargs=kwargs, repeats=2)
    recording = bp.record(net, (), kwargs, plan=plan)
    assert [share.parameters for share in plan.shares] == [
        sum(p.bytes for p in recording.parameters if p.stage == stage) for stage in range(3)
    ]
    assert [share.received for share in plan.shares] == [
        sum(c.bytes for c in recording.crossings if c.to_stage == stage != c.from_stage)
        for stage in range(3)
    ]
    with bp.Pipeline(net, devices=stages(3), chunks=2, plan=plan, isolate=True) as pipe:
        loss = pipe.forward_backward(**kwargs).loss
    plain = plain_step(reference, (), kwargs, None, any_loss, 2)
    assert difference(net, reference, loss, plain).same
    assert "tied:" in str(plan)


def test_a_timm_model_is_cut_at_blocks() -> None:
    """With some slack: of cuts that as many bytes cross, the outermost module is taken."""
    timm = pytest.importorskip("timm")
    net = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=6)
    x = torch.zeros(2, 3, 64, 64)
    even = bp.balance(net, x, 3, "parameters", slack=0)
    plan = bp.balance(net, x, 3, "parameters", slack=0.1)
    assert [share.begins for share in plan.shares] == ["the start", "blocks.2", "blocks.4"]
    assert sum(s.received for s in plan.shares) <= sum(s.received for s in even.shares)
    assert max(s.cost for s in plan.shares) <= 1.1 * max(s.cost for s in even.shares)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x))


@pytest.mark.slow
def test_whole_layers_are_preferred_unless_the_optimum_is_asked_for() -> None:
    """Of 21 blocks the middle is in the eleventh; a cut beside it costs 1/21 more."""
    net, x = nn.Sequential(*(Residual() for _ in range(21))), torch.zeros(4, 8)
    assert bp.balance(net, x, 2, "parameters").shares[1].begins in ("10", "11")
    assert bp.balance(net, x, 2, "parameters", slack=0).shares[1].begins == "10.down"
