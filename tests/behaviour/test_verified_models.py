"""Models that people use, verified; sketches of large tensors."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockpipe as bp
from blockpipe.reports.verify.divergence import Sketch, sketch
from blockpipe.reports.verify.result import Outcome, compared

from ..stage_devices import equal, stages

# --- sketches


def test_a_sketch_sees_every_bit():
    """One element's last bit, a shape, a sign; but not the sign of zero, nor the layout."""
    x = torch.randn(37, 5)
    for at in (0, 17, 184):
        y = x.clone().flatten()
        y[at] = torch.nextafter(y[at], torch.tensor(9.0))
        assert 0 < sketch(x).apart(sketch(y.view(37, 5))) < 1e-6
    assert sketch(x).apart(sketch(x.t().contiguous().t())) == 0
    assert sketch(x).apart(sketch(x.view(5, 37))) == float("inf")
    assert sketch(torch.zeros(3)).apart(sketch(-torch.zeros(3))) == 0
    assert sketch(torch.zeros(0)).apart(sketch(torch.zeros(0))) == 0
    nan = torch.full((3,), float("nan"))
    assert sketch(nan).apart(sketch(nan)) == 0
    assert sketch(nan).apart(sketch(x[0, :3])) > 0


@pytest.mark.parametrize("size", [10, 1000, 100_000])
@pytest.mark.parametrize("apart", [1e-6, 1e-2, 1.0])
def test_a_sketch_estimates_distance(size: int, apart: float):
    """Within a factor of three of the true distance."""
    x, d = torch.randn(size).double(), torch.randn(size).double()
    d *= apart * x.norm() / d.norm()
    assert apart / 3 < sketch(x).apart(sketch(x + d)) < 3 * apart


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.int64, torch.bool])
def test_a_sketch_of_any_dtype(dtype: torch.dtype):
    """Equal tensors are equal, others are not."""
    x = torch.tensor([1, 0, 1]).to(dtype)
    assert isinstance(sketch(x), Sketch)
    assert sketch(x).apart(sketch(x.clone())) == 0
    assert sketch(x).apart(sketch(torch.tensor([1, 1, 1]).to(dtype))) > 0


# --- real models


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_resnet_with_dropout_is_exact(schedule: str):
    """torchvision: batch norm, residuals across stages, dropout before the head."""
    torchvision = pytest.importorskip("torchvision")
    net = torchvision.models.resnet18(num_classes=4)
    net.fc = nn.Sequential(nn.Dropout(0.5), net.fc)
    bp.begin_blocks(net, {"layer2": 1, "layer3.1.conv1": 2, "layer4": 3})
    pipe = bp.Pipeline(net, devices=stages(4), chunks=2, schedule=schedule)
    x, y = torch.randn(5, 3, 64, 64), torch.randint(0, 4, (5,))
    found = pipe.verify(x, target=y, loss_fn=F.cross_entropy)
    assert found.verdict == "exact", found
    assert sum(d.kind == "gradients" for d in found.differences) == len(list(net.parameters()))
    assert sum(d.kind == "buffers" for d in found.differences) == len(list(net.buffers()))


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_transformer_with_its_own_loss_is_exact(checkpoint: str):
    """Hugging Face: tied embeddings, dropout, labels as an argument."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=4, n_head=2, use_cache=False
    )
    net = transformers.GPT2LMHeadModel(config)
    bp.begin_blocks(net, {"transformer.h.1": 1, "transformer.h.3": 2})
    pipe = bp.Pipeline(net, devices=stages(3), chunks=2, checkpoint=checkpoint)
    ids = torch.randint(0, 64, (4, 8))
    found = pipe.verify(input_ids=ids, labels=ids)
    assert found.verdict == "exact", found


class Clipping(nn.Module):
    """Writes to its weight behind autograd's back, and draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        self.a.weight.data.mul_(0.9)
        x = self.a(x) * torch.rand(8, generator=self.generator).to(x.device)
        with bp.Block(stage=1):
            return self.b(x)


def test_what_is_written_through_data_and_own_generators_are_put_back() -> None:
    """And both runs begin with them, so that the verdict is of the step."""
    net, x = Clipping(), torch.randn(8, 8)
    weight, state = net.a.weight.detach().clone(), net.generator.get_state()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    assert pipe.verify(x).verdict == "exact"
    pipe.find_chunks(x, loss_fn=torch.sum, repeats=1)
    bp.balance(net, x, 2, repeats=1)
    assert equal(net.a.weight, weight)
    assert equal(net.generator.get_state(), state)


def test_objects_in_outputs_are_not_compared() -> None:
    """A cache is another object in each run; a note says that it was left out."""

    class Cache:
        pass

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> dict[str, Any]:
            x = self.a(x)
            with bp.Block(stage=1):
                return {"y": self.b(x), "cache": Cache()}

    pipe = bp.Pipeline(Net(), devices=stages(2), chunks=2)
    found = pipe.verify(torch.randn(8, 8), loss_fn=lambda out: out["y"].square().mean())
    assert found.ok
    assert found.notes == ["not compared: a Cache in the outputs"]


def test_an_infinite_gradient_hides_no_other() -> None:
    """The norm that differences are measured by is that of what is finite."""
    plain, piped = Outcome(), Outcome()
    infinite = torch.tensor([1.0, float("inf")])
    plain.put("gradients", [("a", torch.ones(4)), ("b", infinite)])
    piped.put("gradients", [("a", 2 * torch.ones(4)), ("b", infinite.clone())])
    verdicts = {d.name: d.verdict for d in compared(plain, piped, 1e-5, 0.0)}
    assert verdicts == {"a": "different", "b": "exact"}
    near = torch.tensor([1.0 + 1e-6, float("inf")])
    piped.put("gradients", [("a", torch.ones(4)), ("b", near)])
    verdicts = {d.name: d.verdict for d in compared(plain, piped, 1e-5, 0.0)}
    assert verdicts == {"a": "exact", "b": "within tolerance"}
