"""Accelerate's loop with a pipeline, against the same loop with the plain model."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import blockpipe as bp

from ..parameter_sets import every_pair
from ..stage_devices import assert_close, device_type, host, is_simulated, stages

accelerate = pytest.importorskip("accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402

from blockpipe.integrations.accelerate import PipelineAccelerator  # noqa: E402

CHUNKS = 2
Loss = Callable[[Any, Any], Tensor]


@pytest.fixture(autouse=True)
def _of_its_own() -> Iterator[None]:
    """Accelerators share one state in a process, and refuse a second precision."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class WithOwnLoss(nn.Module):
    """Returns its loss first, as models of Hugging Face do when they are given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with bp.Block(stage=0):
            x = F.gelu(self.a(x))
        with bp.Block(stage=1):
            x = self.b(x)
            return F.cross_entropy(x, labels), x


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    return bp.begin_blocks(net, {"2": 1})


def make_loader(rows: int = 24, **options: Any) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 8, generator=generator)
    y = torch.randint(0, 4, (rows,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=8, **options)


def piped(net: nn.Module, **options: Any) -> bp.Pipeline:
    return bp.Pipeline(net, devices=stages(2), chunks=CHUNKS, **options)


def make_parts(net: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def plain_step(accelerator: Any, net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The whole batch's loss, and its backward: a micro-batch at a time, whose rounding is that of
    the pipeline in any precision."""
    total = torch.zeros(())
    for part, labels in zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True):
        out = net(part, labels) if isinstance(net, WithOwnLoss) else net(part)
        loss = out[0] if isinstance(out, tuple) else F.cross_entropy(out, labels)
        accelerator.backward(loss * len(part) / len(x))
        total += loss.detach() * len(part) / len(x)
    return total


