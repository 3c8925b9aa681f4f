"""PopTorch's door: its tutorial as printed, what its own tests pin, and what they leave out."""

import copy
import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import blockpipe as bp
from blockpipe.compat import poptorch
from blockpipe.compat.poptorch import MISSING, options
from blockpipe.compat.poptorch.outputs import chosen
from blockpipe.devices.devices import default_devices
from blockpipe.errors import BlockpipeError, MarkError, MicrobatchError, PlanError, UsageError

from ..parity import plain_step
from ..stage_devices import assert_close, equal, host, is_simulated, stages

PAGE = Path(__file__).parents[2] / "docs/how-to/from-poptorch.md"


class Network(nn.Module):
    """The tutorial's: four stages, by the IPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = torch.nn.Linear(5, 10)
        self.layer2 = torch.nn.Linear(10, 5)
        self.layer3 = torch.nn.Linear(5, 5)
        self.layer4 = torch.nn.Linear(5, 5)

        self.act = torch.nn.ReLU()
        self.softmax = torch.nn.Softmax(dim=1)

    def forward(self, x: Tensor) -> Tensor:
        poptorch.Block.useAutoId()
        with poptorch.Block(ipu_id=0):
            x = self.act(self.layer1(x))

        with poptorch.Block(ipu_id=1):
            x = self.act(self.layer2(x))

        with poptorch.Block(ipu_id=2):
            x = self.act(self.layer3(x))
            x = self.act(self.layer4(x))

        with poptorch.Block(ipu_id=3):
            x = self.softmax(x)
        return x  # noqa: RET504 - as the tutorial has it


class WithLoss(nn.Module):
    """Any model, with the loss where PopTorch's users have it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        out = self.model(x)
        return out if labels is None else (out, F.cross_entropy(out, labels))


class Scripted(nn.Module):
    """Layers of one size, and a forward that is given."""

    def __init__(self, script: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.script = script

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.script(self, *args, **kwargs)


def two_stages() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    poptorch.BeginBlock(net[2], ipu_id=1)
    return net


def accumulating(count: int, copies: int = 1) -> poptorch.Options:
    opts = poptorch.Options().replicationFactor(copies)
    opts.Training.gradientAccumulation(count)
    return opts


def two_parts() -> poptorch.Options:
    """For inference: two micro-batches, so that two devices can be at work."""
    return poptorch.Options().deviceIterations(2)


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4), torch.randint(0, 3, (size,))


def run(script: Any, strategy: Any = None, x: Tensor | None = None) -> tuple[list[int], Any]:
    """The route of an inference, and the executor."""
    opts = two_parts()
    if strategy is not None:
        opts.setExecutionStrategy(strategy)
    model = poptorch.inferenceModel(Scripted(script), opts)
    x = torch.randn(4, 4) if x is None else x
    plain = copy.deepcopy(model.model)(x)
    assert_close(model(x), plain)
    return model.pipeline.recording.route, model


# --- the tutorial


def test_the_handwritten_network_is_on_four_stages() -> None:
    """Also its softmax, which belongs to no layer with parameters."""
    net, x = Network(), torch.randn(6, 5)
    expected = net(x)
    model = poptorch.inferenceModel(net, two_parts())
    assert_close(model(x), expected)
    assert model.pipeline.recording.route == [0, 1, 2, 3]
    assert len({str(device) for device in model.pipeline.devices}) == (4 if is_simulated() else 1)


@pytest.mark.slow
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
            warnings.filterwarnings("ignore", "chunks=1 on 2 devices")
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


# --- blocks


def test_with_and_sticky_begin_place_alike() -> None:
    """What is before the first block is on stage 0."""

    def scoped(net: Scripted, x: Tensor) -> Tensor:
        x = net.layers[0](x)
        with poptorch.Block(ipu_id=1):
            x = net.layers[1](x)
        with poptorch.Block("head", ipu_id=2):
            return net.layers[2](x)

    def sticky(net: Scripted, x: Tensor) -> Tensor:
        x = net.layers[0](x)
        poptorch.Block.start(ipu_id=1)
        x = net.layers[1](x)
        poptorch.Block.start("head", 2)
        return net.layers[2](x)

    for script in (scoped, sticky):
        route, model = run(script)
        assert route == [0, 1, 2]
        placed = model.pipeline.plan.stages()
        assert [placed[f"layers.{i}", 0] for i in range(3)] == [0, 1, 2]


