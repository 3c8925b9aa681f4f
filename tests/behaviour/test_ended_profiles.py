"""Profiles that a failure ends, and profiles beside each other."""

import contextlib
import copy

import pytest
import torch

import blockpipe as bp
from blockpipe.errors import UsageError

from ..reports.timeline.profiled import CHUNKS, STAGES, Net, check, made, step
from ..stage_devices import is_simulated, stages


@pytest.mark.parametrize("schedule", ["1f1b", "sequential"])
def test_a_failed_step_ends_the_profile(schedule):
    """The error is the model's own; what was collected stays; the next profile works."""
    pipe = made(schedule)
    profile = pipe.profile()
    t = profile.__enter__()
    step(pipe)
    pipe.module.fails_at = 1, 2
    with pytest.raises(ValueError, match="boom") as error:
        step(pipe)
    assert not profile.__exit__(error.type, error.value, error.tb)
    assert [info.failed for info in t.steps] == [False, True]
    assert len([e for e in t.actions() if e.step == 0]) == 2 * STAGES * CHUNKS
    assert ("F", 1, 2) not in {(e.kind, e.hop, e.microbatch) for e in t.actions(1)}
    assert ("F", 0, 0) in {(e.kind, e.hop, e.microbatch) for e in t.actions(1)}
    assert "a step has failed" in str(t)
    pipe.module.fails_at = None
    with pipe.profile() as t:
        step(pipe)
    check(t)


def test_a_failure_that_is_caught_inside():
    """The profile goes on with the next step."""
    pipe = made()
    with pipe.profile() as t:
        pipe.module.fails_at = 1, 2
        with contextlib.suppress(ValueError):
            step(pipe)
        pipe.module.fails_at = None
        step(pipe)
    assert [info.failed for info in t.steps] == [True, False]
    assert t.step_time == t.span(1)


def test_an_interrupt_ends_the_profile():
    """What is no ``Exception`` too."""
    pipe = made()
    seen = []

    def interrupted():
        with pipe.profile() as t:
            seen.append(t)
            step(pipe)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    check(seen[0])
    assert pipe._profile is None


def test_a_profile_in_a_profile_is_refused():
    """With the user's line and the remedy; the outer one goes on."""
    pipe = made()
    with pipe.profile() as t:
        with pytest.raises(
            UsageError, match=r"profiled already.*test_ended_profiles.*leave the outer"
        ):
            with pipe.profile():
                pass
        step(pipe)
    check(t)


def test_two_pipelines_have_two_profiles():
    """Each sees its own steps."""
    one, other = made(), made("gpipe")
    with one.profile() as a, other.profile() as b:
        step(one)
        step(other)
        step(other)
    check(a)
    check(b, steps=2)


def test_a_copy_of_a_profiled_pipeline_is_not_profiled():
    """Of a pipeline that is."""
    pipe = made()
    with pipe.profile() as t:
        other = copy.deepcopy(pipe)
        step(other)
        step(pipe)
    check(t)


def test_several_recordings_in_one_profile():
    """A stage has the same lane in all, also where routes visit stages in other orders."""

    class Turns(Net):
        def forward(self, x):
            for stage in (0, 1, 2) if self.training else (0, 2, 1):
                with bp.Block(stage):
                    x = torch.tanh(self.layers[stage](x))
            return x

    pipe = bp.Pipeline(Turns(), devices=stages(STAGES), chunks=CHUNKS)
    with pipe.profile() as t:
        step(pipe)
        pipe.eval()
        with torch.no_grad():
            pipe(torch.ones(8, 4))
    names = [d if is_simulated() else f"{d}, stage {n}" for n, d in enumerate(stages(STAGES))]
    assert [lane.name for lane in t.lanes] == names
    assert {(e.lane, e.stage) for e in t.actions()} == {(n, n) for n in range(STAGES)}
    assert {(e.hop, e.lane) for e in t.actions(1)} == {(0, 0), (1, 2), (2, 1)}


def test_a_schedule_of_ones_own():
    """Its lanes and its name are the timeline's."""
    mine = bp.Schedule.from_csv(
        "0F0,1F0,1B0,0B0,0F1,1F1,1B1,0B1,0F2,1F2,1B2,0B2,0F3,1F3,1B3,0B3\n"
        "2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3\n",
        name="mine",
    )
    pipe = made(mine)
    with pipe.profile() as t:
        step(pipe)
    check(t, lane_of=[0, 0, 1])
    assert str(t).startswith("mine\n")
    assert [lane.name for lane in t.lanes] == ["cpu, stage 0, 1", "cpu, stage 2"]
