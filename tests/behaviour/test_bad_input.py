"""Wrong use is a clear error at once, and leaves the model as it was: rule 8."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import blockpipe as bp
from blockpipe.errors import (
    CrossingError,
    DeviceError,
    MarkError,
    MicrobatchError,
    PlanError,
    RecordingError,
    RouteError,
    ScheduleError,
    StateError,
    UsageError,
)

from ..models import SCHEDULES

HERE = os.path.basename(__file__).replace(".", r"\.") + r":\d+"
CPUS = ["cpu"] * 3


def plain_net(layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))


def marked_net() -> nn.Sequential:
    net = plain_net()
    bp.begin_blocks(net, {"1": 1, "2": 2})
    return net


def x() -> Tensor:
    return torch.linspace(-1, 1, 32).reshape(8, 4)


def pipeline(model: nn.Module | None = None, **options: Any) -> bp.Pipeline:
    options = {"devices": CPUS, "chunks": 4, **options}
    return bp.Pipeline(marked_net() if model is None else model, **options)


def train(pipe: bp.Pipeline, inputs: Tensor | None = None) -> Any:
    inputs = x() if inputs is None else inputs
    return pipe.forward_backward(inputs, target=torch.zeros(8, 4), loss_fn=F.mse_loss)


def state_of(model: nn.Module) -> Any:
    """Everything of a model that wrong use must not change."""
    return (
        [
            (
                n,
                id(m),
                type(m),
                sorted(m.__dict__),
                len(m._forward_pre_hooks),
                m.training,
                getattr(m.__dict__.get("_blockpipe_mark"), "stage", None),
            )
            for n, m in model.named_modules()
        ],
        [
            (
                n,
                id(p),
                type(p),
                str(p.device),
                p.requires_grad,
                p.grad is None,
                None
                if p.is_meta or isinstance(p, nn.UninitializedParameter)
                else (p.data_ptr(), p.detach().flatten().tolist()),
            )
            for n, p in (*model.named_parameters(), *model.named_buffers())
        ],
    )


class unchanged:  # noqa: N801 - reads as a claim
    """While entered, a model does not change."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.before = state_of(self.model)

    def __exit__(self, *failure: Any) -> None:
        if failure[0] is None:
            assert state_of(self.model) == self.before


# --- marks


@pytest.mark.parametrize("wrong", [-1, True, 1.5, "a"])
@pytest.mark.parametrize(
    "mark",
    [
        bp.Block,
        bp.BlockFunction,
        lambda stage: bp.BeginBlock(nn.Linear(1, 1), stage),
        lambda stage: bp.BeginBlock(len, stage),
        lambda stage: bp.begin_blocks(plain_net(), {"1": stage}),
    ],
)
def test_a_stage_that_is_no_whole_number_is_refused(mark: Callable[[Any], Any], wrong: Any) -> None:
    """A stage that is no whole number from 0 on is a MarkError with the value and the line."""
    with pytest.raises(
        MarkError, match=rf"a non-negative integer or None for stage, got {wrong!r} .*{HERE}"
    ):
        mark(wrong)


def test_a_wrong_stage_in_a_pattern_marks_nothing() -> None:
    """begin_blocks with one wrong stage of several marks nothing."""
    net = plain_net()
    with unchanged(net):
        with pytest.raises(MarkError, match="got 'a'"):
            bp.begin_blocks(net, {"1": 1, "2": "a"})  # type: ignore[dict-item]


def test_an_unmatched_pattern_names_near_misses() -> None:
    """A pattern that matches nothing is a MarkError with near misses, and nothing is marked."""
    net = nn.ModuleDict({"layer1": nn.Linear(4, 4), "layer2": nn.Linear(4, 4)})
    with unchanged(net):
        with pytest.raises(MarkError, match=rf"got 'layr2' .*{HERE}.*; did you mean 'layer2'"):
            bp.begin_blocks(net, {"layer1": 1, "layr2": 2})


def test_an_unmatched_pattern_without_near_miss_names_paths() -> None:
    """Where nothing is near, the message says which paths there are."""
    with pytest.raises(MarkError, match=r"the path of a module.* got 'zzzz' .*; known: '0', '1'"):
        bp.begin_blocks(plain_net(), {"zzzz": 1})


@pytest.mark.parametrize("patterns", [{3: 1}, ["1"], "1"])
def test_patterns_of_a_wrong_kind_are_refused(patterns: Any) -> None:
    """begin_blocks takes a mapping from path patterns; anything else is a MarkError."""
    with pytest.raises(MarkError, match=rf"path pattern.*{HERE}"):
        bp.begin_blocks(plain_net(), patterns)


