"""Lightning's trainer with a pipeline in the module, against the same module with the plain model."""

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import blockpipe as bp

from ..stage_devices import assert_close, device_type, host, is_simulated, stages

pytest.importorskip("lightning")

import lightning.pytorch as pl
from torchmetrics.classification import MulticlassAccuracy

from blockpipe.integrations.lightning import PipelineStrategy

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


def make_net(cut: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    return bp.begin_blocks(net, {str(cut): 1})


def piped(net: nn.Module) -> bp.Pipeline:
    return bp.Pipeline(net, devices=stages(2), chunks=2)


def loader(rows: int = 24) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 8, generator=generator)
    y = torch.randint(0, 4, (rows,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=8)


class Automatic(pl.LightningModule):
    """Returns a loss, of which Lightning does the rest."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.weigh = nn.Linear(1, 1)  # a part that is not in the pipeline
        self.accuracy = MulticlassAccuracy(4)
        self.losses: list[Tensor] = []

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.net(x), y)
        return loss * (1 + self.weigh.weight.square().sum())

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = self.loss_of(*batch)
        self.losses.append(loss.detach())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        x, y = batch
        self.accuracy(self.net(x), y)
        self.log("accuracy", self.accuracy)

    def predict_step(self, batch: Any, _: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Manual(Automatic):
    """Runs its own backward: of the plain model, or of the pipeline with ``forward_backward``."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        x, y = batch
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        if isinstance(self.net, bp.Pipeline):
            loss = self.net.forward_backward(x, target=y, loss_fn=F.cross_entropy).loss
        else:
            loss = F.cross_entropy(self.net(x), y)
            self.manual_backward(loss)
        self.losses.append(loss.detach())
        self.log("loss", loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        optimizer.step()
        if self.trainer.is_last_batch:
            scheduler.step()


class Simulated(pl.accelerators.CPUAccelerator):
    """Another kind of device: Lightning has none of that name."""

    def setup_device(self, device: torch.device) -> None:
        assert device.type == device_type()


def trainer(directory: Path, pipelined: bool, epochs: int = 2, **options: Any) -> pl.Trainer:
    if pipelined:
        options["strategy"] = PipelineStrategy()
    at_hand = Simulated() if pipelined and is_simulated() else "cpu"
    return pl.Trainer(
        default_root_dir=directory,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        devices=1,
        accelerator=at_hand,
        **options,
    )


CLIPPED = {Automatic: {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}, Manual: {}}


@pytest.mark.parametrize("kind", [Automatic, Manual])
def test_a_pipeline_in_a_module_trains_as_the_plain_model(kind: Any, tmp_path: Path) -> None:
    """Clipped, accumulated where Lightning does it, scheduled: the same losses, weights, metrics."""
    found = []
    for pipelined in (False, True):
        net = make_net()
        torch.manual_seed(2)
        module = kind(piped(net) if pipelined else net)
        run = trainer(tmp_path / str(pipelined), pipelined, **CLIPPED[kind])
        run.fit(module, loader(), loader(20))
        metrics = {name: float(value) for name, value in run.callback_metrics.items()}
        found.append((module.losses, list(net.parameters()), list(module.weigh.parameters())))
        found[-1] += (metrics,)
    assert_close(found[1], found[0], rtol=0, atol=1e-6)
    assert len(found[0][0]) == 6


@pytest.mark.parametrize("kind", [Automatic, Manual])
def test_a_checkpoint_resumes(kind: Any, tmp_path: Path) -> None:
    """Of a pipeline and of the plain model, in a pipeline of other stages and in the plain model:
    with the weights that Lightning comes to without a pipeline."""
    for pipelined in (False, True):
        net = make_net()
        torch.manual_seed(2)
        module = kind(piped(net) if pipelined else net)
        first = trainer(tmp_path, pipelined, epochs=1, **CLIPPED[kind])
        first.fit(module, loader(), loader(20))
        first.save_checkpoint(tmp_path / f"{pipelined}.ckpt")
    found = []
    for saved, pipelined in itertools.product((False, True), repeat=2):
        other = make_net(cut=4)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        again = trainer(tmp_path, pipelined, **CLIPPED[kind])
        module = kind(piped(other) if pipelined else other)
        path = tmp_path / f"{saved}.ckpt"
        again.fit(module, loader(), loader(20), ckpt_path=path, weights_only=False)
        found.append([*other.parameters(), *module.weigh.parameters()])
    for parameters in found[1:]:
        assert_close(parameters, found[0], rtol=0, atol=1e-6)


def test_devices_are_left_alone(tmp_path: Path) -> None:
    """The stages stay on theirs after the run too, and the rest is where the outputs are."""
    net = make_net()
    module = Automatic(piped(net))
    run = trainer(tmp_path, True, epochs=1)
    run.fit(module, loader(), loader(20))
    first, last = (torch.device(device) for device in stages(2))
    for _ in range(2):
        assert net[0].weight.device == first
        assert net[4].weight.device == last
        assert module.weigh.weight.device == last
        assert module.device == last
        run.fit(module, loader(), loader(20))
    assert isinstance(module.net, bp.Pipeline)
    assert "net.0.weight" in module.state_dict()
    x = loader().dataset.tensors[0]
    parts = run.predict(module, DataLoader(x, batch_size=8))
    assert_close(torch.cat(host(parts)), module.net.unplace()(x))


def test_a_module_may_hold_the_model_beside_its_pipeline(tmp_path: Path) -> None:
    """The model is not moved by that name either."""

    class Both(Automatic):
        def __init__(self) -> None:
            super().__init__(piped(make_net()))
            self.model = self.net.module

    module = Both()
    trainer(tmp_path, True, epochs=1).fit(module, loader(), loader(20))
    assert module.model[0].weight.device == torch.device(stages(2)[0])
    assert module.net.module is module.model


@pytest.mark.cpu("autocast of the CPU")
@pytest.mark.parametrize("kind", [Automatic, Manual])
def test_mixed_precision_is_in_every_stage(kind: Any, tmp_path: Path) -> None:
    """Lightning has it around the training step."""
    net = make_net()
    dtypes = set()
    for layer in (net[0], net[2], net[4]):
        layer.register_forward_hook(lambda _, __, output: dtypes.add(output.dtype))
    trainer(tmp_path, True, epochs=1, precision="bf16-mixed").fit(
        kind(piped(net)), loader(), loader(20)
    )
    assert dtypes == {torch.bfloat16}
    assert net[0].weight.dtype is torch.float32


class Scaled(pl.plugins.MixedPrecision):
    """Scales losses as float16 needs it, and computes in float32."""

    def __init__(self, kind: str) -> None:
        super().__init__("16-mixed", kind, torch.amp.GradScaler(kind, init_scale=2.0**100))

    def forward_context(self) -> Any:
        return nullcontext()


@pytest.mark.parametrize("kind", [Automatic, Manual])
def test_gradients_are_scaled_where_the_precision_scales_a_loss(kind: Any, tmp_path: Path) -> None:
    """Manually as well: the loss that is logged is not scaled, and weights are the plain ones."""
    plain = make_net()
    torch.manual_seed(2)
    expected = kind(plain)
    options = {"epochs": 1, **CLIPPED[kind]}
    first = trainer(tmp_path / "plain", False, plugins=[Scaled("cpu")], **options)
    first.fit(expected, loader(), loader(20))
    net = make_net()
    torch.manual_seed(2)
    module, plugin = kind(piped(net)), Scaled(device_type())
    seen = []
    net[0].weight.register_hook(lambda gradient: seen.append(float(gradient.abs().max())))
    trainer(tmp_path, True, plugins=[plugin], **options).fit(module, loader(), loader(20))
    assert min(seen) > 2.0**80
    assert_close(module.losses, expected.losses, rtol=0, atol=1e-6)
    assert_close(list(net.parameters()), list(plain.parameters()), rtol=0, atol=1e-6)


@pytest.mark.cpu("there are devices to move to")
@pytest.mark.parametrize("kind", [Automatic, Manual])
def test_on_the_cpu_the_strategy_is_not_needed(kind: Any, tmp_path: Path) -> None:
    """Lightning's own moves nothing there."""
    found = []
    for pipelined in (False, True):
        net = make_net()
        torch.manual_seed(2)
        module = kind(piped(net) if pipelined else net)
        trainer(tmp_path, False, epochs=1).fit(module, loader(), loader(20))
        found.append(list(net.parameters()))
    assert_close(found[1], found[0], rtol=0, atol=1e-6)


def test_a_module_without_a_pipeline_is_refused(tmp_path: Path) -> None:
    """When the run begins."""
    with pytest.raises(bp.errors.UsageError, match=r"Automatic without one.*self\.net ="):
        trainer(tmp_path, True).fit(Automatic(make_net()), loader(), loader(20))


def test_a_module_without_a_forward_is_no_model_of_a_pipeline() -> None:
    """Lightning's module has one that only raises; its parts may have one that runs."""
    with pytest.raises(
        bp.errors.UsageError, match=r"got Automatic without one .*self\.net = Pipeline"
    ):
        bp.Pipeline(Automatic(make_net()), devices=stages(2), chunks=2)


def test_the_class_in_the_place_of_a_strategy_is_told_apart() -> None:
    with pytest.raises(ValueError, match=r"the class: write PipelineStrategy\(\)`"):
        pl.Trainer(strategy=PipelineStrategy, accelerator="cpu", logger=False)


def test_slips_of_the_strategys_arguments_are_named() -> None:
    """A pipeline, or its devices, in the place of the device of the module's rest."""
    for slip in (lambda: PipelineStrategy(devices=["cpu"] * 2), lambda: PipelineStrategy(chunks=2)):
        with pytest.raises(bp.errors.UsageError, match=r"self\.net = Pipeline\("):
            slip()
    with pytest.raises(bp.errors.UsageError, match="the strategy finds the pipelines"):
        PipelineStrategy(piped(make_net()))


def test_a_loss_whose_backward_has_run_is_not_returned(tmp_path: Path) -> None:
    """From an automatic training step: Lightning would run the backward once more."""

    class Mixed(Automatic):
        def training_step(self, batch: Any, _: int) -> Tensor:
            x, y = batch
            return self.net.forward_backward(x, target=y, loss_fn=F.cross_entropy).loss

    class Result(Automatic):
        def training_step(self, batch: Any, _: int) -> Any:
            x, y = batch
            return self.net.forward_backward(x, target=y, loss_fn=F.cross_entropy)

    for kind in (Mixed, Result):
        with pytest.raises(bp.errors.UsageError, match="has run the backward already"):
            trainer(tmp_path, True).fit(kind(piped(make_net())), loader(), loader(20))
