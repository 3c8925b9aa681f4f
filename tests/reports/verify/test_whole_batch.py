"""``verify`` against the whole batch in one forward: what micro-batch by micro-batch is exact."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blockpipe as bp

from ...stage_devices import stages


def _net(*layers: nn.Module) -> nn.Sequential:
    net = nn.Sequential(*layers)
    bp.begin_blocks(net, {str(len(layers) - 1): 1})
    return net


def _pipe(net: nn.Module, **options: object) -> bp.Pipeline:
    return bp.Pipeline(net, devices=stages(2), chunks=4, **options)


def test_a_mean_agrees_with_the_whole_batch():
    found = _pipe(_net(nn.Linear(8, 8), nn.Linear(8, 4))).verify(
        torch.randn(10, 8), target=torch.randint(0, 4, (10,)), loss_fn=F.cross_entropy
    )
    assert found.ok
    assert found.whole is not None
    assert {d.kind for d in found.whole.differences} == {"outputs", "loss", "gradients"}
    assert "whole batch in one forward: agrees" in str(found)
    assert found.to_dict()["whole"]["ok"]


def test_a_split_on_the_wrong_dim_is_not_ok():
    """Sequence first, and split in time: exact micro-batch by micro-batch."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.MultiheadAttention(8, 2), nn.Linear(8, 4)
            bp.BeginBlock(self.b, stage=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x, x, x, need_weights=False)[0])

    x = torch.randn(12, 4, 8)
    found = _pipe(Attends()).verify(x)
    assert found.is_plain
    assert not found.ok
    assert "check batch_dims" in str(found)
    assert _pipe(Attends(), batch_dims=1).verify(x).ok


def test_weights_by_samples_where_tokens_count_are_not_ok():
    y = torch.randint(0, 4, (8,))
    y[:3:2] = -100
    net = _net(nn.Linear(8, 8), nn.Linear(8, 4))
    given = {"target": y, "loss_fn": F.cross_entropy}
    found = _pipe(net).verify(torch.randn(8, 8), **given)
    assert found.is_plain
    assert not found.ok
    assert "check loss_reduction" in str(found)
    counted = _pipe(net, loss_reduction=lambda args, kwargs, target: (target != -100).sum())
    assert counted.verify(torch.randn(8, 8), **given).ok


def test_a_loss_of_the_whole_batch_is_not_ok():
    """In-batch negatives: there are fewer of them in a micro-batch."""

    def contrastive(out: Tensor) -> Tensor:
        return F.cross_entropy(out @ out.T, torch.arange(len(out), device=out.device))

    found = _pipe(_net(nn.Linear(8, 8), nn.Linear(8, 4))).verify(
        torch.randn(8, 8), loss_fn=contrastive
    )
    assert found.is_plain
    assert not found.ok
    assert "a loss that needs the whole batch" in str(found)


class _Returns(nn.Module):
    def __init__(self, what) -> None:
        super().__init__()
        self.a, self.b, self.what = nn.Linear(8, 8), nn.Linear(8, 4), what
        bp.BeginBlock(self.b, stage=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.what(self.b(self.a(x)))


def test_a_number_that_is_no_mean_is_not_ok():
    found = _pipe(_Returns(lambda o: {"out": o, "largest": o.max()})).verify(torch.randn(8, 8))
    assert not found.ok
    assert "loss_reduction" in str(found.whole)


def test_a_model_that_cannot_be_recorded_for_evaluation_is_not_compared():
    """The verdict on the micro-batches is there all the same."""

    class Trains(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                raise ValueError("trains only")
            return super().forward(x)

    net = _net(nn.Linear(8, 8), Trains(0.5), nn.Linear(8, 4))
    found = _pipe(net).verify(torch.randn(8, 8))
    assert found.ok
    assert found.whole is None
    assert "in evaluation mode the step fails" in found.notes[-1]
    assert "trains only" in found.notes[-1]
    assert all(module.training for module in net.modules())


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(8)], ids=["dropout", "norm"])
def test_random_draws_and_batch_norm_are_compared_in_evaluation_mode(layer):
    """The model is as it was; and a wrong weighting is seen all the same."""
    net = _net(nn.Linear(8, 8), layer, nn.Linear(8, 4))
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    y = torch.randint(0, 4, (8,))
    given = {"target": y, "loss_fn": F.cross_entropy}
    found = _pipe(net).verify(torch.randn(8, 8), **given)
    assert found.ok
    assert found.whole is not None
    assert "in evaluation mode" in str(found)
    assert all(module.training for module in net.modules())
    assert all(torch.equal(b.cpu(), before[name]) for name, b in net.named_buffers())
    y[:3:2] = -100
    assert not _pipe(net).verify(torch.randn(8, 8), **given).ok


def test_what_draws_in_evaluation_too_is_not_compared():
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randn(len(x), 8, device=x.device)

    found = _pipe(_net(Noisy(8, 8), nn.Linear(8, 4))).verify(torch.randn(8, 8))
    assert found.ok
    assert found.whole is None
    assert "not compared with the whole batch: the forward draws" in str(found)


def test_batch_norm_without_running_statistics_is_named():
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    found = _pipe(_net(nn.Linear(8, 8), norm, nn.Linear(8, 4))).verify(torch.randn(8, 8))
    assert not found.ok
    assert "batch norm without running statistics" in str(found)


def test_a_whole_batch_that_fails_is_a_note():
    class Few(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 2:
                raise RuntimeError("too many")
            return super().forward(x)

    found = _pipe(_net(Few(8, 8), nn.Linear(8, 4))).verify(torch.randn(8, 8))
    assert found.ok
    assert "its forward fails (RuntimeError: too many" in str(found)


def test_it_can_be_left_out_and_is_for_one_micro_batch():
    net = _net(nn.Linear(8, 8), nn.Linear(8, 4))
    assert _pipe(net).verify(torch.randn(8, 8), whole=False).whole is None
    assert _pipe(net).verify(torch.randn(1, 8)).whole is None


def test_over_the_stages_and_under_no_grad():
    net = _net(nn.Linear(8, 8), nn.Linear(8, 4))
    found = _pipe(net).verify(torch.randn(8, 8), device="stages")
    assert found.whole is not None
    assert found.whole.ok
    with torch.no_grad():
        found = _pipe(net).verify(torch.randn(8, 8))
    assert found.whole is not None
    assert {d.kind for d in found.whole.differences} == {"outputs"}


def test_half_precision_has_a_wider_tolerance():
    net = _net(nn.Linear(8, 8), nn.Linear(8, 4)).to(torch.bfloat16)
    found = _pipe(net).verify(torch.randn(8, 8, dtype=torch.bfloat16))
    assert found.whole is not None
    assert found.whole.rtol == pytest.approx(0.088, rel=0.01)
    assert found.ok
