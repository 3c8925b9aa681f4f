"""PopTorch's door: its tutorial as printed, what its own tests pin, and what they leave out."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from blockpipe.compat import poptorch
from blockpipe.compat.poptorch.outputs import chosen
from blockpipe.errors import PlanError, UsageError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, equal, host, is_simulated
from .poptorch_models import Network, Scripted, WithLoss, accumulating, batch, two_parts, two_stages

# --- the tutorial


def test_the_handwritten_network_is_on_four_stages() -> None:
    """Also its softmax, which belongs to no layer with parameters."""
    net, x = Network(), torch.randn(6, 5)
    expected = net(x)
    model = poptorch.inferenceModel(net, two_parts())
    assert_close(model(x), expected)
    assert model.pipeline.recording.route == [0, 1, 2, 3]
    assert len({str(device) for device in model.pipeline.devices}) == (4 if is_simulated() else 1)


def test_an_imported_model_trains_with_two_more_lines() -> None:
    """resnet50 on two IPUs, gradient accumulation 3, two copies."""
    torchvision = pytest.importorskip("torchvision")
    opts = poptorch.Options()
    opts.Training.gradientAccumulation(3)
    opts.replicationFactor(2)

    model = torchvision.models.resnet50()
    model.layer4 = poptorch.BeginBlock(model.layer4, ipu_id=1)

    data = TensorDataset(torch.randn(13, 3, 32, 32), torch.randint(0, 1000, (13,)))
    loader = poptorch.DataLoader(opts, data, batch_size=2, shuffle=True)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    training_model = poptorch.trainingModel(WithLoss(model), opts, optimizer=optimizer)
    (found,) = [training_model(images, labels) for images, labels in loader]
    predictions, losses = found
    assert predictions.shape == (4, 1000)
    assert losses.shape == (2,)
    assert torch.mean(losses).item() > 0
    assert training_model.pipeline.recording.route == [0, 1]


# --- a step is the plain loop's


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("size", [12, 7])
def test_weights_after_some_steps_are_the_plain_loops(size: int, copies: int) -> None:
    """On the CPU to the bit; to rounding with copies, each of which adds up its share first."""
    net = WithLoss(two_stages())
    plain = copy.deepcopy(net.model)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    theirs = torch.optim.Adam(plain.parameters(), lr=0.05)
    model = poptorch.trainingModel(net, accumulating(3, copies), optimizer)
    for _ in range(4):
        x, y = batch(size)
        model(x, y)
        theirs.zero_grad()
        plain_step(plain, (x,), {}, y, F.cross_entropy, 3 if copies == 1 else size)
        theirs.step()
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        if copies == 1 and not is_simulated():
            assert equal(one, other)
        assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_accumulation_changes_nothing_under_mean_and_scales_under_sum() -> None:
    """One micro-batch and two give equal weights; under sum with half the learning rate."""

    def trained(count: int, lr: float, reduction: poptorch.ReductionType) -> list[Tensor]:
        net = copy.deepcopy(start)
        opts = accumulating(count)
        opts.Training.accumulationAndReplicationReductionType(reduction)
        optimizer = torch.optim.SGD(net.parameters(), lr=lr)
        with warnings.catch_warnings():  # one micro-batch leaves stages idle
            warnings.filterwarnings("ignore", ".* on 2 devices: only one works")
            model = poptorch.trainingModel(net, opts, optimizer)
            for x, y in batches:
                model(x, y)
        return [p.detach() for p in net.parameters()]

    start = WithLoss(two_stages())
    batches = [batch(8) for _ in range(3)]
    mean, total = poptorch.ReductionType.Mean, poptorch.ReductionType.Sum
    once = trained(1, 0.1, mean)
    for other in (trained(2, 0.1, mean), trained(2, 0.05, total)):
        assert_close(other, once)


def test_device_iterations_are_steps() -> None:
    """A call has a step of the optimizer for each."""
    one, other = (WithLoss(two_stages()) for _ in range(2))
    other.load_state_dict(one.state_dict())
    x, y = batch(12)
    models = [
        poptorch.trainingModel(net, opts, torch.optim.SGD(net.parameters(), lr=0.1))
        for net, opts in ((one, accumulating(2)), (other, accumulating(2).deviceIterations(3)))
    ]
    losses = [models[0](x[at : at + 4], y[at : at + 4])[1] for at in (0, 4, 8)]
    assert_close(models[1](x, y)[1], losses[-1])
    assert_close(host([*one.parameters()]), host([*other.parameters()]))


def test_the_default_optimizer_is_plain_sgd_and_another_may_be_set() -> None:
    net = WithLoss(two_stages())
    plain = copy.deepcopy(net)
    model = poptorch.trainingModel(net, accumulating(2))
    x, y = batch(4)
    for lr in (0.01, 0.5):
        model(x, y)
        optimizer = torch.optim.SGD(plain.parameters(), lr=lr)
        optimizer.zero_grad()
        plain(x, y)[1].backward()
        optimizer.step()
        model.setOptimizer(torch.optim.SGD(net.parameters(), lr=0.5))
    assert_close(host([*net.parameters()]), [*plain.parameters()])


def test_sharded_execution_gives_the_same_one_stage_at_a_time() -> None:
    net = WithLoss(two_stages())
    one = poptorch.trainingModel(net, accumulating(2))
    twin = copy.deepcopy(net)
    opts = accumulating(2).setExecutionStrategy(poptorch.ShardedExecution())
    other = poptorch.trainingModel(twin, opts)
    x, y = batch(4)
    assert_close(one(x, y), other(x, y))
    assert other.pipeline.schedule == "sequential"
    assert_close(host([*net.parameters()]), host([*twin.parameters()]))


def test_one_micro_batch_is_meant_where_stages_take_turns() -> None:
    """No warning says that the devices stand idle."""
    opts = accumulating(1).setExecutionStrategy(poptorch.ShardedExecution())
    poptorch.trainingModel(WithLoss(two_stages()), opts)(*batch(4))


@pytest.mark.cpu("two copies need devices that the CPU always has")
def test_too_few_devices_for_the_copies_are_one_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which runs the others' shares as further micro-batches, with the same result."""
    net = WithLoss(two_stages())
    plain = copy.deepcopy(net)
    x, y = batch(8)
    model = poptorch.trainingModel(net, accumulating(2, 2), devices=["cpu"] * 2)
    with pytest.warns(
        UserWarning, match=r"replicationFactor\(2\) wants 4 devices, and there are 2"
    ):
        _, losses = model(x, y)
    other = poptorch.trainingModel(plain, accumulating(2, 2), devices=["cpu"] * 4)
    assert_close(losses, other(x, y)[1])
    assert model.pipeline.chunks == 4
    with pytest.raises(PlanError, match=r"a device for each of the 2 IPUs that .* got 1 \("):
        poptorch.inferenceModel(two_stages(), devices=["cpu"])(x)


