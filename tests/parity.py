"""The plain micro-batch loop, and how far a pipelined step is from it."""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe._common.nested import map_tensors, tensors
from blockpipe.batches.batch_dims import BatchDims
from blockpipe.batches.microbatch import split, weights_of

from . import stage_devices
from .stage_devices import assert_close, host, is_simulated, stages

LossFn = Callable[..., Tensor]


def plain_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
    loss_fn: LossFn,
    chunks: int,
    reduction: Any = "mean",
    device: str | None = None,
    batch_dims: BatchDims = None,
) -> Tensor:
    """One step of the plain loop over the same micro-batches; gradients add up in ``.grad``. All
    of it is on one device, that of the first stage: its kernels round as those of the stages."""
    device = device or stages(1)[0]
    args, kwargs, target = map_tensors(lambda tensor: tensor.to(device), (args, kwargs, target))
    model.to(device)
    if isinstance(loss_fn, nn.Module):
        loss_fn.to(device)
    batches = split(args, kwargs, target, chunks, batch_dims)
    total = torch.zeros((), device=device)
    for batch, weight in zip(batches, weights_of(batches, reduction), strict=True):
        output = model(*batch.args, **batch.kwargs)
        loss = loss_fn(output) if batch.target is None else loss_fn(output, batch.target)
        (loss * weight).backward()
        total = total + loss.detach() * weight
    return total


def any_loss(output: Any, target: Any = None) -> Tensor:
    """A loss of every floating-point output, or the model's own.

    Sines: the mean square of what was normalized last is a constant, and has no gradient.
    """
    own = getattr(output, "loss", None)
    if own is not None:
        return own
    found = [t for t in tensors(output) if t.is_floating_point() and t.requires_grad]
    return torch.stack([t.float().sin().mean() for t in found]).sum()


@dataclass
class Difference:
    """How far two runs of a model are apart."""

    loss: float  # relative where it is above one
    gradients: float  # worst over the parameters, relative to the global gradient norm
    buffers: float
    exact: bool

    @property
    def same(self) -> bool:
        """To the bit on the CPU. To rounding on an accelerator, where the loss is one sum over the
        micro-batches, and gradients of what several stages read are added where they are."""
        if not is_simulated():
            return self.exact
        most = 1e-4 if stage_devices.on_cuda else 1e-6  # its kernels are not the CPU's
        return max(self.loss, self.gradients, self.buffers) < most


def difference(a: nn.Module, b: nn.Module, loss_a: Tensor, loss_b: Tensor) -> Difference:
    """Compare gradients and buffers of two copies of a model, wherever each of them is."""
    loss_a, loss_b = host((loss_a, loss_b))
    norm = sum(host(p.grad).double().square().sum() for p in b.parameters() if p.grad is not None)
    norm = max(float(norm) ** 0.5, 1e-30)
    worst, exact = 0.0, torch.equal(loss_a, loss_b)
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        if (p.grad is None) != (q.grad is None):
            raise AssertionError(
                f"{name}: gradient is {p.grad is not None}, plain {q.grad is not None}"
            )
        if p.grad is not None:
            mine, other = host((p.grad, q.grad))
            if not torch.equal(mine, other):
                exact = False
                worst = max(worst, float((mine.double() - other.double()).norm()) / norm)
            if not bool(torch.isfinite(other).all()):
                raise AssertionError(f"{name}: the plain gradient is not finite")
    buffers = 0.0
    for (_, p), (_, q) in zip(a.named_buffers(), b.named_buffers(), strict=True):
        p, q = host((p, q))
        if not torch.equal(p, q):
            exact = False
            buffers = max(buffers, float((p.double() - q.double()).abs().max()))
    apart = abs(float(loss_a - loss_b)) / max(1.0, abs(float(loss_b)))
    return Difference(apart, worst, buffers, exact)


def assert_same_gradients(one: nn.Module, other: nn.Module) -> None:
    """Of two copies of a model, wherever each of them is; to rounding."""
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert_close(p.grad, q.grad)


def assert_trains_as_plain(
    net: nn.Module,
    plain: nn.Module,
    x: Tensor | Sequence[Tensor],
    y: Tensor,
    steps: int = 4,
    schedule: str = "1f1b",
) -> None:
    """Take steps of four micro-batches with a marked model of two stages, and plain ones with its
    copy: after each, their gradients have added up to the same. Several batches come in turn."""
    batches = [x] if isinstance(x, Tensor) else x
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    for step in range(steps):
        batch = batches[step % len(batches)]
        pipe.forward_backward(batch, target=y, loss_fn=mse_loss)
        plain_step(plain, (batch,), {}, y, mse_loss, 4)
        assert_same_gradients(net, plain)