def test_begin_blocks_of_no_module_is_refused() -> None:
    """begin_blocks on something that is no module is a MarkError."""
    with pytest.raises(MarkError, match="an nn.Module for model, got 'net'"):
        bp.begin_blocks("net", {"1": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("thing", "shown"), [(3, "3"), ("layer", "'layer'"), (None, "None"), (torch.ones(1), "Tensor")]
)
def test_a_mark_on_what_cannot_be_called_is_refused(thing: Any, shown: str) -> None:
    """BeginBlock of an object that is not callable is a MarkError that shows it and the line."""
    with pytest.raises(MarkError, match=rf"got {shown} .*{HERE}"):
        bp.BeginBlock(thing, stage=1)


def test_block_as_decorator_of_a_module_names_begin_block() -> None:
    """Block as a decorator takes functions; for a module the message names BeginBlock."""
    with pytest.raises(MarkError, match=rf"got Linear .*{HERE}.*; mark a module with BeginBlock"):
        bp.Block(1)(nn.Linear(1, 1))


def test_a_second_mark_names_both_lines() -> None:
    """Marking a module twice is a MarkError with both stages and both lines."""
    layer = bp.BeginBlock(nn.Linear(4, 4), stage=1)
    with unchanged(layer):
        with pytest.raises(MarkError, match=rf"stage 1 already \(.*{HERE}\).*stage 2 \(.*{HERE}\)"):
            bp.BeginBlock(layer, stage=2)


def test_a_second_mark_of_a_callable_is_refused() -> None:
    """Marking a callable twice is a MarkError, as for a module."""
    marked = bp.BeginBlock(lambda value: value, stage=1)
    with pytest.raises(MarkError, match=r"stage 1 already.*stage 2"):
        bp.BeginBlock(marked, stage=2)


def test_a_second_mark_by_patterns_marks_nothing() -> None:
    """Two patterns that name one module are a MarkError, and nothing is marked."""
    net = plain_net()
    with unchanged(net):
        with pytest.raises(MarkError, match=rf"'2' is marked as stage 1 already.*stage 2.*{HERE}"):
            bp.begin_blocks(net, {"[12]": 1, "2": 2})


# --- stages and devices


def test_a_gap_in_the_stages_is_named() -> None:
    """A gap in the stage numbers is a PlanError that names the gap and the lines of the marks."""
    net = bp.begin_blocks(plain_net(), {"2": 2})
    with unchanged(net):
        with pytest.raises(PlanError, match=rf"got \[0, 2\], where \[1\] are missing.*{HERE}"):
            train(pipeline(net))


def test_too_few_devices_are_refused_with_both_numbers() -> None:
    """Fewer devices than stages is a PlanError with both numbers and the lines of the marks."""
    net = marked_net()
    with unchanged(net):
        with pytest.raises(PlanError, match=rf"3 stages.*2 devices.*pass 3.*{HERE}"):
            train(pipeline(net, devices=["cpu"] * 2))


@pytest.mark.parametrize("device", ["cuda:77", "nope", None, torch.device("cuda", 77)])
def test_a_device_that_is_not_there_is_refused(device: Any) -> None:
    """A device that does not exist is a DeviceError when the pipeline is made."""
    net = marked_net()
    with unchanged(net):
        with pytest.raises(DeviceError, match=rf"device .*{device!s}"):
            pipeline(net, devices=["cpu", device, "cpu"])


def test_meta_as_a_device_is_refused() -> None:
    """The meta device holds no values: a stage on it is a DeviceError, and nothing moves."""
    net = marked_net()
    with unchanged(net):
        with pytest.raises(
            DeviceError, match="expected a device that computes for a stage, got 'meta'"
        ):
            train(pipeline(net, devices=["meta"] * 3))


@pytest.mark.parametrize("devices", ["cpu", 0, [], torch.device("cpu")])
def test_devices_that_are_no_list_are_refused(devices: Any) -> None:
    """Devices come as a list with one for each stage, or as their number; else a PlanError."""
    with pytest.raises(
        PlanError,
        match=r"expected (a list with one device for each stage|at least one device) for devices, got",
    ):
        pipeline(devices=devices)


# --- options


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"schedule": "zigzag"}, ScheduleError, "'1f1b'.*for schedule, got 'zigzag'"),
        ({"schedule": ["1f1b"]}, ScheduleError, "for schedule, got"),
        ({"chunks": 0}, PlanError, "a positive integer for chunks, got 0"),
        ({"chunks": -2}, PlanError, "a positive integer for chunks, got -2"),
        ({"chunks": 2.0}, PlanError, "for chunks, got 2.0"),
        ({"chunks": True}, PlanError, "for chunks, got True"),
        ({"checkpoint": "often"}, UsageError, "for checkpoint, got 'often'"),
        ({"loss_reduction": "avg"}, UsageError, "for loss_reduction, got 'avg'"),
        ({"isolate": True, "schedule": "uncut"}, UsageError, "isolate=True.*'sequential'"),
        ({"plan": "stage 1"}, PlanError, "a StagePlan for plan, got 'stage 1'"),
        ({"plan": {"1": 1}}, PlanError, r"a StagePlan for plan, got \{"),
        ({"batch_dims": "a"}, MicrobatchError, "batch_dims.*'a'"),
        ({"batch_dims": 1.5}, MicrobatchError, r"batch_dims.*1\.5"),
        ({"batch_dims": {0: "a"}}, MicrobatchError, "batch_dims.*'a'"),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_at_once(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    """A wrong option is an error when the pipeline is made, with what was expected and came."""
    net = marked_net()
    with unchanged(net):
        with pytest.raises(error, match=said):
            pipeline(net, **options)


@pytest.mark.parametrize("model", ["net", nn.Linear, lambda value: value, None])
def test_a_model_that_is_no_module_is_refused(model: Any) -> None:
    """Pipeline takes a module; anything else is a UsageError with its type."""
    with pytest.raises(
        UsageError, match=r"expected an nn\.Module for model of Pipeline, got \S+ \(.*\.py"
    ):
        bp.Pipeline(model, devices=CPUS)


def test_a_pipeline_of_a_pipeline_is_refused() -> None:
    """A pipeline as the model of a pipeline is a UsageError."""
    with pytest.raises(UsageError, match=r"Pipeline already; pass its \.module"):
        bp.Pipeline(pipeline())


# --- plans


def test_a_plan_with_unknown_paths_names_them() -> None:
    """A plan for modules that the model does not have is a PlanError that names them."""
    net = plain_net()
    with unchanged(net):
        with pytest.raises(PlanError, match=r"\['nope'\].*Sequential does not have"):
            pipeline(net, plan=bp.StagePlan([bp.Assignment("nope", 0, 0)]))(x())


def test_a_plan_with_a_call_that_does_not_happen_is_refused() -> None:
    """A plan for the eighth call of a module that is called once is a PlanError."""
    plan = bp.StagePlan([bp.Assignment("0", 0, 0), bp.Assignment("1", 7, 1)])
    with pytest.raises(PlanError, match=r"'1'.*call 7"):
        pipeline(plain_net(), plan=plan)(x())


def test_a_plan_with_gaps_is_refused() -> None:
    """A plan whose stages leave a gap is a PlanError when the pipeline is made."""
    plan = bp.StagePlan([bp.Assignment("0", 0, 0), bp.Assignment("1", 0, 2)])
    with pytest.raises(PlanError, match=r"\[1\] are missing"):
        pipeline(plain_net(), plan=plan)


def test_an_empty_plan_trains_as_no_plan() -> None:
    """An empty plan overrides no mark: the marked model trains as without a plan."""
    net, other = marked_net(), marked_net()
    train(pipeline(net, plan=bp.StagePlan()))
    train(pipeline(other))
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("wrong", [-1, True, 1.5, "a"])
def test_a_wrong_stage_in_a_plan_is_refused(wrong: Any) -> None:
    """A plan takes whole numbers from 0 on."""
    plan = bp.StagePlan([bp.Assignment("0", 0, 0)])
    with pytest.raises(
        PlanError, match=f"an integer from 0 to 1,048,575 for the stage of '0', got {wrong!r}"
    ):
        plan.assign("0", wrong)


def test_a_plan_pattern_that_matches_nothing_names_near_misses() -> None:
    """assign() with an unknown path is a PlanError with near misses."""
    plan = bp.StagePlan([bp.Assignment("layer1", 0, 0)])
    with pytest.raises(PlanError, match="got 'layr1' .*; did you mean 'layer1'"):
        plan.assign("layr1", 1)


@pytest.mark.parametrize("text", ["[]", "{}", "no json", '{"assignments": [{"path": "a"}]}'])
def test_a_plan_from_text_that_is_none_shows_the_format(text: str) -> None:
    """from_json of something else is a PlanError that shows the format."""
    with pytest.raises(PlanError, match=r'expected a plan {"version": 2'):
        bp.StagePlan.from_json(text)


# --- batches


@pytest.mark.parametrize("inputs", [(torch.ones(8, 5),), (), ("hello",)], ids=str)
@pytest.mark.parametrize("as_sample", [False, True])
def test_a_sample_that_does_not_fit_names_its_signature(
    inputs: tuple[Any, ...], as_sample: bool
) -> None:
    """A batch or sample that the forward does not take is a RecordingError with its signature."""
    net = marked_net()
    with unchanged(net):
        with pytest.raises(RecordingError, match=r"Sequential's forward fails on the sample \("):  # noqa: PT012
            if as_sample:
                pipeline(net, sample=(inputs, {}))
            else:
                pipeline(net)(*inputs)


@pytest.mark.parametrize("rows", [0, 6, 16])
def test_a_target_that_does_not_split_like_the_inputs_is_refused(rows: int) -> None:
    """A target of another batch size is a MicrobatchError with both sizes, before any forward."""
    net = marked_net()
    with unchanged(net):
        with pytest.raises(MicrobatchError, match=rf"8 samples.*\({rows}, 4\).*batch_dims"):
            pipeline(net).forward_backward(x(), target=torch.zeros(rows, 4), loss_fn=F.mse_loss)


def test_an_empty_batch_is_refused() -> None:
    """A batch of no samples is a MicrobatchError."""
    net = marked_net()
    with unchanged(net):
        with pytest.raises(MicrobatchError, match="at least one sample"):
            pipeline(net)(torch.ones(0, 4))


class Two(nn.Module):
    """Takes two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.linear(a) + b.sum()


@pytest.mark.parametrize(
    ("batch_dims", "shape"),
    [({0: 0, 1: 1}, (2, 6)), ({0: 0, "b": 1}, (2, 6)), (0, (6, 2)), ({1: 3}, (8, 2)), (5, (8, 2))],
    ids=str,
)
def test_batch_dims_that_do_not_fit_are_refused(batch_dims: Any, shape: tuple[int, ...]) -> None:
    """A dim named in batch_dims that is not there, or of another size, is a MicrobatchError."""
    pipe = pipeline(Two(), devices=["cpu"], batch_dims=batch_dims)
    with pytest.raises(MicrobatchError, match="batch_dims"):  # noqa: PT012
        if isinstance(batch_dims, dict) and "b" in batch_dims:
            pipe(x(), b=torch.ones(shape))
        else:
            pipe(x(), torch.ones(shape))


@pytest.mark.parametrize("batch_dims", [{"nope": 1}, {9: 0}], ids=str)
def test_batch_dims_of_an_argument_that_is_not_there_are_refused(batch_dims: Any) -> None:
    """batch_dims for an argument that the call does not have is a MicrobatchError naming it."""
    name = next(iter(batch_dims))
    with pytest.raises(MicrobatchError, match=f"{name!r}"):
        pipeline(batch_dims=batch_dims)(x())


@pytest.mark.parametrize("number", [-1, 0, float("nan"), float("inf"), "a"])
def test_a_loss_reduction_that_gives_no_weights_is_refused(number: Any) -> None:
    """A loss_reduction that gives no usable number is a MicrobatchError before any forward."""
    net = marked_net()
    pipe = pipeline(net, loss_reduction=lambda args, kwargs, target: number)
    with unchanged(net):
        with pytest.raises(
            MicrobatchError, match=r"expected .*weights.* for loss_reduction, got \["
        ):
            train(pipe)


def test_a_meta_model_without_values_is_refused() -> None:
    """A model on the meta device has no values to train: a PlanError that says to load it."""
    net = marked_net().to("meta")
    with unchanged(net):
        with pytest.raises(
            PlanError, match="meta device; pass weights=… .a checkpoint. or init=… to Pipeline"
        ):
            train(pipeline(net))


def test_a_lazy_model_is_refused_and_stays_lazy() -> None:
    """A model whose lazy modules have no shapes yet is refused, and stays lazy."""
    net = nn.Sequential(nn.LazyLinear(4))
    with unchanged(net):
        with pytest.raises(
            RecordingError, match=rf"lazy modules.*: 0\.weight, 0\.bias \(.*{HERE}\); run the"
        ):
            pipeline(net, devices=["cpu"])(x())


# --- losses


@pytest.mark.parametrize(
    ("loss_fn", "came"),
    [
        (lambda output, target: output - target, r"one of shape \(2, 4\)"),
        (lambda output, target: 3.0, "float"),
        (lambda output, target: None, "NoneType"),
    ],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loss_that_is_no_number_is_refused(loss_fn: Any, came: str, schedule: str) -> None:
    """A loss that is no tensor with one element is a UsageError with what came."""
    net = marked_net()
    pipe = pipeline(net, schedule=schedule, sample=((x(),), {}))
    with unchanged(net):
        with pytest.raises(UsageError, match=f"one element for the loss, got {came}"):
            pipe.forward_backward(x(), target=x(), loss_fn=loss_fn)


@pytest.mark.parametrize("loss_fn", [3, "mse"])
def test_a_loss_fn_that_is_no_function_is_refused(loss_fn: Any) -> None:
    """A loss_fn that cannot be called is a UsageError before any forward."""
    with pytest.raises(UsageError, match=rf"for loss_fn, got {loss_fn!r} .*{HERE}"):
        pipeline().forward_backward(x(), target=x(), loss_fn=loss_fn)


def test_a_step_without_a_loss_is_refused() -> None:
    """Without loss_fn and without a loss of the model's, a UsageError says what came."""
    with pytest.raises(UsageError, match=r"loss.*\(2, 4\).*pass a loss_fn"):
        pipeline().forward_backward(x())


def test_a_target_without_loss_fn_is_refused() -> None:
    """A target that nothing would read is a UsageError, not ignored."""

    class OwnLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, value: Tensor) -> Tensor:
            return self.linear(value).sum()

    with pytest.raises(UsageError, match=r"target.*loss_fn"):
        pipeline(OwnLoss(), devices=["cpu"]).forward_backward(x(), target=x())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_a_frozen_model_is_refused(schedule: str) -> None:
    """Training a model without a parameter that needs grad is a UsageError."""
    net = marked_net().requires_grad_(False)
    with unchanged(net):
        with pytest.raises(
            UsageError, match="one that does not require grad .*leave a parameter trainable"
        ):
            train(pipeline(net, schedule=schedule))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_without_grad_is_refused(mode: Any) -> None:
    """forward_backward under no_grad or inference_mode is a UsageError."""
    net = marked_net()
    with unchanged(net), mode():
        with pytest.raises(UsageError, match="no_grad"):
            train(pipeline(net))


