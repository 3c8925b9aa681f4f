"""Models and helpers of several test files."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blockpipe as bp

CPUS = ["cpu"] * 3
HERE = r"(?:test_)?(?:bad|wrong)_\w+\.py:\d+"  # of a test, or of a function below


def plain_net(layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))


def marked_net() -> nn.Sequential:
    net = plain_net()
    bp.begin_blocks(net, {"1": 1, "2": 2})
    return net


def x() -> Tensor:
    return torch.linspace(-1, 1, 32).reshape(8, 4)


def pipeline(model: nn.Module | None = None, **options: Any) -> bp.Pipeline:
    options = {"devices": CPUS, "chunks": 4, **options}
    return bp.Pipeline(marked_net() if model is None else model, **options)


def train(pipe: bp.Pipeline, inputs: Tensor | None = None) -> Any:
    inputs = x() if inputs is None else inputs
    return pipe.forward_backward(inputs, target=torch.zeros(8, 4), loss_fn=F.mse_loss)


def state_of(model: nn.Module) -> Any:
    """Everything of a model that wrong use must not change."""
    return (
        [
            (
                n,
                id(m),
                type(m),
                sorted(m.__dict__),
                len(m._forward_pre_hooks),
                m.training,
                getattr(m.__dict__.get("_blockpipe_mark"), "stage", None),
            )
            for n, m in model.named_modules()
        ],
        [
            (
                n,
                id(p),
                type(p),
                str(p.device),
                p.requires_grad,
                p.grad is None,
                None
                if p.is_meta or isinstance(p, nn.UninitializedParameter)
                else (p.data_ptr(), p.detach().flatten().tolist()),
            )
            for n, p in (*model.named_parameters(), *model.named_buffers())
        ],
    )


class unchanged:  # noqa: N801 - reads as a claim
    """While entered, a model does not change."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.before = state_of(self.model)

    def __exit__(self, *failure: Any) -> None:
        if failure[0] is None:
            assert state_of(self.model) == self.before