def whole_step(accelerator: Any, pipe: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(pipe(x), y.to(pipe.output_device))
    accelerator.backward(loss)
    return loss.detach()


def own_step(accelerator: Any, pipe: bp.Pipeline, x: Tensor, y: Tensor) -> Tensor:
    if isinstance(pipe.module, WithOwnLoss):
        return accelerator.forward_backward(pipe, x, y).loss
    return accelerator.forward_backward(pipe, x, target=y, loss_fn=F.cross_entropy).loss


def train(accelerator: Any, net: Any, parts: Any, step: Any, epochs: int = 2) -> list[Tensor]:
    """Accelerate's loop as its own pages have it; the loss of each step."""
    losses = []
    optimizer, scheduler, loader = parts
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(net):
                losses.append(step(accelerator, net, x, y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return losses


def trained_plainly(make: Any = make_net, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    accelerator = Accelerator(cpu=True, **options)
    net = make()
    prepared, *parts = accelerator.prepare(net, *make_parts(net), make_loader())
    losses = train(accelerator, prepared, parts, plain_step)
    AcceleratorState._reset_state(reset_partial_state=True)
    return losses, [p.detach().clone() for p in net.parameters()]


PRECISIONS = [
    pytest.param("no", id="float32"),
    pytest.param("bf16", marks=pytest.mark.cpu("the two devices round bfloat16 alike no longer")),
]


@every_pair(
    precision=PRECISIONS,
    accumulated=[1, 2],
    step=[own_step, whole_step],
)
def test_a_prepared_pipeline_trains_as_the_plain_model(
    precision: str, accumulated: int, step: Any
) -> None:
    """Clipped, accumulated and scheduled: the same losses and weights."""
    options = {"mixed_precision": precision, "gradient_accumulation_steps": accumulated}
    losses, weights = trained_plainly(**options)
    accelerator = PipelineAccelerator(cpu=True, **options)
    net = make_net()
    pipe = piped(net)
    prepared, *parts = accelerator.prepare(pipe, *make_parts(net), make_loader())
    assert prepared is pipe
    found = train(accelerator, pipe, parts, step)
    assert_close(found, losses, rtol=0, atol=1e-6)
    assert_close(list(net.parameters()), weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_models_own_loss_is_scaled_as_well(precision: str) -> None:
    """Divided by the number of accumulated batches, and reported as it was."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return WithOwnLoss()

    options = {"mixed_precision": precision, "gradient_accumulation_steps": 3}
    losses, weights = trained_plainly(make, **options)
    accelerator = PipelineAccelerator(cpu=True, **options)
    net = make()
    pipe, *parts = accelerator.prepare(piped(net), *make_parts(net), make_loader())
    found = train(accelerator, pipe, parts, own_step)
    assert_close(found, losses, rtol=0, atol=1e-6)
    assert_close(list(net.parameters()), weights, rtol=0, atol=1e-6)


def test_losses_are_scaled_by_the_scaler() -> None:
    """A step whose gradients overflow is skipped, in both; its loss is reported all the same."""

    def run(make: Any, step: Any) -> tuple[Any, list[Tensor], list[Tensor], float]:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator, net = make(cpu=True), make_net()
        whole = piped(net) if make is PipelineAccelerator else net
        kind = device_type() if make is PipelineAccelerator else "cpu"
        # By hand, for Accelerate has one with float16 alone, and that needs a GPU.
        accelerator.scaler = torch.amp.GradScaler(
            kind, init_scale=2.0**127, backoff_factor=2.0**-120
        )
        optimizer, _ = make_parts(net)
        prepared, optimizer, loader = accelerator.prepare(whole, optimizer, make_loader())
        skipped, losses = [], []
        for x, y in loader:
            losses.append(step(accelerator, prepared, 30 * x, y))
            optimizer.step()
            skipped.append(optimizer.step_was_skipped)
            optimizer.zero_grad()
        return skipped, losses, list(net.parameters()), accelerator.scaler.get_scale()

    def plain(accelerator: Any, net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        accelerator.backward(loss)
        return loss.detach()

    expected = run(Accelerator, plain)
    assert expected[0] == [True, False, False]
    found = run(PipelineAccelerator, own_step)
    assert found[0] == expected[0]
    assert found[3] == expected[3]
    assert_close(found[1:3], expected[1:3], rtol=0, atol=1e-6)


def states(accelerator: Any) -> dict[str, Any]:
    return {"net": accelerator._models[0].state_dict(), "parts": accelerator._optimizers[0].state}


@pytest.mark.parametrize("safe", [True, False])
def test_a_saved_state_resumes(tmp_path: Path, safe: bool) -> None:
    """In a pipeline of other stages, and in the plain model: the weights of two epochs in one go."""
    _, weights = trained_plainly(gradient_accumulation_steps=3)
    net = make_net()
    first = PipelineAccelerator(cpu=True, gradient_accumulation_steps=3)
    pipe, *parts = first.prepare(piped(net), *make_parts(net), make_loader())
    train(first, pipe, parts, own_step, epochs=1)
    first.save_state(str(tmp_path), safe_serialization=safe)
    for make, step in ((PipelineAccelerator, own_step), (Accelerator, plain_step)):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = make(cpu=True, gradient_accumulation_steps=3)
        other = bp.begin_blocks(bp.remove_blocks(make_net()), {"4": 1})
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        whole = piped(other) if make is PipelineAccelerator else other
        prepared, *parts = accelerator.prepare(whole, *make_parts(other), make_loader())
        accelerator.load_state(str(tmp_path))
        train(accelerator, prepared, parts, step, epochs=1)
        assert_close(list(other.parameters()), weights, rtol=0, atol=1e-6)


def test_tied_weights_are_saved_and_stay_tied(tmp_path: Path) -> None:
    """Once, though two stages have them."""

    def make() -> nn.Sequential:
        net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        net[2].weight = net[0].weight
        return bp.begin_blocks(net, {"2": 1})

    accelerator = PipelineAccelerator(cpu=True)
    pipe = accelerator.prepare(piped(make()))
    x = torch.randn(4, 8)
    accelerator.forward_backward(pipe, x, loss_fn=torch.mean)
    accelerator.save_state(str(tmp_path))
    expected = host(pipe.state_dict())
    expected = {name: value.clone() for name, value in expected.items()}
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.zero_()
    accelerator.load_state(str(tmp_path))
    assert_close(dict(pipe.state_dict()), expected, rtol=0, atol=0)
    assert pipe.module[2].weight is pipe.module[0].weight


def test_an_epoch_is_evaluated_over_all_samples() -> None:
    """Gathered as Accelerate's pages have it, with an uneven last batch."""
    accelerator = PipelineAccelerator(cpu=True)
    net = make_net()
    pipe, loader = accelerator.prepare(piped(net), make_loader(rows=19))
    pipe.eval()
    found = []
    for x, y in loader:
        with torch.no_grad():
            found.append(host(accelerator.gather_for_metrics((pipe(x).argmax(-1), y))))
    predicted, labels = (torch.cat(column) for column in zip(*found, strict=True))
    x, y = loader.dataset.tensors
    assert_close(predicted, pipe.unplace()(x).argmax(-1))
    assert_close(labels, y)


def test_a_pipeline_that_has_run_is_recorded_anew_when_it_is_prepared() -> None:
    """Its forward computes in another precision from then on."""
    net = make_net()
    dtypes = []
    net[2].register_forward_hook(lambda _, __, output: dtypes.append(output.dtype))
    pipe = piped(net, sample=((torch.randn(8, 8),), {}))
    x, y = next(iter(make_loader()))
    pipe.forward_backward(x, target=y, loss_fn=F.cross_entropy)
    assert set(dtypes) == {torch.float32}
    accelerator = PipelineAccelerator(cpu=True, mixed_precision="bf16")
    accelerator.prepare(pipe)
    dtypes.clear()
    outputs = accelerator.forward_backward(
        pipe, x, target=y, loss_fn=F.cross_entropy, return_outputs=True
    )
    expected = {torch.bfloat16} if not is_simulated() else {torch.float32}  # autocast of the CPU
    assert set(dtypes) == expected
    assert outputs.outputs.dtype is torch.float32


def test_a_pipeline_is_prepared_once_and_unwrapped_to_its_model() -> None:
    """Preparing it again changes nothing; a plain model is prepared as ever."""
    accelerator = PipelineAccelerator(cpu=True)
    pipe, other = piped(make_net()), make_net()
    assert accelerator.prepare(pipe) is pipe
    assert accelerator.prepare(pipe) is pipe
    assert accelerator.prepare(other) is other
    assert accelerator._models == [pipe, other]
    assert accelerator.unwrap_model(pipe) is pipe.module
    assert accelerator.unwrap_model(other) is other


def test_autocast_around_the_pipeline_alone_is_refused() -> None:
    """Accelerate's own class puts it where forward_backward does not pass."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    pipe = accelerator.prepare_model(piped(make_net()), device_placement=False)
    x, y = next(iter(make_loader()))
    assert pipe(x).dtype is torch.float32
    with pytest.raises(
        bp.errors.UsageError, match=r"expected the pipeline's own forward.*test_acc"
    ):
        pipe.forward_backward(x, target=y, loss_fn=F.cross_entropy)


@pytest.mark.parametrize("make", [PipelineAccelerator, Accelerator])
def test_a_step_that_would_not_be_divided_is_refused(make: Any) -> None:
    """``pipe.forward_backward`` knows nothing of gradient_accumulation_steps; the gradients would
    be those of an undivided loss."""
    accelerator = make(cpu=True, gradient_accumulation_steps=2)
    pipe = accelerator.prepare_model(piped(make_net()), device_placement=False)
    x, y = next(iter(make_loader()))
    with (
        accelerator.accumulate(pipe),
        pytest.raises(
            bp.errors.UsageError, match=r"accelerator\.forward_backward\(pipe, …\).*test_accelerate"
        ),
    ):
        pipe.forward_backward(x, target=y, loss_fn=F.cross_entropy)
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_what_cannot_be_in_a_pipeline_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By prepare, with the way round it."""
    pipe = piped(make_net())
    accelerator = PipelineAccelerator(cpu=True)
    with pytest.raises(bp.errors.UsageError, match=r"accelerator\.prepare\(pipe\)"):
        accelerator.forward_backward(pipe, torch.ones(4, 8), loss_fn=torch.mean)
    with monkeypatch.context() as changed:
        changed.setattr(PipelineAccelerator, "num_processes", 2)
        with pytest.raises(
            bp.errors.UsageError, match=r"(?s)expected one process.*ReplicatedPipeline"
        ):
            accelerator.prepare(pipe)
    with monkeypatch.context() as changed:
        changed.setattr(PipelineAccelerator, "mixed_precision", "fp8")
        with pytest.raises(bp.errors.UsageError, match=r"got 'fp8'"):
            accelerator.prepare(pipe)
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(bp.errors.UsageError, match=r"got 'EAGER'.*pipe\.compile\(\)"):
        PipelineAccelerator(cpu=True, dynamo_backend="eager").prepare(pipe)


def test_slips_of_a_call_are_named() -> None:
    """The pipeline was forgotten; the result of a step was handed to `backward`."""
    accelerator = PipelineAccelerator(cpu=True)
    pipe, x = accelerator.prepare(piped(make_net())), torch.ones(4, 8)
    with pytest.raises(bp.errors.UsageError, match=r"write accelerator\.forward_backward\(pipe, x"):
        accelerator.forward_backward(x, loss_fn=torch.mean)
    result = accelerator.forward_backward(pipe, x, loss_fn=torch.mean)
    with pytest.raises(bp.errors.UsageError, match=r"test_accelerate\.py:\d+\); remove this call"):
        accelerator.backward(result)


def test_a_step_s_loss_has_no_backward_left() -> None:
    accelerator = PipelineAccelerator(cpu=True)
    pipe = accelerator.prepare(piped(make_net()))
    loss = accelerator.forward_backward(pipe, torch.ones(4, 8), loss_fn=torch.mean).loss
    with pytest.raises(bp.errors.UsageError, match="has run the backward already"):
        loss.backward()
