"""Draws models, batches and marks: random programs over [batch, 4] tensors."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

import blockpipe as bp

LAYERS = 4
UNARY = (
    "linear",
    "tanh",
    "tied",
    "frozen",
    "embed",
    "detach",
    "no_grad",
    "half",
    "norm",
    "relu_",
    "module_relu_",
    "expand",
    "split_cat",
    "buffer",
)
BINARY = ("add", "mul", "cat_mean", "add_", "out")
STAGES = 3


@dataclass(frozen=True)
class Op:
    """One instruction: a name, which earlier values it reads, a layer, and a mark around it."""

    name: str
    a: int
    b: int
    layer: int
    mark: str  # "", "begin", "nested"
    stage: int


ops = st.builds(
    Op,
    st.sampled_from((*UNARY, *BINARY, "linear", "linear", "add")),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(0, LAYERS - 1),
    st.sampled_from(["", "begin", "begin", "nested"]),
    st.integers(0, STAGES - 1),
)


def _dense(instructions: list[Op]) -> list[Op]:
    """Stages renumbered in the order they come, from 0: what a user would write."""
    number = {0: 0}
    return [
        replace(op, stage=number.setdefault(op.stage, len(number))) if op.mark else op
        for op in instructions
    ]


programs = st.lists(ops, min_size=2, max_size=10).map(_dense)


class Program(nn.Module):
    """Runs instructions; what each makes is there for the later ones. Several outputs."""

    def __init__(self, instructions: list[Op]) -> None:
        super().__init__()
        self.instructions = instructions
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(STAGES + 1))
        self.embed = nn.Embedding(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.unused = nn.Parameter(torch.zeros(3))
        self.frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        for stage in range(STAGES):
            self.register_buffer(f"seen{stage}", torch.zeros(()))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """From [batch, 4] and an integer [batch] to the last values, [batch, 4] each."""
        values = [self.layers[0](x), self.embed(index), x]
        at = 0  # the stage by the program's own book, as plain runs have none
        for op in self.instructions:
            a, b = values[-1 - op.a % len(values)], values[-1 - op.b % len(values)]
            if op.mark == "nested":
                with bp.Block(at):
                    with bp.Block(op.stage):
                        values.append(self.run(op, a, b, op.stage))
            else:
                if op.mark == "begin":
                    at = op.stage
                with bp.Block(at):
                    values.append(self.run(op, a, b, at))
        return tuple(values[-3:])

    def run(self, op: Op, a: torch.Tensor, b: torch.Tensor, stage: int) -> torch.Tensor:
        """One instruction."""
        match op.name:
            case "linear":
                return self.layers[op.layer](a)
            case "tanh":
                return a.tanh()
            case "tied":
                return F.linear(a, self.layers[0].weight)
            case "frozen":
                return a @ self.frozen
            case "embed":
                return self.embed(a.argmax(1)) + a
            case "detach":
                return a.detach() * 2 + self.layers[op.layer].bias
            case "no_grad":
                with torch.no_grad():
                    scale = a.abs().mean()
                return a / (scale + 1)
            case "half":
                return a.double().float()
            case "norm":
                return F.layer_norm(a, (4,))
            case "relu_":
                return (a + 0).relu_()
            case "module_relu_":
                return self.relu(a) * 0.5
            case "expand":
                return a + b.mean(0, keepdim=True).expand_as(a)
            case "split_cat":
                return torch.cat(a.split(2, 1)[::-1], 1)
            case "buffer":
                seen = getattr(self, f"seen{stage}")
                seen.add_(a.detach().sum())
                return a * 1.5
            case "add":
                return a + b
            case "mul":
                return a.tanh() * b.tanh()
            case "cat_mean":
                return torch.stack([a, b]).mean(0)
            case "add_":
                a.add_(b.detach() * 0.1 + self.layers[op.layer].bias)
                return a * 1.0
            case "out":
                with torch.no_grad():
                    made = torch.empty_like(a)
                    torch.mul(a, b, out=made)
                return a + made
        raise AssertionError(op.name)
