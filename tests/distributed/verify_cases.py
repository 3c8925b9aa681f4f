"""What several processes run together: the verification of a pipeline's replicas."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import blockpipe as bp
from blockpipe.distributed import DistributedPipeline

from .cases import mean_square
from .report_cases import Suspect, Wrong, contrastive, everywhere, layers
from .words_cases import batch, dropping


def replicas_of(model: nn.Module, rank: int, ranks: int, **options: Any) -> Any:
    """Two replicas, the batch's share of this process's one, and a pipeline."""
    x, y = batch()
    own = slice(0, 6) if rank < ranks // 2 else slice(6, 10)
    mesh = init_device_mesh("cpu", (2, ranks // 2))
    pipe = DistributedPipeline(model, sample=x[own], mesh=mesh, chunks=2, **options)
    return x[own], y[own], pipe


def replicas_are_verified_against_one_process(rank: int, ranks: int) -> None:
    """With dropout, recomputation and deferred batch norm, and shares of different sizes."""
    model = dropping(ranks // 2)
    options: dict[str, Any] = {"checkpoint": "always", "deferred_batch_norm": True}
    x, y, pipe = replicas_of(model, rank, ranks, **options)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    found = pipe.verify(x, target=y, loss_fn=mean_square)
    assert found.ok, str(found)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    names = {d.name for d in found.differences}
    assert {f"{n} of replica {k}" for n in ("output", "loss") for k in range(2)} <= names
    assert len(found.differences) == 2 * (2 + 16 + 12)
    assert found.whole is not None
    assert "evaluation mode" in found.whole.notes[0]
    assert "the shares of 2 replicas" in found.reference
    assert len(set(everywhere(str(found)))) == 1
    pipe.forward_backward(x, target=y, loss_fn=mean_square)
    found = pipe.verify(x, target=y, loss_fn=mean_square)
    assert found.ok, str(found)  # their batch norms now differ
    assert found.whole is None
    assert "the replicas differ in the buffer 'layers.0.1.running_mean'" in found.notes[0]


def replicas_weigh_as_the_whole_batch(rank: int, ranks: int) -> None:
    """By samples, by classes, by a function, and as a sum; the loss may need all samples."""
    x, _, pipe = replicas_of(layers(ranks // 2), rank, ranks)
    y = torch.tensor([0, 0, 0, 1, 2, 2, 1, 2, 5, 4])
    y = y[:6] if len(x) == 6 else y[6:]
    by_class = nn.CrossEntropyLoss(torch.tensor([1.0, 3.0, 0.2, 1.0, 1.0, 1.0]))
    for reduction, loss_fn in (
        ("mean", F.cross_entropy),
        ("mean", by_class),
        (lambda args, kwargs, target: len(target), F.cross_entropy),
        ("sum", nn.CrossEntropyLoss(reduction="sum")),
    ):
        pipe.loss_reduction = reduction
        found = pipe.verify(x, target=y, loss_fn=loss_fn)
        assert found.ok, str(found)
        assert found.whole is not None
        assert found.whole.notes == []
    pipe.loss_reduction = "mean"
    found = pipe.verify(x, target=y, loss_fn=contrastive)
    assert found.is_plain, str(found)
    assert found.whole is not None
    assert "a loss that needs the whole batch" in str(found.whole.cause)
    wrong = pipe.verify(x, target=y, loss_fn=nn.CrossEntropyLoss(reduction="sum"))
    assert wrong.is_plain
    assert "loss_reduction" in str(wrong.whole.cause)


def a_replica_that_differs_is_found(rank: int, ranks: int) -> None:
    """Its gradient is wrong, or its parameters are others than those of the first one."""
    net = nn.Sequential(*[Suspect() for _ in range(max(2, ranks // 2))])
    net = bp.begin_blocks(net, {"1": 1} if ranks > 2 else {})
    x, y, pipe = replicas_of(net, rank, ranks)
    assert pipe.verify(x, target=y, loss_fn=F.mse_loss).ok
    Wrong.factor = 1.5 if rank == ranks - 1 else 1.0
    found = pipe.verify(x, target=y, loss_fn=F.mse_loss)
    Wrong.factor = 1.0
    assert found.worst["gradients"].verdict == "different"
    if rank == ranks - 1:
        with torch.no_grad():
            next(pipe.parameters()).add_(1)
    found = pipe.verify(x, target=y, loss_fn=F.mse_loss)
    different = [d.name for d in found.differences if d.verdict == "different"]
    assert "output of replica 1" in different
    assert "output of replica 0" not in different


class Keyed(nn.Module):
    """Two stages, arguments of several kinds, and an output by name."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last = stages - 1

    def forward(
        self, x: Tensor, *, mask: Tensor, scale: float = 1.0, note: object = None
    ) -> dict[str, Tensor]:
        x = self.first(x) * scale
        with bp.Block(self.last):
            x = self.second(x) * mask
        return {"out": x, "size": x.square().mean()}


def outputs_that_are_listed_are_joined_for_the_whole_batch(rank: int, ranks: int) -> None:
    """One of each micro-batch of all shares."""
    x, y, pipe = replicas_of(layers(ranks // 2), rank, ranks, batch_dims={"output": None})
    found = pipe.verify(x, target=y, loss_fn=mean_square)
    assert found.ok, str(found)
    assert found.whole is not None
    assert [d.name for d in found.whole.differences if d.kind == "outputs"] == ["output"]


def shares_that_make_no_batch_are_noted(rank: int, ranks: int) -> None:
    """Of another length, or with another value; what cannot be sent is refused in all processes."""
    torch.manual_seed(0)
    is_second, mesh = rank >= ranks // 2, init_device_mesh("cpu", (2, ranks // 2))

    def loss_fn(output: dict[str, Tensor]) -> Tensor:
        return output["out"].square().mean()

    x = torch.randn(6, 4, 6)
    x = x[4:] if is_second else x[:4]
    mask = torch.ones(4, 6)
    pipe = DistributedPipeline(
        Keyed(ranks // 2),
        sample=((x,), {"mask": mask}),
        mesh=mesh,
        chunks=2,
        batch_dims={"mask": None},
    )
    found = pipe.verify(x, mask=mask, scale=0.5, loss_fn=loss_fn)
    assert found.ok, str(found)
    assert found.whole is not None
    assert {d.name for d in found.whole.differences if d.kind == "outputs"} == {
        "output['out']",
        "output['size']",
    }
    for case, said in (
        ({"x": x[:, :3] if is_second else x[:, :4], "mask": mask[:1]}, "argument 0: Sizes"),
        ({"x": x, "mask": mask * (1 + is_second)}, "argument 'mask': it has no samples to join"),
    ):
        found = pipe.verify(case["x"], mask=case["mask"], loss_fn=loss_fn)
        assert found.ok, str(found)
        assert found.whole is None
        assert f"the replicas' shares differ in {said}" in found.notes[0], str(found)
    try:
        pipe.verify(x, mask=mask, note=lambda: None, loss_fn=loss_fn)
    except bp.BlockpipeError as error:
        assert "expected arguments that pickle" in str(error), str(error)
    else:
        raise AssertionError("not refused")
    pipe.forward_backward(x, mask=mask, loss_fn=loss_fn)