def without_randomness(model: nn.Module) -> nn.Module:
    """Dropout and stochastic depth off: what is compared draws no numbers."""
    for module in model.modules():
        for name in (
            "p",
            "drop_prob",
            "dropout",
            "attention_dropout",
            "dropout_p",
            "layerdrop",
            "attn_drop",
            "dropout_prob",
            "activation_dropout",
            "drop_rate",
        ):
            if isinstance(module.__dict__.get(name), float):
                setattr(module, name, 0.0)
        if "_has_drop_connect" in module.__dict__:  # EfficientNet of segmentation_models_pytorch
            module._has_drop_connect = False
    return model


def block_marks(model: nn.Module, recording: bp.Recording, stages: int) -> dict[str, int]:
    """Marks at the boundaries of the model's repeated blocks, evenly spread."""
    lists = [p for p, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    called = _called(recording)
    blocks = [p for p in called if p.rpartition(".")[0] in lists]
    outer = [p for p in blocks if not any(p.startswith(f"{q}.") for q in blocks)]
    if len(outer) < stages:
        outer = blocks if len(blocks) >= stages else [p for p in called if "." not in p]
    if outer[:1] != called[:1]:
        outer = [called[0], *outer]  # what runs before the blocks is stage 0
    count = min(stages, len(outer))
    return {outer[i * len(outer) // count]: i for i in range(1, count)}


def random_marks(recording: bp.Recording, stages: int, rng: random.Random) -> dict[str, int]:
    """Marks at random inner modules, in execution order, behind the first."""
    called = _called(recording)
    count = min(stages, len(called))
    chosen = sorted(rng.sample(range(1, len(called)), count - 1))
    return {called[at]: stage for stage, at in enumerate(chosen, start=1)}


def _called(recording: bp.Recording) -> list[str]:
    """The modules that do something, in the order of their first operation; leaves first there."""
    order: dict[str, None] = {}
    for call in recording.calls:
        if call.path and call.hop is not None:
            order.setdefault(call.path)
    begun: list[str] = []
    paths = list(order)
    for path in paths:  # a module around the first operation cannot begin a later stage
        if not any(other.startswith(f"{path}.") for other in paths[:1]):
            begun.append(path)
    first = next(p for p in paths if not any(q.startswith(f"{p}.") for q in paths))
    return [first, *(p for p in begun if p != first and not first.startswith(f"{p}."))]


def compare(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    marks: dict[str, int],
    *,
    loss_fn: LossFn = any_loss,
    target: Any = None,
    chunks: int | None = None,
    schedule: str = "1f1b",
    isolate: bool = True,
    steps: int = 1,
    checkpoint: str = "never",
    random: bool = False,
    batch_dims: BatchDims = None,
) -> tuple[Difference, bp.Pipeline]:
    """A pipelined step of a marked copy beside the plain loop's.

    A model that draws random numbers (``random``) is compared with the same pipeline under
    ``"sequential"``, without recomputation.
    """
    if chunks is None:
        chunks = 3 if next(tensors((args, kwargs))).shape[0] >= 6 else 2
    plain, marked = copy.deepcopy(model), copy.deepcopy(model)
    shared = {"chunks": chunks, "batch_dims": batch_dims}
    pipe = _pipelined(
        marked, marks, schedule=schedule, isolate=isolate, checkpoint=checkpoint, **shared
    )
    own = loss_fn is any_loss and "labels" in kwargs
    given = {"target": target, "loss_fn": None if own else loss_fn, **kwargs}
    if random:
        reference = _pipelined(plain, marks, schedule="sequential", **shared)
        torch.manual_seed(0)
    for _ in range(steps):
        if random:
            expected = reference.forward_backward(*args, **given).loss
        else:
            expected = plain_step(
                plain, args, kwargs, target, loss_fn, chunks, batch_dims=batch_dims
            )
    if random:
        torch.manual_seed(0)
    for _ in range(steps):
        result = pipe.forward_backward(*args, **given)
    return difference(marked, plain, result.loss, expected), pipe


def _pipelined(model: nn.Module, marks: dict[str, int], **options: Any) -> bp.Pipeline:
    bp.begin_blocks(model, marks)
    return bp.Pipeline(model, devices=stages(max(marks.values(), default=0) + 1), **options)