def test_an_error_in_a_model_without_own_code_names_the_users_call() -> None:
    """Where no frame of the user's is in a run, an error names the user's call."""
    with pytest.raises(UsageError, match=HERE) as caught:
        pipeline().forward_backward(x(), target=x(), loss_fn=torch.sub)
    text = "".join([str(caught.value), *caught.value.__notes__])
    assert "<unknown>" not in text
    assert "threading.py" not in text


# --- routes and state


class Ways(nn.Module):
    """After stage 0 a micro-batch goes one way or the other, by its first value."""

    def __init__(self, usual: list[int], other: list[int]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.usual, self.other = usual, other

    def forward(self, value: Tensor) -> Tensor:
        way = self.usual if bool(value[0, 0] < 0.5) else self.other
        with bp.Block(0):
            value = self.first(value)
        for stage in way:
            with bp.Block(stage):
                value = self.layers[stage](value)
        return value


def two_ways() -> Tensor:
    """Micro-batches 0 to 2 go the usual way, 3 the other."""
    inputs = torch.zeros(8, 4)
    inputs[6:] = 1
    return inputs


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("other", [[2, 1], [1, 2, 0], [1, 2, 5], [1, 2, 1]], ids=str)
def test_a_route_that_was_not_recorded_is_refused(schedule: str, other: list[int]) -> None:
    """A micro-batch off the recorded route is a RouteError with both routes and the line."""
    pipe = pipeline(Ways([1, 2], other), schedule=schedule)
    with pytest.raises(RouteError, match=rf"micro-batch 3 .*route is \[0, 1, 2\].*{HERE}"):
        train(pipe, two_ways())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("other", [[2], [1], []], ids=str)
def test_skipped_hops_are_fine(schedule: str, other: list[int]) -> None:
    """A micro-batch may skip hops: gradients are the plain loop's."""
    torch.manual_seed(0)
    net, plain = Ways([1, 2], other), Ways([1, 2], other)
    plain.load_state_dict(net.state_dict())
    train(pipeline(net, schedule=schedule), two_ways())
    for part in two_ways().chunk(4):
        (F.mse_loss(plain(part), torch.zeros(2, 4)) / 4).backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or q.grad is None or torch.equal(p.grad, q.grad)


class Detour(nn.Module):
    """Stays on its stage, or goes to stage 2 and back, by its first value."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        if bool(value[0, 0] > 0.5):
            with bp.Block(2):
                value = self.other(value)
        return self.usual(value)


class WithDetour(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.detour, self.last = Detour(), nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        with bp.Block(0):
            value = value + 0
        with bp.Block(1):
            value = self.detour(value)
        with bp.Block(2):
            return self.last(value)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_detour_inside_a_module_that_was_on_one_stage_is_refused(schedule: str) -> None:
    """A mark that moves a micro-batch inside a sealed module is a RouteError, not ignored."""
    with pytest.raises(RouteError, match=f"micro-batch 3 .*stage 2.*{HERE}"):
        train(pipeline(WithDetour(), schedule=schedule), two_ways())


GLOBAL: dict[str, Tensor] = {}


class Keeps(nn.Module):
    """Leaves a tensor on self or in a global, which the next micro-batch reads."""

    def __init__(self, where: str, reader: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.where, self.reader = where, reader
        self.kept: Tensor | None = None

    def read(self, stage: int, value: Tensor) -> Tensor:
        kept = self.kept if self.where == "self" else GLOBAL.get("kept")
        if stage == self.reader and kept is not None:
            value = value + kept
        return value

    def forward(self, value: Tensor) -> Tensor:
        for stage, layer in enumerate(self.layers):
            with bp.Block(stage):
                value = self.read(stage, layer(value))
                if stage == 1:
                    kept = value.mean() if self.reader == 1 else value.detach().mean()
                    if self.where == "self":
                        self.kept = kept
                    else:
                        GLOBAL["kept"] = kept
        return value


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("how", ["forward_backward", "call"])
@pytest.mark.parametrize("where", ["self", "global"])
@pytest.mark.parametrize("reader", [0, 1])
def test_a_tensor_of_another_microbatch_is_refused(
    schedule: str, how: str, where: str, reader: int
) -> None:
    """State with a gradient, or of another stage, is a StateError with both micro-batches.

    Under GPipe a first stage may read before a later one has written: by the next step at latest.
    """
    GLOBAL.clear()
    pipe = pipeline(Keeps(where, reader), schedule=schedule, sample=((x(),), {}))
    GLOBAL.clear()
    why = "gradient path" if reader == 1 else "made on stage 1"
    match = rf"micro-batch (\d) on stage {reader} .*micro-batch (\d).*{why}.*{HERE}.*current_microb"
    with pytest.raises(StateError, match=match):  # noqa: PT012
        for _ in range(2):
            train(pipe) if how == "forward_backward" else pipe(x())


def test_a_tensor_of_an_earlier_step_is_refused() -> None:
    """A tensor with a gradient path that an earlier step left is a StateError that says so."""
    GLOBAL.clear()
    net = Keeps("global", 1)
    pipe = pipeline(net, chunks=1, devices=["cpu"] * 3, sample=((x(),), {}))
    GLOBAL.clear()
    train(pipe)
    with pytest.raises(StateError, match=f"micro-batch 0 of an earlier step.*{HERE}"):
        train(pipe)


def test_a_global_that_the_recording_left_is_put_back() -> None:
    """What the recording left in a global is put back: the error is of the step."""
    GLOBAL.clear()
    pipe = pipeline(Keeps("global", 1))
    with pytest.raises(StateError, match="belongs to micro-batch 0 of this step"):
        train(pipe)


class KeepsInside(nn.Module):
    """A module without marks that leaves a tensor with a gradient path on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))
        self.kept: Tensor | None = None

    def forward(self, value: Tensor) -> Tensor:
        value = value + self.bias
        if self.kept is not None:
            value = value + self.kept
        self.kept = value
        return value


class SealedKeeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), KeepsInside(), nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        with bp.Block(0):
            value = self.first(value)
        with bp.Block(1):
            value = self.middle(value)
        with bp.Block(2):
            return self.last(value)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("how", ["forward_backward", "call"])
def test_a_tensor_of_another_microbatch_inside_a_sealed_module_is_refused(
    schedule: str, how: str
) -> None:
    """State with a gradient that a module keeps inside is a StateError too, never a silent mix."""
    pipe = pipeline(SealedKeeps(), schedule=schedule)
    with pytest.raises(StateError, match="micro-batch"):  # noqa: PT012
        if how == "forward_backward":
            train(pipe)
        else:
            F.mse_loss(pipe(x()), x()).backward()


def test_a_tensor_from_outside_with_a_gradient_path_is_refused() -> None:
    """A tensor computed outside of the forward, with a gradient path, is a CrossingError."""
    weight = torch.ones(4, requires_grad=True) * 2

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, value: Tensor) -> Tensor:
            with bp.Block(0):
                value = self.linear(value)
            with bp.Block(1):
                return value * weight

    with pytest.raises(CrossingError, match=f"gradient path.*{HERE}"):
        train(pipeline(Outside()))


# --- what a pipeline is not


@pytest.mark.parametrize(
    "move",
    [
        lambda pipe: pipe.to("cuda"),
        lambda pipe: pipe.to("meta"),
        lambda pipe: pipe.cuda(),
        lambda pipe: pipe.cuda(1),
        lambda pipe: pipe.to_empty(device="meta"),
        lambda pipe: nn.ModuleDict({"pipe": pipe}).to("meta"),
    ],
    ids=["to_cuda", "to_meta", "cuda", "cuda1", "to_empty", "parent"],
)
def test_moving_a_pipeline_is_refused(move: Callable[[bp.Pipeline], Any]) -> None:
    """To another device than its stages', nor by a module around it: a UsageError with the line."""
    net = marked_net()
    pipe = pipeline(net, sample=((x(),), {}))
    with unchanged(net):
        with pytest.raises(UsageError, match=rf"expected no device .*{HERE}.*devices="):
            move(pipe)


