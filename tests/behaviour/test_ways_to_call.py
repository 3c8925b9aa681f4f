"""Models and the ways they are called, drawn together, beside the whole batch in one forward.

The reference is not cut into micro-batches: so a wrong weight, a wrong split and a wrong join show,
and not only what the stages do. It is equal to rounding, in double precision.
"""

import copy
import io
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import blockpipe as bp

from ..stage_devices import assert_close, examples, stages

WIDTH = 4
STAGES = 3


@dataclass(frozen=True)
class Model:
    """What a drawn model takes, does and returns."""

    stages: tuple[int, ...]  # of its layers
    skip: bool  # from the first layer to the last
    tied: bool  # the last layer's weight is the first one's
    takes: str  # "tensor", "pair", "mapping", "records"
    gives: str  # "tensor", "tuple", "mapping"
    unused: bool  # a parameter that nothing reads


@dataclass(frozen=True)
class Way:
    """How it is called, and what its loss is."""

    call: str  # "step", "call", "no_grad", "wrapped"
    loss: str  # "given", "own"
    reduction: str  # "mean", "sum", "weights"
    ignored: tuple[bool, ...]  # by sample: counts for nothing
    chunks: int
    schedule: str
    checkpoint: str
    saved: bool  # the model was saved, and loaded into a pipeline of its own
    input_needs_grad: bool
    target_needs_grad: bool
    steps: int


def dense(numbers: list[int]) -> tuple[int, ...]:
    """Stages renumbered in the order they come, from 0."""
    number: dict[int, int] = {}
    return tuple(number.setdefault(n, len(number)) for n in numbers)


models = st.builds(
    Model,
    st.lists(st.integers(0, STAGES - 1), min_size=1, max_size=4).map(dense),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["tensor", "pair", "mapping", "records"]),
    st.sampled_from(["tensor", "tuple", "mapping"]),
    st.booleans(),
)
ways = st.builds(
    Way,
    st.sampled_from(["step", "step", "call", "no_grad", "wrapped"]),
    st.sampled_from(["given", "own"]),
    st.sampled_from(["mean", "sum", "weights"]),
    st.lists(st.booleans(), min_size=1, max_size=7).map(tuple),
    st.integers(2, 4),
    st.sampled_from(["1f1b", "gpipe", "zb-h1", "sequential", "uncut"]),
    st.sampled_from(["never", "except_last", "always"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(1, 2),
)


class Drawn(nn.Module):
    """A chain of layers with marks, as a drawn model has it."""

    def __init__(self, model: Model, reduction: str) -> None:
        super().__init__()
        self.model, self.reduction = model, reduction
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in model.stages)
        if model.tied:
            self.layers[-1].weight = self.layers[0].weight
        if model.unused:
            self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: Any, labels: Tensor | None = None, counts: Tensor | None = None) -> Any:
        """The labels are there where the model computes its own loss."""
        x = read(x, self.model.takes)
        first = None
        for layer, stage in zip(self.layers, self.model.stages, strict=True):
            with bp.Block(stage):
                x = layer(x).tanh()
                first = x if first is None else first
        if self.model.skip:
            x = x + first
        loss = None if labels is None else loss_of(x, labels, counts, self.reduction)
        if self.model.gives == "mapping":
            return {"logits": x} if loss is None else {"loss": loss, "logits": x}
        if self.model.gives == "tuple":
            return (x, x * 2) if loss is None else (loss, x)
        return x if loss is None else loss


def read(x: Any, takes: str) -> Tensor:
    """The samples in what the model takes."""
    if takes == "pair":
        return x[0] + 2 * x[1]
    if takes == "mapping":
        return x["a"] * x["scale"] + x["more"]["b"]
    if takes == "records":
        return torch.stack([record["a"] for record in x])
    return x


def loss_of(x: Tensor, target: Tensor, counts: Tensor, reduction: str) -> Tensor:
    """Of each sample's squares: summed, or a mean over the samples or over those that count."""
    squares = (x - target).square().sum(1)
    if reduction == "sum":
        return squares.sum()
    if reduction == "mean":
        return squares.mean()
    return (squares * counts).sum() / counts.sum()


def first_of(output: Any) -> Tensor:
    """The samples in what the model gives."""
    if isinstance(output, dict):
        return output["logits"]
    return output[0] if isinstance(output, tuple) else output


