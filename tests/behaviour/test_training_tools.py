"""What training loops put around a step: optimizers, schedulers, scalers, averages, clipping, loaders,
metrics, adapters. Each against the same loop with the plain model."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import swa_utils
from torch.utils.data import DataLoader, TensorDataset

import blockpipe as bp

from ..stage_devices import assert_close, device_type, equal, host, stages

X = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 4, (8,), generator=torch.Generator().manual_seed(2))
STEPS = 3


def make_net(cut: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    return bp.begin_blocks(net, {str(cut): 1})


class WithOwnLoss(nn.Module):
    """Returns its own loss and its outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        with bp.Block(stage=0):
            x = F.gelu(self.a(x))
        with bp.Block(stage=1):
            x = self.b(x)
            return {"loss": F.cross_entropy(x, labels), "logits": x}


def piped(net: nn.Module, **options: Any) -> bp.Pipeline:
    return bp.Pipeline(net, devices=stages(2), **{"chunks": 2, **options})


def backward(net: nn.Module, x: Tensor = X, y: Tensor = Y) -> Tensor:
    """Run the forward and the backward of a pipeline or of a plain model."""
    if isinstance(net, bp.Pipeline):
        return net.forward_backward(x, target=y, loss_fn=F.cross_entropy).loss
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    return loss.detach()


def both(loop: Callable[[Any], Any], make: Callable[[], nn.Module] = make_net) -> Any:
    """Run a loop with the plain model and with a pipeline: weights and results are the same.

    Returns:
        What the loop with the pipeline returned.
    """
    plain, net = make(), make()
    expected, found = loop(plain), loop(piped(net))
    assert_close(list(net.parameters()), list(plain.parameters()), rtol=0, atol=1e-6)
    if expected is not None:
        assert_close(found, expected, rtol=0, atol=1e-6)
    before = make().parameters()
    assert not all(equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    return found


OPTIMIZERS = [
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.Adagrad, {}),
]


@pytest.mark.every
@pytest.mark.parametrize("how", ["plain", "foreach", "fused"])
@pytest.mark.parametrize(
    ("kind", "options"), OPTIMIZERS, ids=lambda one: getattr(one, "__name__", "")
)
def test_optimizers_step_over_devices(kind: Any, options: dict[str, Any], how: str) -> None:
    """One for all stages: one parameter at a time, in groups of a device, and fused."""

    def loop(net: nn.Module) -> None:
        fast = {"foreach": how == "foreach", "fused": how == "fused"}
        optimizer = kind(net.parameters(), lr=1e-2, **options, **fast)
        for _ in range(STEPS):
            optimizer.zero_grad()
            backward(net)
            optimizer.step()

    both(loop)


def test_an_optimizer_steps_as_often_as_its_closure_asks() -> None:
    """LBFGS runs the forward and backward itself; in float64, for it enlarges each rounding."""

    def loop(net: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)

        def closure() -> Tensor:
            optimizer.zero_grad()
            return backward(net, X.double())

        return [optimizer.step(closure).clone() for _ in range(STEPS)]

    if device_type() != "cpu":  # torch flattens all gradients into one tensor
        with pytest.raises(RuntimeError, match="same device"):
            both(loop, lambda: make_net().double())
        return
    both(loop, lambda: make_net().double())


def test_gradients_are_clipped_over_devices() -> None:
    """By their common norm, in one go and in groups, and by value."""

    def loop(net: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        norms = []
        for foreach in (None, False, True):
            optimizer.zero_grad()
            backward(net)
            options = {} if device_type() != "cpu" else {"foreach": foreach}
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.1, **options))
            nn.utils.clip_grad_value_(net.parameters(), 0.02)
            optimizer.step()
        return norms

    both(loop)


def one_cycle(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)


def in_sequence(optimizer: Any) -> Any:
    schedulers = torch.optim.lr_scheduler
    parts = [schedulers.LinearLR(optimizer, 0.1), schedulers.CosineAnnealingLR(optimizer, 2)]
    return schedulers.SequentialLR(optimizer, parts, milestones=[1])