def test_stages_go_by_the_blocks_names_or_their_order() -> None:
    """Blocks of one name are one stage, and those without a name are counted in each forward."""

    def named(net: Scripted, x: Tensor) -> Tensor:
        for name, layer in zip("ABA", net.layers, strict=False):
            with poptorch.Block(name):
                x = layer(x)
        return x

    def unnamed(net: Scripted, x: Tensor) -> Tensor:
        poptorch.Block.useAutoId()
        for layer in net.layers:
            with poptorch.Block():
                x = layer(x)
        return x

    assert run(named)[0] == [0, 1, 0]
    assert run(unnamed)[0] == [0, 1, 2, 3]
    listed = poptorch.PipelinedExecution(poptorch.Stage("0", "1"), ["2"], "3")
    assert run(unnamed, listed)[0] == [0, 1, 2]
    assert listed.stage("1").blocks == ("0", "1")
    assert run(named, poptorch.PipelinedExecution("A", "B"))[0] == [0, 1, 0]
    with pytest.raises(PlanError, match=r"one of the blocks \['A'\], got 'B' \(.*test_poptorch"):
        run(named, poptorch.PipelinedExecution("A"))


def test_auto_stages_come_back_to_a_device() -> None:
    """Under AutoIncrement each block is a stage of its own, on the IPU that it names."""

    def script(net: Scripted, x: Tensor) -> Tensor:
        for ipu, layer in zip((0, 1, 0), net.layers, strict=False):
            with poptorch.Block(ipu_id=ipu):
                x = layer(x)
        return x

    route, model = run(script, poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))
    assert route == [0, 1, 2]
    first, second, third = model.pipeline._preparer._given_lanes  # on the CPU too: threads
    assert first == third != second
    assert run(script)[0] == [0, 1, 0]


def test_a_stage_may_say_its_ipu() -> None:
    strategy = poptorch.PipelinedExecution(
        poptorch.Stage("A").ipu(1), poptorch.Stage("B").ipu(0), poptorch.Stage("C")
    )

    def script(net: Scripted, x: Tensor) -> Tensor:
        for name, layer in zip("ABC", net.layers, strict=False):
            with poptorch.Block(name):
                x = layer(x)
        return x

    _, model = run(script, strategy)
    if is_simulated():
        every = default_devices()
        assert every is not None
        assert model.pipeline.devices == [every[1], every[0], every[2]]


def test_begin_block_keeps_the_module_as_it_is() -> None:
    """Object, class, names of parameters, keys; nothing new in dir() but what is private."""
    layer = nn.Linear(4, 4)
    before, keys, names = type(layer), [*layer.state_dict()], set(dir(layer))
    assert poptorch.BeginBlock(layer, "A", ipu_id=1) is layer
    assert type(layer) is before
    assert [*layer.state_dict()] == [name for name, _ in layer.named_parameters()] == keys
    assert all(name.startswith("_blockpipe") for name in set(dir(layer)) - names)
    assert (
        repr(layer)
        == "Linear(BeginBlock(stage=1, name='A'), in_features=4, out_features=4, bias=True)"
    )


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_keep_the_mark(copied: Any) -> None:
    net = copied(two_stages())
    model = poptorch.inferenceModel(net, two_parts())
    model(torch.randn(4, 4))
    assert model.pipeline.recording.route == [0, 1]