def test_changing_the_dtype_is_no_move() -> None:
    """to(dtype) is no move."""
    pipe = pipeline(sample=((x(),), {})).to(torch.float64)
    assert pipe(x().double()).dtype == torch.float64


def test_a_pipeline_in_a_pipelines_forward_is_refused() -> None:
    """A pipeline called in a pipeline's forward is a UsageError with the line, at the recording."""
    outer = nn.Sequential(pipeline(sample=((x(),), {})), nn.Linear(4, 4))
    with unchanged(outer):
        with pytest.raises(UsageError, match=f"inside a forward that Blockpipe runs.*{HERE}"):
            pipeline(outer, devices=["cpu"])(x())


def test_distributed_data_parallel_around_a_pipeline_is_refused() -> None:
    """DistributedDataParallel around a pipeline is a UsageError with the remedy."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match=r"DistributedDataParallel.*all-reduce"):
            nn.parallel.DistributedDataParallel(pipeline())
        for wrapped in (
            nn.parallel.DistributedDataParallel(nn.Linear(4, 4)),
            nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(4, 4))),
        ):
            with pytest.raises(UsageError, match=rf"DistributedDataParallel.*{HERE}.*all-reduce"):
                bp.Pipeline(wrapped, devices=["cpu"] * 2, chunks=2)
        sharded = fully_shard(nn.Linear(4, 4), mesh=dist.init_device_mesh("cpu", (1,)))
        with pytest.raises(UsageError, match=rf"is a DTensor.*{HERE}.*all-reduce"):
            bp.Pipeline(sharded, devices=["cpu"] * 2, chunks=2)
    finally:
        dist.destroy_process_group()


def test_data_parallel_around_a_pipeline_is_refused() -> None:
    with pytest.raises(UsageError, match=rf"the model is a DataParallel.*{HERE}"):
        bp.Pipeline(nn.DataParallel(nn.Linear(4, 4)), devices=["cpu"] * 2, chunks=2)
    with pytest.raises(UsageError, match="DataParallel around a pipeline would copy it"):
        pipeline()._replicate_for_data_parallel()  # as torch.nn.parallel.replicate does


def test_torchs_checkpoint_around_a_pipeline_is_refused() -> None:
    """Before and after the first call; the error names the pipeline's own option."""
    pipe, inputs = pipeline(), x().requires_grad_()
    for _ in range(2):
        with pytest.raises(UsageError, match=rf"{HERE}\); leave it out, and pass checkpoint='alw"):
            checkpoint(pipe, inputs, use_reentrant=False).sum().backward()
        pipe(inputs)
    with torch.no_grad():
        assert checkpoint(pipe, inputs, use_reentrant=False).shape == (8, 4)