@pytest.mark.parametrize("make", [one_cycle, in_sequence])
def test_schedulers_change_learning_rates(make: Any) -> None:
    def loop(net: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        scheduler, rates = make(optimizer), []
        for _ in range(STEPS):
            optimizer.zero_grad()
            backward(net)
            optimizer.step()
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
        return rates

    assert len(set(both(loop))) > 1


def test_a_scheduler_that_looks_at_the_loss_can() -> None:
    """It is a number like another."""

    def loop(net: nn.Module) -> float:
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=9)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = backward(net)
            optimizer.step()
            scheduler.step(loss)
        return optimizer.param_groups[0]["lr"]

    assert both(loop) < 1e-3


@pytest.mark.parametrize("own", [False, True])
def test_a_scaler_scales_given_losses_and_the_models_own(own: bool) -> None:
    """In loss_fn; gradients are unscaled over devices, and a step that overflows is skipped."""

    def loop(net: nn.Module) -> list[Tensor]:
        kind = device_type() if isinstance(net, bp.Pipeline) else "cpu"
        scaler = torch.amp.GradScaler(kind, init_scale=2.0**127, backoff_factor=2.0**-120)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def loss_of(output: Any, y: Tensor | None = None) -> Tensor:
            return scaler.scale(output["loss"] if own else F.cross_entropy(output, y))

        norms, scales = [], []
        for _ in range(STEPS):
            optimizer.zero_grad()
            x = 1e3 * X
            if not isinstance(net, bp.Pipeline):
                loss_of(*((net(x, Y),) if own else (net(x), Y))).backward()
            elif own:
                net.forward_backward(x, Y, loss_fn=loss_of)
            else:
                net.forward_backward(x, target=Y, loss_fn=loss_of)
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), 1.0))
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales == [2.0**7] * STEPS  # one step was skipped
        return norms[1:]

    both(loop, WithOwnLoss if own else make_net)


def test_an_average_of_the_pipeline_is_updated_saved_and_loaded() -> None:
    """``AveragedModel`` copies the pipeline with its devices, and runs."""

    def loop(net: nn.Module) -> list[Tensor]:
        mean = swa_utils.AveragedModel(
            net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=True
        )
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        for _ in range(STEPS):
            optimizer.zero_grad()
            backward(net)
            optimizer.step()
            mean.update_parameters(net)
        saved = io.BytesIO()
        torch.save(mean.state_dict(), saved)
        saved.seek(0)
        fresh = piped(make_net()) if isinstance(net, bp.Pipeline) else make_net()
        again = swa_utils.AveragedModel(fresh)
        again.load_state_dict(torch.load(saved))
        assert int(again.n_averaged) == STEPS
        with torch.no_grad():
            return [mean(X), again(X), net(X)]

    found = both(loop)
    assert equal(found[0], found[1])
    assert not torch.allclose(*host(found[1:]))


def test_an_average_of_weights_renews_batch_norms() -> None:
    """``update_bn`` runs the averaged pipeline, whose statistics are those of a plain model that sees
    the micro-batches."""

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
        return bp.begin_blocks(net, {"1": 1})

    plain, pipe = make(), piped(make(), chunks=1, schedule="sequential")
    for net in (plain, pipe):
        swa_utils.update_bn([X, 2 * X], net)
    assert_close(dict(pipe.state_dict()), plain.state_dict(), rtol=0, atol=1e-6)
    assert not torch.equal(plain[1].running_mean, torch.zeros(16))


def test_two_optimizers_take_turns() -> None:
    """One for each stage, at different steps and rates."""

    def loop(net: nn.Module) -> None:
        layers = net.module if isinstance(net, bp.Pipeline) else net
        first = torch.optim.AdamW(layers[:2].parameters(), lr=1e-2)
        second = torch.optim.SGD(layers[2:].parameters(), lr=0.1)
        for step in range(4):
            optimizer = (first, second)[step % 2]
            optimizer.zero_grad()
            backward(net)
            optimizer.step()

    both(loop)