# --- where the loss is


def test_a_marked_loss_is_found_among_several_numbers() -> None:
    def script(net: Scripted, x: Tensor, mark: Any) -> Any:
        out = net.layers[0](x)
        return {"size": out.abs().mean(), "loss of": mark(out), "out": out}

    def unmarked(out: Tensor) -> Tensor:
        return out.square().mean()

    def marked(out: Tensor) -> Tensor:
        return poptorch.identity_loss(out.square(), reduction="mean")

    net = Scripted(script)
    x = torch.randn(4, 4)
    found = poptorch.trainingModel(net, accumulating(2))(x, marked)
    out = host(found["out"])
    assert_close(found["loss of"], out.square().mean())
    with pytest.raises(UsageError, match="returned dict without a loss"):
        poptorch.trainingModel(net, accumulating(2))(x, unmarked)


def test_identity_loss_reduces() -> None:
    x = torch.tensor([1.0, 3.0])
    assert poptorch.identity_loss(x, "sum") == 4
    assert poptorch.identity_loss(x, "mean") == 2
    assert poptorch.identity_loss(x[:1], "none") == 1
    for reduction in ("none", "max"):
        with pytest.raises(UsageError, match=rf"got '{reduction}' for a loss of shape \(2,\)"):
            poptorch.identity_loss(x, reduction)