def test_asking_a_pipeline_for_its_attributes_raises_nothing() -> None:
    """What looks through an object's attributes (debuggers, mocks) gets no error of DDP's."""
    pipe = pipeline()
    for name in dir(pipe):
        getattr(pipe, name, None)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.func itself
@pytest.mark.parametrize(
    "transform",
    [
        lambda pipe: torch.func.grad(lambda value: pipe(value).sum())(x()),
        lambda pipe: torch.func.vmap(pipe)(x()),
        lambda pipe: torch.func.jvp(pipe, (x(),), (x(),)),
        lambda pipe: torch.func.vjp(pipe, x()),
    ],
    ids=["grad", "vmap", "jvp", "vjp"],
)
def test_torch_func_over_a_pipeline_is_refused(transform: Callable[[bp.Pipeline], Any]) -> None:
    """torch.func over a pipeline is a UsageError with the line."""
    net = marked_net()
    with unchanged(net):
        with pytest.raises(UsageError, match=rf"torch\.func.*{HERE}"):
            transform(pipeline(net))


def test_functional_call_with_computed_parameters_is_refused() -> None:
    """functional_call over a pipeline with parameters that have a graph is a UsageError."""
    pipe = pipeline(sample=((x(),), {}))
    weights = {name: p * 2 for name, p in pipe.named_parameters()}
    with pytest.raises(UsageError, match=r"parameters .*'0\.weight'.*functional_call"):
        torch.func.functional_call(pipe, weights, (x(),)).sum().backward()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch itself