def arguments(model: Model, way: Way) -> tuple[Any, dict[str, Any], Any]:
    """A batch: what the model takes, its keyword arguments, and the target for ``loss_fn``."""
    generator = torch.Generator().manual_seed(0)
    size = len(way.ignored)
    a, b, y = (torch.randn(size, WIDTH, generator=generator) for _ in range(3))
    a.requires_grad_(way.input_needs_grad)
    y.requires_grad_(way.target_needs_grad)
    x: Any = a
    if model.takes == "pair":
        x = [a, b]
    elif model.takes == "mapping":
        x = {"a": a, "more": {"b": b}, "scale": torch.tensor(0.5), "name": "some"}
    elif model.takes == "records":
        x = [{"a": row.detach().requires_grad_(way.input_needs_grad)} for row in a]
    counts = torch.tensor([0.0 if no else 1.0 for no in way.ignored])
    if not counts.any():
        counts[-1] = 1.0
    if way.loss == "own":
        return x, {"labels": y, "counts": counts}, None
    return x, {}, {"y": y, "counts": counts}


def given_loss(reduction: str) -> Any:
    """The loss of an output and its target."""
    return lambda output, target: loss_of(
        first_of(output), target["y"], target["counts"], reduction
    )


def weights(args: Any, kwargs: dict[str, Any], target: Any) -> Tensor:
    """How many samples of a micro-batch count."""
    return (target or kwargs)["counts"].sum()


def leaves(x: Any, kwargs: dict[str, Any], target: Any) -> list[Tensor]:
    """What may need a gradient of its own."""
    found = x if isinstance(x, Tensor) else x[0] if isinstance(x, list) else x["a"]
    records = [record["a"] for record in x] if isinstance(found, dict) else [found]
    return [*records, kwargs["labels"] if target is None else target["y"]]


def given_gradients(x: Any, kwargs: dict[str, Any], target: Any) -> list[Tensor]:
    """Those of the batch. A sample in a micro-batch that counts for nothing has none: it is 0."""
    found = leaves(x, kwargs, target)
    return [torch.zeros_like(t) if t.grad is None else t.grad for t in found]


def whole(net: Drawn, model: Model, way: Way) -> tuple[Any, list[Any]]:
    """The whole batch in one forward: what it came to, and all gradients."""
    x, kwargs, target = arguments(model, way)
    for _ in range(way.steps):
        output = net(x, **kwargs)
        if way.call == "no_grad":
            continue
        if way.loss == "own":
            loss = output if isinstance(output, Tensor) else next(iter(unnamed(output)))
        else:
            loss = given_loss(way.reduction)(output, target)
        loss.backward()
    gradients = [p.grad for p in net.parameters()] + given_gradients(x, kwargs, target)
    return (loss if way.call == "step" else output), gradients


def unnamed(output: Any) -> Any:
    return output.values() if isinstance(output, dict) else output


def piped(net: Drawn, model: Model, way: Way) -> tuple[Any, list[Any]]:
    """The same by a pipeline."""
    x, kwargs, target = arguments(model, way)
    pipe = bp.Pipeline(
        net,
        devices=stages(max(model.stages) + 1),
        chunks=way.chunks,
        schedule=way.schedule,
        checkpoint=way.checkpoint if way.schedule != "uncut" else "never",
        loss_reduction=weights if way.reduction == "weights" else way.reduction,
        batch_dims=dims_of(model),
    )
    if way.saved:
        pipe = saved_and_loaded(pipe)
    called = nn.ModuleDict({"inner": pipe})["inner"] if way.call == "wrapped" else pipe
    for _ in range(way.steps):
        if way.call == "step":
            loss_fn = None if way.loss == "own" else given_loss(way.reduction)
            result = pipe.forward_backward(x, target=target, loss_fn=loss_fn, **kwargs).loss
            continue
        with torch.set_grad_enabled(way.call != "no_grad"):
            result = called(x, **kwargs)
        if way.call == "no_grad":
            continue
        if way.loss == "own":
            loss = result if isinstance(result, Tensor) else next(iter(unnamed(result)))
        else:
            there = {k: t.to(pipe.output_device) for k, t in target.items()}
            loss = given_loss(way.reduction)(result, there)
        loss.backward()
    gradients = [p.grad for p in pipe.parameters()] + given_gradients(x, kwargs, target)
    return result, gradients


def dims_of(model: Model) -> Any:
    """As users have to name them: two outputs may be two samples."""
    if model.takes == "records":
        return {"x": "list", "output": 0} if model.gives == "tuple" else {"x": "list"}
    return {"x": 0} if model.takes == "pair" else None


def saved_and_loaded(pipe: bp.Pipeline) -> bp.Pipeline:
    """Values by way of a file, into a copy whose own are lost."""
    file = io.BytesIO()
    torch.save(pipe.state_dict(), file)
    other = copy.deepcopy(pipe)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    file.seek(0)
    other.load_state_dict(torch.load(file))
    return other


@settings(max_examples=examples(30), deadline=None)
@given(models, ways)
def test_a_call_is_the_whole_batchs(model, way):
    """Outputs, the loss and every gradient are those of the whole batch in one forward."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        net = Drawn(model, way.reduction)
        expected, found = whole(copy.deepcopy(net), model, way), piped(net, model, way)
    finally:
        torch.set_default_dtype(before)
    assert_close(found, expected)