@pytest.mark.slow
@pytest.mark.cpu("another process has no simulated accelerator")
def test_a_saved_model_keeps_the_mark_in_another_process(tmp_path: Path) -> None:
    """A model that has been trained, too."""
    net = two_stages()
    model = poptorch.trainingModel(WithLoss(net), accumulating(2))
    model(*batch(4))
    torch.save(net, tmp_path / "net.pt")
    program = f"""
        import torch
        from blockpipe.compat import poptorch
        net = torch.load({str(tmp_path / "net.pt")!r}, weights_only=False)
        model = poptorch.inferenceModel(net)
        model(torch.ones(4, 4))
        print(model.pipeline.recording.route)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[0, 1]"


def test_marking_twice_is_an_error_until_blocks_are_removed() -> None:
    net = two_stages()
    with pytest.raises(MarkError, match="is marked as stage 1 already"):
        poptorch.BeginBlock(net[2], ipu_id=0)
    with pytest.raises(
        poptorch.Error, match="expected an nn.Module or a callable for BeginBlock, got 3"
    ):
        poptorch.BeginBlock(3)  # type: ignore[type-var]
    poptorch.removeBlocks(net)
    assert "BeginBlock" not in repr(net)
    poptorch.BeginBlock(net[1], ipu_id=1)
    with pytest.raises(UsageError, match="expected an nn.Module, got str"):
        poptorch.removeBlocks("net")  # type: ignore[arg-type]


def test_functions_and_callables_are_blocks() -> None:
    """A function keeps its name and docstring."""

    @poptorch.BlockFunction("head", ipu_id=2)
    def head(net: Scripted, x: Tensor) -> Tensor:
        """The head."""
        return net.layers[2](x)

    middle = poptorch.BeginBlock(lambda net, x: net.layers[1](x), ipu_id=1)

    def script(net: Scripted, x: Tensor) -> Tensor:
        return head(net, middle(net, net.layers[0](x)))

    assert (head.__name__, head.__doc__) == ("head", "The head.")
    assert run(script)[0] == [0, 1, 2]


def test_blocks_are_entered_again_in_a_loop() -> None:
    """A module under BeginBlock without an IPU is one block, however often it is called."""

    def script(net: Scripted, x: Tensor) -> Tensor:
        for _ in range(2):
            with poptorch.Block("A", ipu_id=0):
                x = net.layers[0](x)
            with poptorch.Block("B", ipu_id=1):
                x = net.layers[1](x)
        return x

    assert run(script)[0] == [0, 1, 0, 1]

    def modules(net: Scripted, x: Tensor) -> Tensor:
        for _ in range(2):
            for layer in net.layers[:2]:
                x = layer(x)
        return x

    net = Scripted(modules)
    for layer in net.layers[:2]:
        poptorch.BeginBlock(layer)
    model = poptorch.inferenceModel(net, two_parts())
    model(torch.randn(4, 4))
    assert model.pipeline.recording.route == [0, 1, 0, 1]


def test_control_flow_inside_blocks() -> None:
    """By an argument that is no tensor, in one pipeline."""

    def script(net: Scripted, x: Tensor, deep: bool) -> Tensor:
        with poptorch.Block(ipu_id=0):
            if deep:
                x = net.layers[0](x)
            x = net.layers[1](x)
        with poptorch.Block(ipu_id=1):
            for layer in net.layers[2:] if deep else net.layers[2:3]:
                x = layer(x)
        return x

    net = Scripted(script)
    plain = copy.deepcopy(net)
    model = poptorch.inferenceModel(net, two_parts())
    x = torch.randn(4, 4)
    for deep in (True, False, True):
        assert_close(model(x, deep), plain(x, deep))


def test_buffers_count_once_for_each_micro_batch() -> None:
    """What is written in forward adds up over micro-batches, in each of the copies."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(1)
            return self.layer(x)

    net = Counts()
    poptorch.BeginBlock(net.layer, ipu_id=1)
    model = poptorch.trainingModel(WithLoss(net), accumulating(3))
    for _ in range(2):
        model(*batch(6))
    assert host(net.seen) == 6
    net.seen.zero_()
    model = poptorch.trainingModel(WithLoss(net), accumulating(3, 2))
    model(*batch(6))
    assert host(net.seen) == 3  # the first copy's