def test_forward_mode_through_a_pipeline_is_refused() -> None:
    """Forward-mode AD through a pipeline is a UsageError, not a tangent that is lost."""
    pipe = pipeline(sample=((x(),), {}))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x(), torch.ones(8, 4))
        with pytest.raises(UsageError, match=rf"forward-mode AD.*{HERE}"):
            pipe(dual)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of dynamo itself
def test_torch_compile_over_a_pipeline_is_refused() -> None:
    """torch.compile over a pipeline is a UsageError that says to compile module by module."""
    with pytest.raises(UsageError, match=rf"pipe\.compile\(\) compiles the modules.*{HERE}"):
        torch.compile(pipeline(sample=((x(),), {})), backend="eager")(x())


@pytest.mark.parametrize("retain", [False, True])
def test_a_second_backward_is_refused_and_adds_nothing(retain: bool) -> None:
    """A second backward of pipe(x) is a UsageError naming the uncut mode, and adds no gradient."""
    net = marked_net()
    loss = pipeline(net)(x()).sum()
    loss.backward(retain_graph=retain)
    before = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    with pytest.raises(UsageError, match=r"already.*'uncut'"):
        loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), before, strict=True))


def test_create_graph_through_a_pipeline_is_refused() -> None:
    """create_graph=True through pipe(x) is a UsageError naming the uncut mode."""
    net = marked_net()
    with unchanged(net):
        loss = pipeline(net)(x()).sum()
        with pytest.raises(UsageError, match=r"create_graph=True.*'uncut'"):
            loss.backward(create_graph=True)


