"""The ranks of one process: whose turn it is, what they exchange, and how they end."""

import threading

import pytest
import torch

from blockpipe.compat.torchdistpackage import clip_grad_norm_, dist, launch, tpc
from blockpipe.errors import PlanError, UsageError


def test_ranks_work_in_turns():
    """One at a time, in their order, from one meeting to the next: what they draw is repeatable."""
    said = []

    def main() -> float:
        for step in range(3):
            said.append((step, dist.get_rank()))
            dist.barrier()
        return torch.rand(()).item()

    torch.manual_seed(0)
    drawn = launch(main, 3)
    assert said == [(step, rank) for step in range(3) for rank in range(3)]
    torch.manual_seed(0)
    assert launch(main, 3) == drawn
    assert len(set(drawn)) == 3


def test_a_broadcast_is_the_tensor_of_one_rank():
    """Written in place into those of the others; in groups of one rank nothing is."""

    def main() -> list[float]:
        tensor = torch.full((2,), float(dist.get_rank()))
        dist.broadcast(tensor, tpc.get_ranks_in_group("data")[0], tpc.get_group("data"))
        own = tensor[0].item()
        dist.broadcast(tensor, 1, tpc.get_group("pipe"))
        return [own, *tensor.tolist()]

    assert launch(main, 3) == [[0.0, 1.0, 1.0], [1.0, 1.0, 1.0], [2.0, 1.0, 1.0]]


def test_the_callers_thread_state_goes_along():
    """Grad mode and autocast, for example."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        states = launch(lambda: (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")), 2)
    assert states == [(False, True)] * 2


def test_a_context_manager_of_torchs_that_ranks_share_is_each_ones_own():
    """A rank that left it set what another one had found."""
    shared = torch.no_grad()

    def main() -> list[bool]:
        with torch.set_grad_enabled(dist.get_rank() == 0):
            for rank in range(2):
                dist.barrier()
                if rank == dist.get_rank():
                    shared.__enter__()
            dist.barrier()
            within = torch.is_grad_enabled()
            shared.__exit__(None, None, None)
            return [within, torch.is_grad_enabled()]

    assert launch(main, 2) == [[False, True], [False, False]]


def test_the_first_failure_ends_the_others():
    """It comes out as it was raised; no thread is left, and the next launch works."""
    done = []

    def main() -> None:
        if dist.get_rank() == 1:
            raise KeyError("of rank 1")
        dist.barrier()
        done.append(dist.get_rank())

    before = threading.active_count()
    with pytest.raises(KeyError, match="of rank 1"):
        launch(main, 3)
    assert done == []
    assert threading.active_count() == before
    assert launch(dist.get_world_size, 2) == [2, 2]


def test_a_failure_where_they_meet_is_one_failure():
    """What the last rank's call raises for all of them."""
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.full((1,), float("nan"))
    with pytest.raises(RuntimeError, match="non-finite"):
        launch(lambda: clip_grad_norm_([weight], 1.0, error_if_nonfinite=True), 2)


def test_ranks_that_do_not_call_the_same_are_an_error():
    """And no standstill: another function, or the end of the script."""

    def other() -> None:
        if tpc.is_first_in_pipeline_group():
            dist.barrier()
        else:
            clip_grad_norm_([], 1.0)

    match = r"call dist.barrier, as rank 0 does, got clip_grad_norm_ by rank 1 \(\S*test_ranks"
    with pytest.raises(UsageError, match=match):
        launch(other, 2)

    def ends() -> None:
        if tpc.is_first_in_pipeline_group():
            dist.barrier()

    with pytest.raises(UsageError, match=r"call dist.barrier, got the end of the script by rank 1"):
        launch(ends, 2)

    def ends_later() -> None:
        dist.barrier()
        if tpc.is_last_in_pipeline_group():
            dist.barrier()

    with pytest.raises(UsageError, match=r"got the end of the script by rank 0"):
        launch(ends_later, 2)


def test_a_launch_has_at_least_one_rank_and_is_no_ranks_own():
    with pytest.raises(PlanError, match="a positive integer for stages, got 0"):
        launch(print, 0)
    with pytest.raises(UsageError, match=r"called by a rank of another one \(\S*test_ranks"):
        launch(lambda: launch(dist.get_rank, 2), 2)
