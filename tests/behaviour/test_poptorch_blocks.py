"""PopTorch's blocks: which stage they give, and what PopTorch's own tests leave out."""

import copy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockpipe.compat import poptorch
from blockpipe.devices.devices import default_devices
from blockpipe.errors import BlockpipeError, MarkError, PlanError, UsageError

from ..stage_devices import assert_close, host, is_simulated
from .poptorch_models import Scripted, WithLoss, accumulating, batch, two_parts, two_stages


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