def test_autograd_grad_of_an_input_is_refused() -> None:
    """autograd.grad through pipe(x) is refused: it would fill every parameter's .grad silently."""
    net = marked_net()
    inputs = x().requires_grad_()
    with unchanged(net):
        loss = pipeline(net)(inputs).sum()
        with pytest.raises(UsageError, match=r"autograd\.grad.*'uncut'"):
            torch.autograd.grad(loss, inputs)


def test_run_before_placement_is_refused() -> None:
    """run() before anything is placed is a UsageError that says what to do first."""
    net = marked_net()
    pipe = pipeline(net)
    with unchanged(net):
        with pytest.raises(UsageError, match=r"run\(\) needs a model that is placed.*pass sample"):
            pipe.run(net.forward, x())


def test_run_of_what_cannot_be_called_is_refused() -> None:
    """run() of something that cannot be called is a UsageError."""
    with pytest.raises(UsageError, match=r"expected a callable for run\(\), got 3 \("):
        pipeline(sample=((x(),), {})).run(3)  # type: ignore[arg-type]


def test_summary_before_the_first_call_asks_for_a_sample() -> None:
    """summary() without a sample before the first call is a UsageError."""
    with pytest.raises(UsageError, match=r"summary\(x\)"):
        pipeline().summary()


def test_devices_before_they_are_known_are_refused() -> None:
    """Without devices= they are not known before the recording: a UsageError."""
    with pytest.raises(UsageError, match="not known before the recording"):
        _ = pipeline(devices=None).devices


def test_a_pipeline_goes_on_after_wrong_use() -> None:
    """After refused calls a pipeline works as if they had not been."""
    net, other = marked_net(), marked_net()
    pipe = pipeline(net)
    for wrong in (torch.ones(8, 5), torch.ones(0, 4)):
        with pytest.raises((RecordingError, MicrobatchError), match="sample"):
            train(pipe, wrong)
    with pytest.raises(MicrobatchError, match="target"):
        pipe.forward_backward(x(), target=torch.ones(3, 4), loss_fn=F.mse_loss)
    train(pipe)
    train(pipeline(other))
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)
