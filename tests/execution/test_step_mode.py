"""Steps of models with a plan take the plain loop where those of marked models do."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import blockpipe as bp
from blockpipe.crossing.interception import active_mode

from ..models import square
from ..parity import difference, plain_step
from ..stage_devices import is_simulated, stages

X = torch.linspace(-1, 1, 32).reshape(8, 4)
SEEN = list[tuple[bool, int | None]]


class Layer(nn.Linear):
    """Notes in each call whether operations are intercepted, and the stage."""

    def __init__(self, seen: SEEN) -> None:
        super().__init__(4, 4)
        self.seen = seen

    def forward(self, input: Tensor) -> Tensor:
        self.seen.append((active_mode() is not None, bp.current_stage()))
        return super().forward(input).tanh()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Layer":
        other = Layer([])
        other.load_state_dict(self.state_dict())
        return other


class Net(nn.Module):
    """Calls its middle layer twice, and may recompute it."""

    def __init__(self, *, recomputes: bool = False, norm: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seen: SEEN = []
        self.a, self.b, self.c = (Layer(self.seen) for _ in range(3))
        self.norm = norm or nn.Identity()
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.b(self.a(x)))
        x = checkpoint(self.b, x, use_reentrant=False) if self.recomputes else self.b(x)
        return self.c(x)


def entries(*numbers: int) -> bp.StagePlan:
    """A plan with the stage of every call, in execution order."""
    plan = bp.record(Net(), X[:2]).plan
    wanted = iter(numbers)
    for entry in plan.assignments:
        if entry.path != "norm":
            entry.stage = next(wanted)
    return plan


def check_steps(net: Net, pipe: bp.Pipeline, steps: int = 3) -> list[SEEN]:
    """Compare some steps with the plain loop's; returns what each has seen."""
    plain, found = copy.deepcopy(net), []
    for _ in range(steps):
        net.seen.clear()
        loss = pipe.forward_backward(X, loss_fn=square).loss
        found.append([*net.seen])
        expected = plain_step(plain, (X,), {}, None, square, 2)
        assert difference(net, plain, loss, expected).same
    return found


def pipeline(net: Net, **options: Any) -> bp.Pipeline:
    """On one device, and one lane."""
    device = stages(1)[0] if is_simulated() else "cpu:0"
    return bp.Pipeline(net, devices=[device] * 2, chunks=2, **options)


@pytest.mark.parametrize(
    ("plan", "numbers"),
    [
        (lambda: bp.StagePlan.from_layout("b=1"), [0, 1, 1, 1]),
        (lambda: bp.StagePlan.from_layout("c=1"), [0, 0, 0, 1]),
        (lambda: entries(0, 1, 0, 1), [0, 1, 0, 1]),
    ],
    ids=["layout", "last", "calls"],
)
@pytest.mark.parametrize("set_on_model", [False, True], ids=["passed", "set"])
def test_a_step_by_a_plan_on_one_device_is_the_plain_loop(plan, numbers, set_on_model) -> None:
    """From the second step on, with each call on the plan's stage; marks do not count."""
    net = Net()
    bp.begin_blocks(net, {"a": 0, "norm": 1})
    if set_on_model:
        bp.set_pipeline_stage_assignment(net, plan())
        pipe = pipeline(net)
    else:
        pipe = pipeline(net, plan=plan())
    first, *others = check_steps(net, pipe)
    assert first == [(True, number) for number in numbers * 2]
    for seen in others:
        assert seen == [(False, number) for number in numbers * 2]
    assert "forward" not in net.b.__dict__


def test_a_step_by_a_plan_of_one_stage_is_the_plain_loop_over_marks() -> None:
    """Which would lead to another stage."""
    net = Net()
    bp.begin_blocks(net, {"b": 1})
    pipe = pipeline(net, plan=entries(0, 0, 0, 0))
    for seen in check_steps(net, pipe):
        assert seen == [(False, 0)] * 8


def test_a_step_by_a_plan_is_the_plain_loop_with_deferred_batch_norm() -> None:
    """Its stand-ins and the plan's are on one module."""
    net = Net(norm=nn.BatchNorm1d(4))
    pipe = pipeline(net, plan=bp.StagePlan.from_layout("norm=1"), deferred_batch_norm=True)
    twin = Net(norm=nn.BatchNorm1d(4))
    other = pipeline(bp.begin_blocks(twin, {"norm": 1}), deferred_batch_norm=True)
    for _ in range(3):
        net.seen.clear()
        loss = pipe.forward_backward(X, loss_fn=square).loss
        expected = other.forward_backward(X, loss_fn=square).loss
        assert difference(net, twin, loss, expected).same
    assert net.seen == [(False, number) for number in [0, 0, 1, 1] * 2]
    assert set(net.norm.__dict__) == set(nn.BatchNorm1d(4).__dict__)


def test_a_step_by_a_plan_is_cut_where_a_checkpoint_calls_modules_again() -> None:
    """The plan goes by the number of a call, which the second run has none of: it would be on
    another stage."""
    net = Net(recomputes=True)
    pipe = pipeline(net, plan=entries(0, 1, 0, 1))
    for seen in check_steps(net, pipe):
        assert all(is_cut for is_cut, _ in seen)
        assert [stage for _, stage in seen] == [0, 1, 0, 1, 0] * 2


def test_a_failure_in_the_plain_loop_names_the_plans_stage() -> None:
    """As the cut engine does."""
    net = Net()
    pipe = pipeline(net, plan=bp.StagePlan.from_layout("c=1"))
    check_steps(net, pipe, 2)

    def fail(*_: Any) -> None:
        if not active_mode():
            raise ValueError("not now")

    net.c.register_forward_hook(fail)
    pipe.forward_backward(X, loss_fn=square)  # records the model anew, with its hook: it is cut
    with pytest.raises(ValueError, match="not now") as caught:
        pipe.forward_backward(X, loss_fn=square)
    assert "in the forward of micro-batch 0 on stage 1" in caught.value.__notes__[0]
    assert "forward" not in net.c.__dict__


def test_a_profile_of_the_plain_loop_has_the_plans_hops() -> None:
    """They begin at the calls that the plan names."""
    net = Net()
    pipe = pipeline(net, plan=bp.StagePlan.from_layout("b=1"))
    check_steps(net, pipe, 1)
    with pipe.profile() as timeline:
        pipe.forward_backward(X, loss_fn=square)
    forwards = [(e.hop, e.stage, e.microbatch) for e in timeline.actions() if e.kind == "F"]
    assert sorted(forwards) == [(hop, hop, m) for hop in range(2) for m in range(2)]