def test_inputs_may_be_nested() -> None:
    """Dictionaries, tuples and None are handed on; tensors in them are split."""

    def script(net: Scripted, data: Any, mask: Tensor | None = None, *, scale: Any = None) -> Any:
        x = net.layers[0](data["x"] + data["more"][0])
        with poptorch.Block(ipu_id=1):
            x = net.layers[1](x if mask is None else x * mask)
        return {"out": (x, [x + 1]), "scale": scale, "none": None}

    net = Scripted(script)
    plain = copy.deepcopy(net)
    model = poptorch.inferenceModel(net, two_parts())
    data = {"x": torch.randn(4, 4), "more": (torch.randn(4, 4), "text")}
    for mask in (None, torch.rand(4, 1)):
        assert_close(model(data, mask, scale=2), plain(data, mask, scale=2))


# --- what PopTorch's tests leave out


def test_nested_scopes_restore_the_outer_one() -> None:
    """There the inner exit leaves operations without a block."""

    def script(net: Scripted, x: Tensor) -> Tensor:
        with poptorch.Block(ipu_id=0):
            x = net.layers[0](x)
            with poptorch.Block(ipu_id=1):
                x = net.layers[1](x)
            return net.layers[2](x)

    route, model = run(script)
    assert route == [0, 1, 0]
    assert model.pipeline.plan.stages()["layers.2", 0] == 0


def test_an_exception_inside_a_block_leaves_it() -> None:
    """It reaches the caller, and the next call works."""
    state = {"fails": True}

    def script(net: Scripted, x: Tensor) -> Tensor:
        try:
            with poptorch.Block(ipu_id=0):
                x = net.layers[0](x)
                with poptorch.Block(ipu_id=1):
                    x = net.layers[1](x)
                    raise KeyError("inner")
        except KeyError:
            pass
        x = net.layers[2](x)
        if state["fails"]:
            raise ValueError("too cold")
        return x

    net = Scripted(script)
    model = poptorch.inferenceModel(net, two_parts())
    with pytest.raises((ValueError, BlockpipeError), match="too cold"):
        model(torch.randn(4, 4))
    state["fails"] = False
    x = torch.randn(4, 4)
    assert_close(model(x), copy.deepcopy(net).cpu()(x))
    assert model.pipeline.recording.route == [0, 1, 0]


def test_begin_block_under_a_scope_of_another_stage_lasts_to_its_end() -> None:
    def script(net: Scripted, x: Tensor) -> Tensor:
        with poptorch.Block(ipu_id=0):
            x = net.layers[0](x)
            with poptorch.Block(ipu_id=1):
                x = net.layers[1](x)  # marked for IPU 2
                x = net.layers[2](x)
            return net.layers[3](x)

    net = Scripted(script)
    poptorch.BeginBlock(net.layers[1], ipu_id=1)
    model = poptorch.inferenceModel(net, two_parts())
    model(torch.randn(4, 4))
    assert model.pipeline.plan.stages() == {
        ("layers.0", 0): 0,
        ("layers.1", 0): 1,
        ("layers.2", 0): 1,
        ("layers.3", 0): 0,
    }


def test_the_same_module_may_be_called_in_different_blocks() -> None:
    """Its weights live where it is called first, and get both gradients."""

    def script(net: Scripted, x: Tensor) -> Tensor:
        with poptorch.Block(ipu_id=0):
            x = net.layers[0](x)
        with poptorch.Block(ipu_id=1):
            return net.layers[0](x).square().mean()

    net = Scripted(script)
    plain = copy.deepcopy(net)
    model = poptorch.trainingModel(
        net, accumulating(2), torch.optim.SGD(net.layers[0].parameters(), lr=0.1)
    )
    x = torch.randn(4, 4)
    loss = model(x)
    assert model.pipeline.recording.route == [0, 1]
    assert loss.dim() == 0
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(x).backward()
    optimizer.step()
    assert_close(net.layers[0].weight, plain.layers[0].weight)


# --- the executor


def test_an_executor_stands_for_its_model() -> None:
    net = WithLoss(two_stages())
    model = poptorch.trainingModel(net, accumulating(2))
    assert not model.isCompiled()
    with pytest.raises(UsageError, match="expected a model that has been called"):
        model.pipeline  # noqa: B018
    model.compile(*batch(4))
    assert model.isCompiled()
    model(*batch(4))
    assert model.model is net
    assert [*model.state_dict()] == [*net.state_dict()]
    assert model.eval() is net
    assert not net.training
    model.train()
    saved = copy.deepcopy(net.state_dict())
    model(*batch(4))
    model.load_state_dict(saved)
    assert_close(host(net.state_dict()), host(saved))
    for method in (model.copyWeightsToHost, model.copyWeightsToDevice, model.attachToDevice):
        method()
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        model.absent  # noqa: B018


