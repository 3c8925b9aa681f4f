"""A plan as marks: Python that runs, and gives the same stages."""

import copy
from collections import OrderedDict

import pytest
import torch
import torchvision
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.partitioning.plan_as_code import expression

from ..parameter_sets import each_value
from .balanced_models import Skips


def _marked(net: nn.Module, text: str) -> nn.Module:
    copied = copy.deepcopy(net)
    exec(text, {"model": copied, "bp": bp})
    return copied


@each_value(
    by=["flops", "parameters"],
    stages=[2, 4],
)
def test_marks_give_the_stages_of_the_plan(by: str, stages: int) -> None:
    """Every call of the model is where the plan has it."""
    net, x = torchvision.models.resnet18(), torch.zeros(2, 3, 64, 64)
    plan = bp.balance(net, x, stages, by)
    assert not plan.marks().startswith("#")
    marked, planned = bp.record(_marked(net, plan.marks()), x), bp.record(net, x, plan=plan)
    assert marked.route == planned.route == list(range(stages))
    assert marked.plan == planned.plan


class Odd(nn.Module):
    """Modules in lists and dictionaries, and under names that are no identifiers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"first-one": nn.Linear(4, 4), "class": nn.Linear(4, 4)})
        self.rows = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4)]), nn.Linear(4, 4)])
        self.add_module("not a name", nn.Linear(4, 4))
        self.add_module("lambda", nn.Sequential(nn.Linear(4, 4)))

    def forward(self, x: Tensor) -> Tensor:
        for module in (*self.parts.values(), self.rows[0][0], self.rows[1]):
            x = module(x)
        return self.get_submodule("lambda")(self.get_submodule("not a name")(x))


def test_every_module_can_be_written() -> None:
    net, x = Odd(), torch.zeros(2, 4)
    plan = bp.balance(net, x, 6, "flops")
    assert plan.marks().splitlines() == [
        "model.parts['class'] = bp.BeginBlock(model.parts['class'], stage=1)",
        "model.rows[0][0] = bp.BeginBlock(model.rows[0][0], stage=2)",
        "model.rows[1] = bp.BeginBlock(model.rows[1], stage=3)",
        "bp.BeginBlock(model.get_submodule('not a name'), stage=4)",
        "bp.BeginBlock(model.get_submodule('lambda'), stage=5)",
    ]
    assert bp.record(_marked(net, plan.marks()), x).plan == bp.record(net, x, plan=plan).plan


def test_expressions_lead_to_their_modules() -> None:
    """Of every module of a model."""
    net = torchvision.models.googlenet(aux_logits=False, init_weights=False)
    for path, module in net.named_modules():
        if path:
            assert eval(expression(net, path), {"model": net}) is module


def test_a_later_call_cannot_be_marked_and_says_so() -> None:
    """The plan says what marks cannot: then the plan is to be passed."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.a(x))

    net, x = Net(), torch.zeros(2, 4)
    plan = bp.balance(net, x, 2, "flops")
    assert plan.shares[1].begins == "a"
    assert plan.shares[1].call == 1
    assert "# stage 1 begins with call 1 of a" in plan.marks()
    assert "bp.Pipeline(model, plan=plan)" in plan.marks()
    assert all(line.startswith("#") for line in plan.marks().splitlines())
    assert "a (call 1)" in str(plan)
    assert bp.record(net, x, plan=plan).route == [0, 1]


def test_marks_that_are_there_are_taken_off() -> None:
    net, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.zeros(2, 4)
    net[1] = bp.BeginBlock(net[1], stage=1)
    plan = bp.balance(net, x, 2, "flops")
    assert plan.marks().splitlines() == [
        "bp.remove_blocks(model)",
        "model[2] = bp.BeginBlock(model[2], stage=1)",
    ]
    assert bp.record(_marked(net, plan.marks()), x).plan == bp.record(net, x, plan=plan).plan


@pytest.mark.parametrize("inner", ["", "1"])
def test_stages_that_are_set_are_taken_off(inner: str) -> None:
    """On the model, or on one inside of it: they would override the marks."""
    net, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), torch.zeros(2, 4)
    net[1] = bp.BeginBlock(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), stage=0)
    bp.set_pipeline_stage_assignment(net.get_submodule(inner), {"1": 1})
    plan = bp.balance(net, x, 2, "flops")
    assert plan.marks().splitlines() == [
        f"bp.reset_pipeline_stage_assignment(model{'[1]' if inner else ''})",
        "bp.remove_blocks(model)",
        "model[1][1] = bp.BeginBlock(model[1][1], stage=1)",
    ]
    assert bp.record(_marked(net, plan.marks()), x).plan == bp.record(net, x, plan=plan).plan


def test_marks_in_the_forward_are_named() -> None:
    class Net(Skips):
        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=1):
                return super().forward(x)

    marks = bp.balance(Net(), torch.zeros(4, 8), 2, "flops").marks()
    assert marks.startswith("# remove the mark at ")
    assert "test_plan_as_code.py:" in marks


NAMES = ["a\nraise SystemExit", "a'] + [b", 'a"b', "a\\", "\ud800", "ﬁ", "٣", "a;b", "#"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_no_code(name: str) -> None:
    """Whatever a module is called, the lines name it, and nothing else."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("first", nn.Linear(4, 4))
            self.add_module(name, nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self._modules[name](self.first(x))

    net, x = Named(), torch.zeros(2, 4)
    plan = bp.balance(net, x, 2, "flops")
    assert plan.marks().isprintable()
    assert bp.record(_marked(net, plan.marks()), x).plan == bp.record(net, x, plan=plan).plan


def test_a_name_in_a_comment_ends_no_line() -> None:
    """Of a call that no mark can be put on."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("a\nraise SystemExit", nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            layer = self._modules["a\nraise SystemExit"]
            return layer(layer(x))

    text = bp.balance(Twice(), torch.zeros(2, 4), 2, "flops").marks()
    assert text.startswith("# stage 1 begins with call 1 of a\\nraise SystemExit, whose")
    assert all(line.startswith("#") for line in text.splitlines())


def test_positions_in_a_sequential_that_is_named_otherwise() -> None:
    """Its first module may be called ``"1"``; in brackets it is 0."""
    net = nn.Sequential(OrderedDict([("1", nn.Linear(4, 4)), ("0", nn.ReLU())]))
    for path in ("1", "0"):
        assert eval(expression(net, path), {"model": net}) is net.get_submodule(path)
