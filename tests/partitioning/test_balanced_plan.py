"""What a balanced plan says, and how it is kept."""

import copy
import math

import pytest
import torch

import blockpipe as bp
from blockpipe.errors import PlanError, ScheduleError

from .balanced_models import Skips, chain


def test_a_plan_is_saved_and_read() -> None:
    net, x = Skips(), torch.zeros(4, 8)
    plan = bp.balance(net, x, 3, "flops")
    read = bp.StagePlan.from_json(plan.to_json())
    assert read.assignments == plan.assignments
    assert len(plan.assignments) == sum(call.is_module for call in bp.record(net, x).calls)
    assert isinstance(bp.BalancedPlan.from_json(plan.to_json()), bp.BalancedPlan)
    assert str(bp.BalancedPlan.from_json(plan.to_json())) == str(read)


def test_copies_of_a_plan_say_the_same() -> None:
    plan = bp.balance(Skips(), torch.zeros(4, 8), 2, "flops")
    assert str(copy.deepcopy(plan)) == str(plan)


@pytest.mark.parametrize(
    ("schedule", "bubble"), [("1f1b", 1 / 9), ("gpipe", 1 / 9), ("sequential", 1 / 2)]
)
def test_the_predicted_step_is_the_schedule_played_out(schedule: str, bubble: float) -> None:
    """Of two equal stages and 8 micro-batches."""
    net, x = chain(64, 64, 64), torch.zeros(32, 64).requires_grad_()
    plan = bp.balance(net, x, 2, measure=False, schedule=schedule)
    assert plan.bubble == pytest.approx(bubble)
    one = sum(s.forward + s.backward for s in plan.shares) / 2
    assert plan.step_seconds == pytest.approx(8 * one / (1 - bubble))
    assert f"{100 * bubble:.1f} % bubble" in str(plan)


def test_a_schedule_of_ones_own_is_played_out() -> None:
    from blockpipe.schedules.builders import make_schedule

    def mine(lane_of_hop: object, microbatches: int) -> bp.Schedule:
        return make_schedule("gpipe", lane_of_hop, microbatches)

    net, x = chain(64, 64, 64), torch.zeros(32, 64)
    plan = bp.balance(net, x, 2, measure=False, schedule=mine)
    assert plan.step_seconds == bp.balance(net, x, 2, measure=False, schedule="gpipe").step_seconds
    auto = bp.balance(net, x, 2, measure=False, schedule="auto")
    assert auto.step_seconds <= plan.step_seconds
    with pytest.raises(
        ScheduleError, match=r"for 2 hops and 8 micro-batches, got 'gpipe' for 3 hops and 8"
    ):
        bp.balance(net, x, 2, measure=False, schedule=make_schedule("gpipe", [0, 1, 2], 8))
    with pytest.raises(ScheduleError, match="a Schedule or a callable for schedule, got 3"):
        bp.balance(net, x, 2, measure=False, schedule=3)


def test_a_limit_for_one_stage_alone() -> None:
    net, x = chain(8, 8, 8, 8), torch.zeros(4, 8)
    with pytest.raises(PlanError, match=r"limits=\['1 B', None\]: in the best one, stage 0 "):
        bp.balance(net, x, 2, "flops", limits=[1, math.inf])


def test_without_training_there_is_a_forward_alone() -> None:
    net, x = chain(64, 64, 64), torch.zeros(32, 64)
    plan = bp.balance(net, x, 2, training=False)
    assert all(share.backward == 0.0 < share.forward for share in plan.shares)
    trained = bp.balance(net, x, 2, measure=False, optimizer="adam")
    assert all(p.memory < t.memory / 2 for p, t in zip(plan.shares, trained.shares, strict=True))


def test_what_limits_it_is_said() -> None:
    plan = bp.balance(chain(64, 64, 8, 8), torch.zeros(4, 64), 2, "flops")
    assert "the costliest stage: 0, 3.28e+04" in str(plan) or "stage: 0" in plan.bottleneck
    assert "it cannot be split" in plan.bottleneck
    more = bp.balance(chain(8, 8, 8, 8), torch.zeros(4, 8), 2, "flops")
    assert "would cost" in more.bottleneck