@pytest.mark.parametrize("frozen", [(0,), (4,), (0, 2)])
def test_stages_are_frozen_and_thawed(frozen: tuple[int, ...]) -> None:
    """The first, the last, all but one; an optimizer over all parameters skips them."""

    def loop(net: nn.Module) -> None:
        layers = net.module if isinstance(net, bp.Pipeline) else net
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for is_trained in (False, False, True):
            for index in frozen:
                layers[index].requires_grad_(is_trained)
            optimizer.zero_grad()
            backward(net)
            assert all((layers[i].weight.grad is not None) == is_trained for i in frozen)
            optimizer.step()

    both(loop)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_gradients_of_several_calls_add_up(schedule: str) -> None:
    """Batches of different sizes, and a batch through ``pipe(x)`` among them."""

    def loop(net: nn.Module) -> None:
        if isinstance(net, bp.Pipeline):
            net.schedule = schedule
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            backward(net)
            backward(net, X[:3], Y[:3])
            net(X[2:]).square().mean().backward()
            optimizer.step()

    both(loop)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_batches_come_from_workers_and_pinned_memory() -> None:
    """In processes of their own, and the last batch is smaller."""

    def loop(net: nn.Module) -> list[Tensor]:
        data = TensorDataset(torch.cat([X, X[:3]]), torch.cat([Y, Y[:3]]))
        loader = DataLoader(data, batch_size=4, num_workers=1, pin_memory=True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        losses = []
        for x, y in loader:
            optimizer.zero_grad()
            losses.append(backward(net, x, y))
            optimizer.step()
        return losses

    assert len(both(loop)) == 3


def test_metrics_count_outputs() -> None:
    """torchmetrics: of a step's outputs, and of an evaluation's, on the last stage's device."""
    torchmetrics = pytest.importorskip("torchmetrics")

    def loop(net: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        place = net.output_device if isinstance(net, bp.Pipeline) else "cpu"
        metrics = torchmetrics.MetricCollection(
            [
                torchmetrics.classification.MulticlassAccuracy(4),
                torchmetrics.classification.MulticlassF1Score(4),
            ]
        ).to(place)
        mean = torchmetrics.MeanMetric().to(place)
        for _ in range(STEPS):
            optimizer.zero_grad()
            if isinstance(net, bp.Pipeline):
                result = net.forward_backward(
                    X, target=Y, loss_fn=F.cross_entropy, return_outputs=True
                )
                loss, outputs = result
            else:
                outputs = net(X)
                loss = F.cross_entropy(outputs, Y)
                loss.backward()
            mean.update(loss)
            metrics.update(outputs, Y.to(place))
            optimizer.step()
        with torch.no_grad():
            metrics.update(net(X), Y.to(place))
        return [*metrics.compute().values(), mean.compute()]

    both(loop)


def adapted(when: str) -> nn.Module:
    """A model with LoRA: marked before peft wraps it, or afterwards."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    config = peft.LoraConfig(
        r=2, target_modules=["0", "2"], modules_to_save=["4"], lora_dropout=0.0
    )
    if when == "before":
        bp.begin_blocks(net, {"2": 1})
    model = peft.get_peft_model(net, config)
    if when == "after":
        bp.begin_blocks(model, {"base_model.model.2": 1})
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.every
@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_are_trained_in_every_stage(when: str, tmp_path: Any) -> None:
    """LoRA: marks before and after; the rest stays as it is. Saved adapters load into the plain
    model, and a merged model is the trained one."""
    peft = pytest.importorskip("peft")

    def loop(net: nn.Module) -> list[Tensor]:
        model = net.module if isinstance(net, bp.Pipeline) else net
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(STEPS):
            optimizer.zero_grad()
            backward(net)
            optimizer.step()
        where = tmp_path / type(net).__name__
        model.save_pretrained(where)
        with torch.no_grad():
            outputs = net(X)
            plain = nn.Sequential(*(copy.deepcopy(m) for m in adapted_base()))
            again = peft.PeftModel.from_pretrained(plain, where)(X)
            with model.disable_adapter():
                without = net(X)
        merged = (net.unplace() if isinstance(net, bp.Pipeline) else net).merge_and_unload()
        return [outputs, again, without, merged(X)]

    plain, model = adapted(when), adapted(when)
    expected, found = loop(plain), loop(piped(model))
    assert_close(found, expected, rtol=0, atol=1e-6)
    assert_close(found[1], found[0], rtol=0, atol=1e-6)
    assert not torch.allclose(*host((found[0], found[2])), atol=1e-3)


def adapted_base() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    )
