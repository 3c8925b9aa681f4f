"""Pipelines from device maps: Accelerate's, and mappings of one's own."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import DeviceError, PlanError, UsageError

from ..models import square
from ..stage_devices import assert_close, equal, host, is_simulated, stages

HERE = r"\S*test_device_map\.py:\d+"


class Net(nn.Module):
    """As language models are: modules in a list, one without parameters, and tied ends."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.rotary = nn.Dropout(0.0)
        self.head = nn.Linear(4, 4, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.rotary(self.embed(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def two() -> tuple[str, str]:
    """Names of two devices; on the CPU, of two threads."""
    first, second = stages(2)
    return (first, second) if is_simulated() else ("cpu:0", "cpu:1")


def mapping(first: Any, second: Any) -> dict[str, Any]:
    return {
        "embed": first,
        "layers.0": first,
        "layers.1": first,
        "layers.2": second,
        "layers.3": second,
        "rotary": second,
        "head": second,
    }


def steps(step: Any, model: nn.Module, count: int = 3) -> list[Tensor]:
    """Losses of some steps, and the parameters at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses = []
    for _ in range(count):
        losses.append(step(torch.randn(8, 4)))
        optimizer.step()
        optimizer.zero_grad()
    return host([*losses, *model.parameters()])


def plain_steps(model: nn.Module) -> list[Tensor]:
    def step(x: Tensor) -> Tensor:
        loss = square(model(x))
        loss.backward()
        return loss

    return steps(step, model)


def layout_of(model: nn.Module, device_map: dict[str, Any]) -> str:
    """Where stages begin."""
    pipe = bp.from_device_map(model, device_map, chunks=2)
    return bp.record(model, torch.zeros(2, 4), plan=pipe.plan).plan.layout


@pytest.mark.parametrize("tied", [False, True])
def test_a_mapping_makes_stages_that_train_as_the_plain_model(tied: bool) -> None:
    """Both devices have parameters, and tied ones are one parameter still."""
    torch.manual_seed(0)
    model = Net(tied=tied)
    reference = copy.deepcopy(model)
    pipe = bp.from_device_map(model, mapping(*two()), chunks=4)
    found = steps(lambda x: pipe.forward_backward(x, loss_fn=square).loss, model)
    assert_close(found, plain_steps(reference))
    assert pipe.recording is not None
    assert pipe.recording.route == [0, 1]
    assert {str(p.device) for p in model.parameters()} == {*stages(2)}


@pytest.mark.parametrize(
    ("device_map", "layout"),
    [
        (mapping("cpu:0", "cpu:1"), "layers.2=1"),
        # In whatever order it is written, stages are numbered as the model defines its modules.
        (dict(reversed(mapping("cpu:0", "cpu:1").items())), "layers.2=1"),
        ({"": "cpu:0", "layers.2": "cpu:1", "layers.3": "cpu:1"}, "layers.2=1, head=0"),
        # The longest path that fits counts, also behind a module of another device.
        ({"": "cpu:0", "layers": "cpu:1", "layers.1": "cpu:0"}, "layers.0=1, layers.1=0, layers.2=1, head=0"),
        ({"layers.0": torch.device("cpu", 0), "layers.3": torch.device("cpu", 1)}, "layers.3=1"),
        ({"embed.weight": "cpu:1", "layers": "cpu:0", "head": "cpu:1"}, "head=1"),
    ],
)  # fmt: skip
def test_each_module_is_on_the_stage_of_its_device(device_map: Any, layout: str) -> None:
    """A module without parameters has none of its own."""
    assert layout_of(Net(), device_map) == layout


def test_options_are_those_of_a_pipeline() -> None:
    """All but the devices and the plan, which the map has."""
    pipe = bp.from_device_map(Net(), mapping("cpu:0", "cpu:1"), chunks=4, schedule="gpipe")
    assert (pipe.chunks, pipe.schedule) == (4, "gpipe")
    with pytest.raises(UsageError, match=rf"argument 'devices' \({HERE}\); they are those of the"):
        bp.from_device_map(Net(), mapping("cpu:0", "cpu:1"), devices=["cpu"] * 2)


@pytest.mark.parametrize(
    ("device_map", "kind", "match"),
    [
        (None, UsageError, rf"got Net without hf_device_map \({HERE}\); load it with from_pretr"),
        ("auto", PlanError, rf"got 'auto' \({HERE}\); pass 'auto' to from_pretrained"),
        ({}, PlanError, "expected a mapping from modules' paths to devices for device_map, got {}"),
        ({"layer.0": "cpu"}, PlanError, r"'layer\.0', which Net .*did you mean 'layers\.0'"),
        ({"layers": "disk"}, UsageError, r"'layers' of device_map, got 'disk'"),
        ({"layers": "meta"}, DeviceError, "expected a device that computes"),
        ({"layers": "gpu"}, DeviceError, "got 'gpu'"),
    ],
)
def test_a_map_that_fits_no_model_says_why(device_map: Any, kind: Any, match: str) -> None:
    """And what would."""
    with pytest.raises(kind, match=match):
        bp.from_device_map(Net(), device_map)


def test_modules_called_in_another_order_than_defined_are_an_error() -> None:
    """A stage's number is the place of its first module in the model."""
    model = Net()
    model._modules["embed"] = model._modules.pop("embed")  # defined last, called first
    pipe = bp.from_device_map(model, mapping("cpu:0", "cpu:1") | {"layers": "cpu:1"}, chunks=2)
    pipe(torch.zeros(4, 4))
    pipe = bp.from_device_map(model, {"embed": "cpu:0", "layers": "cpu:1"}, chunks=2)
    with pytest.raises(PlanError, match="stage 1 begins .* before stage 0 has run"):
        pipe(torch.zeros(4, 4))


def test_a_map_of_one_device_makes_one_stage_and_warns() -> None:
    """So that a script for several devices runs on one."""
    with pytest.warns(UserWarning, match="all modules on cpu, which makes a pipeline of one stage"):
        pipe = bp.from_device_map(Net(), {"": "cpu"}, chunks=2)
    assert pipe(torch.zeros(4, 4)).shape == (4, 4)


# --- with Accelerate


def dispatched(model: nn.Module, *devices: Any) -> nn.Module:
    """The model with Accelerate's hooks; on the CPU it has one device, and the hooks all the same."""
    accelerate = pytest.importorskip("accelerate")
    first, second = devices or (stages(2) if is_simulated() else ("cpu", "cpu"))
    return accelerate.dispatch_model(model, mapping(first, second), force_hooks=True)


def hooked(model: nn.Module) -> dict[str, set[str]]:
    """What each module has in its own dictionary of Accelerate's."""
    names = {"_hf_hook", "_old_forward", "forward", "to", "cuda"}
    return {path: names & vars(module).keys() for path, module in model.named_modules()}


def test_hooks_are_off_while_the_model_is_placed() -> None:
    """They come off at the first call, and unplace() puts the same ones back, each time."""
    model = dispatched(Net())
    had, forwards = hooked(model), [vars(m).get("forward") for m in model.modules()]
    assert had["layers.1"] == {"_hf_hook", "_old_forward", "forward"}
    pipe = bp.from_device_map(model, mapping(*two()), chunks=2)
    assert hooked(model) == had
    pipe.summary(torch.zeros(4, 4))
    assert hooked(model) == had  # a summary places nothing
    for _ in range(2):
        pipe.forward_backward(torch.zeros(4, 4), loss_fn=square)
        assert not any(hooked(model).values())
        assert pipe.unplace() is model
        assert hooked(model) == had
        assert [vars(m).get("forward") for m in model.modules()] == forwards


def test_every_pipeline_takes_the_hooks_off() -> None:
    """Its stages need not be those of the map."""
    model = dispatched(Net())
    bp.begin_blocks(model, {"layers.1": 1})
    pipe = bp.Pipeline(model, devices=stages(2), chunks=2)
    pipe(torch.zeros(4, 4))
    assert not any(hooked(model).values())
    assert len(pipe._preparer.known) == 1


def test_values_are_where_accelerate_had_them_after_unplace() -> None:
    """The model trains on as it was dispatched."""
    model = dispatched(Net())
    before = [p.device for p in model.parameters()]
    pipe = bp.from_device_map(model, dict(reversed(mapping(*two()[::-1]).items())), chunks=2)
    expected = host(model(torch.ones(4, 4)))
    assert_close(pipe(torch.ones(4, 4)), expected)
    pipe.unplace()
    assert [p.device for p in model.parameters()] == before
    assert_close(model(torch.ones(4, 4)), expected)


def test_a_forward_given_before_the_hooks_is_there_without_them() -> None:
    """It is what the hooks ran."""
    model = Net()
    model.layers[0].forward = lambda x: x * 0
    dispatched(model)
    pipe = bp.from_device_map(model, mapping(*two()), chunks=2)
    loss = pipe.forward_backward(torch.ones(4, 4), loss_fn=square).loss
    assert "_old_forward" not in vars(model.layers[0])
    assert_close(loss, square(pipe.unplace()(torch.ones(4, 4))).detach())


@pytest.mark.parametrize("wrap", [False, True], ids=["another hook", "a wrapped forward"])
def test_what_is_not_only_accelerates_stays(wrap: bool) -> None:
    """A hook of another kind, and a forward that somebody has wrapped since."""
    model = dispatched(Net())
    hooks = pytest.importorskip("accelerate.hooks")
    layer = model.layers[0]
    if wrap:
        inner = layer.forward
        layer.forward = lambda x: inner(x) + 1
    else:
        hooks.add_hook_to_module(layer, hooks.ModelHook(), append=True)
    pipe = bp.from_device_map(model, mapping(*two()), chunks=2)
    expected = host(square(model(torch.ones(4, 4))))
    assert hooked(layer)[""] == {"_hf_hook", "_old_forward", "forward"}
    assert_close(pipe.forward_backward(torch.ones(4, 4), loss_fn=square).loss, expected)
    assert hooked(layer)[""] == {"_hf_hook", "_old_forward", "forward"}
    assert not hooked(model)["layers.1"]


def test_hooks_that_were_added_meanwhile_stay() -> None:
    """The model was dispatched anew while it was placed."""
    model = dispatched(Net())
    pipe = bp.from_device_map(model, mapping(*two()), chunks=2)
    pipe(torch.zeros(4, 4))
    dispatched(model)
    hook = model.layers[0]._hf_hook
    pipe.unplace()
    assert model.layers[0]._hf_hook is hook


def test_a_copy_of_a_placed_pipeline_has_no_hooks() -> None:
    """Its model is where the stages are, and stays there."""
    pipe = bp.from_device_map(dispatched(Net()), mapping(*two()), chunks=2)
    pipe(torch.zeros(4, 4))
    other = copy.deepcopy(pipe)
    assert_close(other(torch.ones(4, 4)), pipe(torch.ones(4, 4)))
    assert not any(hooked(other.unplace()).values())


@pytest.mark.cpu("offloads to the disk, which is the same on every device")
def test_offloaded_weights_are_refused(tmp_path: Path) -> None:
    """A stage's weights stay on its device."""
    accelerate = pytest.importorskip("accelerate")
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
    model = accelerate.disk_offload(Net(), tmp_path, execution_device=torch.device("cpu"))
    for make in (bp.from_device_map, bp.Pipeline):
        with pytest.raises(
            UsageError, match=rf"keeps \['embed', .*{HERE}\): a stage's weights stay"
        ):
            make(model)


def test_a_language_model_loaded_with_a_device_map_trains(tmp_path: Path) -> None:
    """Two lines after from_pretrained, with the plain model's numbers; then it generates."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    first, second = stages(2)
    device_map = {
        "model.embed_tokens": first,
        **{f"model.layers.{i}": first if i < 2 else second for i in range(4)},
        "model.norm": second,
        "model.rotary_emb": second,
        "lm_head": second,
    }
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, reference = load(tmp_path, device_map=device_map), load(tmp_path)
    own = None  # its own, or on the CPU, where it has one device, a map of two threads
    if not is_simulated():
        own = {path: "cpu:0" if path < "model.layers.2" and path != "lm_head" else "cpu:1" for path in device_map}  # fmt: skip
    pipe = bp.from_device_map(model, own, chunks=2)
    tokens = torch.randint(0, 32, (4, 6))
    for step in range(2):
        plain = reference(input_ids=tokens, labels=tokens).loss
        plain.backward()
        loss = pipe.forward_backward(input_ids=tokens, labels=tokens).loss
        assert_close(loss, plain.detach())
        for name, parameter in reference.named_parameters():
            found = model.get_parameter(name).grad
            assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6)
            assert step or found is not None
    assert pipe.recording is not None
    assert pipe.recording.route == [0, 1]
    made = pipe.run(model.generate, tokens[:1], max_new_tokens=3, do_sample=False)
    expected = reference.generate(tokens[:1], max_new_tokens=3, do_sample=False)
    assert equal(made, expected)