@pytest.mark.parametrize("is_sum", [True, False], ids=["their sum", "no sum"])
def test_of_several_marked_losses_the_one_of_the_others_is_trained(is_sum: bool) -> None:
    """Without one PopTorch refuses the model; the last one was trained alone."""

    def script(net: Scripted, x: Tensor) -> Any:
        out = net.layers[0](x)
        one, other = (poptorch.identity_loss(f(out), "mean") for f in (torch.square, torch.abs))
        total = poptorch.identity_loss(one + other, "none")
        return (total, one, other) if is_sum else (one, other)

    net, x = Scripted(script), torch.randn(4, 4)
    plain = copy.deepcopy(net)
    training = poptorch.trainingModel(net, accumulating(2))
    if is_sum:
        training(x)
        plain_step(plain, (x,), {}, None, lambda found: found[0], 2)
        assert_same_gradients(net, plain)
    else:
        with pytest.raises(UsageError, match="one final loss .* got 2 of which none"):
            training(x)


# --- which results come back


MODES = poptorch.OutputMode


@pytest.mark.parametrize(
    ("mode", "rows"),
    [
        (MODES.All, [0, 1, 2, 3, 4, 5, 6, 7]),
        (MODES.Final, [5, 7]),
        (MODES.EveryN, [1, 3, 5, 7]),
        (MODES.Sum, [(0, 1, 4, 5), (2, 3, 6, 7)]),
    ],
)
@pytest.mark.parametrize("trains", [True, False])
def test_output_modes_choose_micro_batches(mode: MODES, rows: Any, trains: bool) -> None:
    """Of two copies and two micro-batches, in two steps: a sample each. In inference these four
    micro-batches of a copy are in one call, and each copy's share is in one piece."""
    if not trains:
        inference = {
            MODES.Final: [3, 7],
            MODES.Sum: [(0, 1, 2, 3), (4, 5, 6, 7)],
        }
        rows = inference.get(mode, rows)
    x = torch.arange(8.0)[:, None]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Any:
            return {"rows": x, "loss": (x * self.weight).sum() + x.sum().detach(), "name": "n"}

    opts = poptorch.Options().replicationFactor(2).outputMode(mode, 2)
    if trains:
        opts.deviceIterations(2).Training.gradientAccumulation(2)
        net = Net()
        model = poptorch.trainingModel(net, opts, torch.optim.SGD(net.parameters(), lr=0.0))
    else:
        model = poptorch.inferenceModel(Net(), opts.deviceIterations(4))
    found = model(x)
    expected = [float(sum(row) if isinstance(row, tuple) else row) for row in rows]
    assert found["rows"].tolist() == [[row] for row in expected]
    assert found["loss"].tolist() == expected
    assert found["name"] == "n"


def test_results_are_on_the_host_without_graphs() -> None:
    """One number of one micro-batch is 0-d."""
    out, loss = poptorch.trainingModel(WithLoss(two_stages()), accumulating(2))(*batch(4))
    assert (out.device.type, loss.device.type) == ("cpu", "cpu")
    assert not out.requires_grad
    assert not loss.requires_grad
    assert (out.shape, loss.shape) == ((2, 3), ())


def test_choosing_goes_by_copy() -> None:
    parts = [(0, "a"), (1, "b"), (0, "c"), (1, "d"), (0, "e")]
    assert chosen(parts, MODES.Final, 1) == ["e", "d"]
    assert chosen(parts, MODES.EveryN, 2) == ["c", "d"]
