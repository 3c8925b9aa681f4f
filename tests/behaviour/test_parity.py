"""Pipelined equals plain: random programs, schedules, chunks; to the bit."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

import blockpipe as bp
from blockpipe.errors import CrossingError, PlanError, StateError
from blockpipe.schedules.builders import SCHEDULES

from ..models import EVERY_SCHEDULE, square
from ..parity import difference, plain_step
from ..stage_devices import assert_close, equal, examples, stages
from ..strategies import Program, programs


def loss_of(outputs, target):
    return sum(((o - target) ** 2).mean() * (i + 1) for i, o in enumerate(outputs))


def plain_or_none(program, args, target, chunks):
    """The plain step, or None where torch itself refuses (an in-place write to a saved tensor)."""
    try:
        return plain_step(program, args, {}, target, loss_of, chunks)
    except RuntimeError as error:
        if any(
            known in str(error)
            for known in ("modified by an inplace operation", "leaf", "does not require grad")
        ):
            return None
        raise


@pytest.mark.filterwarnings("ignore:chunks=1 on", "ignore:nothing ran on stage")
@settings(deadline=None, max_examples=examples(100), suppress_health_check=list(HealthCheck))
@given(
    programs,
    st.integers(1, 7),
    st.integers(1, 4),
    st.sampled_from([*SCHEDULES, "auto"]),
    st.sampled_from([stages(3), ["cpu:0", "cpu:1", "cpu:0"], ["cpu:0", "cpu:1", "cpu:1"]]),
    st.sampled_from([None, None, 1, 2, 3]),
    st.booleans(),
    st.integers(0, 99),
)
def test_random_programs_train_as_plain(
    instructions, batch, chunks, schedule, devices, in_flight, isolate, seed
):
    """Loss, every gradient and every buffer equal the plain loop's to the bit, or it is refused."""
    torch.manual_seed(seed)
    program = Program(instructions)
    args = torch.randn(batch, 4), torch.randint(0, 4, (batch,))
    target = torch.randn(batch, 4)
    plain, marked = copy.deepcopy(program), copy.deepcopy(program)
    copies = tuple(a.clone() for a in args)  # a program may write to its inputs
    expected = plain_or_none(plain, copies, target, chunks)
    assume(expected is not None)
    pipe = bp.Pipeline(
        marked,
        devices=devices,
        chunks=chunks,
        schedule=schedule,
        in_flight=in_flight,
        isolate=isolate,
    )
    names = {op.name for op in instructions}
    try:
        result = pipe.forward_backward(*args, target=target, loss_fn=loss_of)
    except PlanError as error:
        assert "without gaps" in str(error)
        assume(False)
    except CrossingError:
        assert names & {"add_", "module_relu_"}, "refused without any in-place write"
        event("refused: in-place write across stages with views")
        return
    except StateError:
        assert "buffer" in names
        event("refused: a buffer written on one stage and read on another")
        return
    event(f"route of {len(pipe.recording.route)} hops")
    found = difference(marked, plain, result.loss, expected)
    assert found.same, found


@pytest.mark.filterwarnings("ignore:chunks=1 on")
@settings(deadline=None, max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(programs, st.integers(2, 6), st.integers(1, 4), st.booleans(), st.integers(0, 99))
def test_random_programs_differentiate_as_plain(instructions, batch, chunks, isolate, seed):
    """``pipe(x)`` and a backward of the caller's give the uncut run's gradients, inputs' too."""
    torch.manual_seed(seed)
    program = Program(instructions)
    x, index = torch.randn(batch, 4), torch.randint(0, 4, (batch,))
    target = torch.randn(batch, 4)
    results = []
    for schedule in ("uncut", "gpipe"):
        net, leaf = copy.deepcopy(program), x.clone().requires_grad_()
        isolated = isolate and schedule != "uncut"
        pipe = bp.Pipeline(
            net, devices=stages(3), chunks=chunks, schedule=schedule, isolate=isolated
        )
        try:
            loss = loss_of([output.cpu() for output in pipe(leaf, index)], target)
            loss.backward()
        except (PlanError, CrossingError, StateError):
            assume(False)
        except RuntimeError as error:
            known = ("inplace", "in-place", "does not require grad")
            assert any(word in str(error) for word in known)
            assume(False)
        results.append((loss.detach(), [leaf.grad, *(p.grad for p in net.parameters())]))
    (loss_a, grads_a), (loss_b, grads_b) = results
    assert equal(loss_a, loss_b)
    for a, b in zip(grads_a, grads_b, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_two_steps_add_up(schedule):
    """A second step without zero_grad adds to the gradients of the first, as plain."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    plain = copy.deepcopy(net)
    bp.begin_blocks(net, {"1": 1, "2": 2})
    pipe = bp.Pipeline(net, devices=stages(3), chunks=3, schedule=schedule)
    x = torch.randn(7, 4)
    for _ in range(2):
        loss = pipe.forward_backward(x, loss_fn=square).loss
        expected = plain_step(plain, (x,), {}, None, square, 3)
    assert difference(net, plain, loss, expected).same