def test_a_destroyed_model_is_where_it_was_and_starts_anew() -> None:
    net = WithLoss(two_stages())
    model = poptorch.trainingModel(net, accumulating(2, 2))
    model(*batch(4))
    model.destroy()
    assert {p.device.type for p in net.parameters()} == {"cpu"}
    assert not model.isCompiled()
    net(*batch(4))
    model(*batch(4))
    model.detachFromDevice()
    assert not model.isCompiled()


def test_training_and_inference_share_a_model() -> None:
    """Its weights, and its mode, which nobody changes."""
    net = WithLoss(two_stages())
    training = poptorch.trainingModel(net, accumulating(2))
    inference = poptorch.inferenceModel(net, two_parts())
    x, y = batch(4)
    before = inference(x)
    training(x, y)
    assert (inference(x) - before).abs().max() > 0
    assert net.training


def test_options_of_the_pipeline_go_along() -> None:
    model = poptorch.trainingModel(
        WithLoss(two_stages()), accumulating(2), checkpoint="always", devices=stages(2)
    )
    model(*batch(4))
    assert model.pipeline.checkpoint == "always"
    with pytest.raises(UsageError, match=r"got chunks= .*; call options.Training.gradient"):
        poptorch.trainingModel(two_stages(), chunks=3)


def test_a_batch_of_another_size_than_the_inputs_is_an_error() -> None:
    """But any number of samples is a batch."""
    model = poptorch.trainingModel(WithLoss(two_stages()), accumulating(4))
    model(*batch(3))
    with pytest.raises((MicrobatchError, ValueError)):
        model(torch.randn(4, 4), torch.randint(0, 3, (3,)))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: poptorch.trainingModel(3), "expected an nn.Module, got int"),
        (lambda: poptorch.trainingModel(two_stages(), "o"), "expected Options, got str"),
        (
            lambda: poptorch.trainingModel(two_stages(), None, 0.1),
            "expected an optimizer of torch.optim, got float",
        ),
        (
            lambda: poptorch.inferenceModel(two_stages(), accumulating(2)),
            r"expected no gradient accumulation for inference, got gradientAccumulation\(2\)",
        ),
        (
            lambda: poptorch.inferenceModel(two_stages()).setOptimizer(None),
            "expected a training model, got one for inference",
        ),
        (lambda: poptorch.Options().replicationFactor(0), r"got replicationFactor\(0\)"),
        (lambda: poptorch.Options().deviceIterations(True), r"got deviceIterations\(True\)"),
        (lambda: poptorch.Options().outputMode("All"), "expected an OutputMode, got 'All'"),
        (lambda: poptorch.Options().outputMode(MODES.EveryN), r"got output_return_period\(None\)"),
        (
            lambda: poptorch.Options().setExecutionStrategy(poptorch.PipelinedExecution),
            "got type .*; pass one of them, with its brackets",
        ),
        (
            lambda: poptorch.Options().Training.accumulationReductionType(
                poptorch.ReductionType.NoReduction
            ),
            "expected ReductionType.Mean or ReductionType.Sum",
        ),
        (lambda: poptorch.Stage(0), r"expected names of blocks, got \[0\]"),
        (lambda: poptorch.PipelinedExecution(0), "expected a Stage, a block's name, or a list"),
        (
            lambda: poptorch.PipelinedExecution("A", poptorch.Stage("B", "A")),
            "got 'A' in stage 0 and in stage 1",
        ),
        (lambda: poptorch.recomputationCheckpoint(3), "expected tensors, got int"),
        (lambda: poptorch.Block(ipu_id=-1), "a stage .*-1"),
    ],
)
def test_mistakes_are_told(mistake: Any, message: str) -> None:
    """What was expected, what came, and the line."""
    with pytest.raises(poptorch.Error, match=message) as caught:
        mistake()
    assert re.search(r"test_poptorch\.py:\d+", str(caught.value))


# --- options, and what has no meaning here


def test_options_chain_and_print_what_is_changed() -> None:
    opts = poptorch.Options().deviceIterations(2).anchorMode(poptorch.AnchorMode.All).randomSeed(1)
    assert repr(opts) == "Options(deviceIterations=2, outputMode=OutputMode.All)"
    training = opts.Training.gradientAccumulation(3)
    assert training is opts.Training
    assert (opts.device_iterations, training.gradient_accumulation) == (2, 3)
    assert torch.initial_seed() == 1
    assert repr(poptorch.Options()) == "Options()"


@pytest.mark.parametrize("name", options.ACCEPTED)
def test_what_has_no_meaning_is_accepted_with_a_warning(name: str) -> None:
    opts = poptorch.Options()
    is_group = name in ("Jit", "Precision", "TensorLocations", "_Popart")
    called = f"{name}.set" if is_group else name
    option = getattr(opts, name)
    with pytest.warns(UserWarning, match=re.escape(f"{called} does nothing here: ")) as caught:
        found = option.set("anything", 1) if is_group else option(1)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert found is (option if is_group else opts)


@pytest.mark.parametrize("name", options.ACCEPTED_IN_TRAINING)
def test_what_has_no_meaning_in_training_too(name: str) -> None:
    with pytest.warns(UserWarning, match=f"{name} does nothing here"):
        getattr(poptorch.Options().Training, name)(True)


def test_what_would_change_the_script_is_refused() -> None:
    """With what to do instead; a name that nobody knows has one that is near."""
    for group, table in (
        (poptorch.Options(), options.REFUSED),
        (poptorch.Options().Training, options.REFUSED_IN_TRAINING),
    ):
        for name, remedy in table.items():
            with pytest.raises(UsageError, match=rf"{name} cannot .*; {re.escape(remedy)}"):
                getattr(group, name)
    with pytest.raises(AttributeError, match="did you mean 'deviceIterations'"):
        poptorch.Options().deviceIteration(3)
    with pytest.raises(AttributeError, match="has no attribute 'optim'; use torch.optim"):
        poptorch.optim  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'no_such'$"):
        poptorch.no_such  # noqa: B018


def test_recomputation_checkpoints_are_handed_back() -> None:
    one, other = torch.ones(2), torch.zeros(2)
    with pytest.warns(UserWarning, match="keeps nothing here"):
        assert poptorch.recomputationCheckpoint(one) is one
    with pytest.warns(UserWarning, match="keeps nothing here"):
        assert poptorch.recomputationCheckpoint(one, other) == (one, other)
    with pytest.warns(UserWarning, match="keeps nothing here"):
        assert poptorch.recomputationCheckpoint([one]) == [one]


def test_batches_of_the_loader_are_those_of_a_call() -> None:
    """Of two iterations, two copies, three micro-batches; the rest is dropped unless asked for."""
    opts = accumulating(3, 2).deviceIterations(2)
    data = TensorDataset(torch.arange(50.0))
    loader = poptorch.DataLoader(opts, data, batch_size=2)
    assert loader.combinedBatchSize == 24
    assert [len(rows) for (rows,) in loader] == [24, 24]
    assert [len(r) for (r,) in poptorch.DataLoader(opts, data, 2, drop_last=False)] == [24, 24, 2]
    with pytest.warns(UserWarning, match=r"DataLoader\(mode=…\) does nothing here"):
        poptorch.DataLoader(opts, data, mode=None)


def test_the_page_has_every_name() -> None:
    """What is there, what is accepted, and what is refused."""
    page = PAGE.read_text()
    tables = (options.ACCEPTED, options.ACCEPTED_IN_TRAINING, options.REFUSED)
    for table in (*tables, options.REFUSED_IN_TRAINING, MISSING, dict.fromkeys(poptorch.__all__)):
        assert [name for name in table if name not in page] == []


def test_stages_are_those_of_the_core() -> None:
    """The marks mean the same to a pipeline without the door."""
    assert bp.record(Network(), torch.zeros(1, 5)).route == [0, 1, 2, 3]
