"""What a script asks its topology, in one process and in a launch; and several processes."""

import pytest
import torch

from blockpipe.compat.torchdistpackage import (
    ProcessTopology,
    forward_backward,
    is_using_pp,
    launch,
    tpc,
)
from blockpipe.devices.devices import default_devices
from blockpipe.errors import PlanError, UsageError


def test_one_process_is_the_first_rank_and_the_last():
    topology = ProcessTopology()
    topology.setup_process_groups([("data", 1.0), ("pipe", 4), ("tensor", 1)])
    assert (topology.get_pp_size(), topology.get_pp_rank()) == (4, 0)
    assert topology.is_first_in_pipeline_group()
    assert topology.is_last_in_pipeline_group()
    assert topology.get_ranks_in_group("pipe") == [0, 1, 2, 3]
    assert topology.get_ranks_in_group("data") == [0]
    assert (topology.is_mode_inited("pipe"), topology.is_mode_inited("tensor")) == (True, False)


def test_launched_ranks_know_their_places():
    answers = launch(
        lambda: (
            tpc.get_group_rank("pipe"),
            tpc.is_first_in_pipeline_group(),
            tpc.is_last_in_pipeline_group(),
            tpc.is_last_in_group("data"),
            tpc.get_ranks_in_group("data"),
            is_using_pp(),
        ),
        3,
    )
    assert answers == [
        (0, True, False, True, [0], True),
        (1, False, False, True, [1], True),
        (2, False, True, True, [2], True),
    ]


def test_the_devices_of_stages():
    """Those that were given; else accelerators in their order, or threads on the CPU."""
    topology = ProcessTopology()
    topology.setup_process_groups([("pipe", 2)], devices=["cpu", "cpu:3"])
    assert topology.stage_devices() == ["cpu", "cpu:3"]
    topology.setup_process_groups([("pipe", 2)])
    devices = default_devices()
    assert topology.stage_devices() == (["cpu:0", "cpu:1"] if devices is None else devices[:2])
    if devices is not None:
        topology.setup_process_groups([("pipe", 1000)])
        with pytest.raises(PlanError, match="an accelerator for each of 1000 stages"):
            topology.stage_devices()


@pytest.mark.every
@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ([("data", 2), ("pipe", 2)], UsageError, "1 in one process for 'data', got 2.*Replicas"),
        ([("tensor", 2)], UsageError, "for 'tensor', got 2.*split over devices"),
        ([("pip", 2)], PlanError, "no mode 'pip'.*'pipe'"),
        ([("pipe", 0)], PlanError, "a positive integer for the size of 'pipe', got 0"),
        ([("pipe", 1.5)], PlanError, "a positive integer for the size of 'pipe', got 1.5"),
    ],
)
def test_groups_of_other_processes_are_refused(config, error, message):
    with pytest.raises(error, match=message):
        ProcessTopology().setup_process_groups(config)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(PlanError, match="a device for each of 2 stages"):
        ProcessTopology().setup_process_groups([("pipe", 2)], devices=["cpu"])
    with pytest.raises(PlanError, match="2, the number of launched ranks, .*got 3"):
        launch(lambda: tpc.setup_process_groups([("pipe", 3)]), 2)


def test_another_question_names_near_ones():
    with pytest.raises(AttributeError, match="'get_group_rank'"):
        tpc.get_grup_rank("pipe")


def test_several_processes_are_refused_with_the_reason(monkeypatch):
    """Where one of them runs a step: each would run all stages."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    for call in (
        lambda: tpc.setup_process_groups([("pipe", 4)]),
        lambda: forward_backward(None, lambda x: x, None, torch.ones(2), 2),
    ):
        with pytest.raises(UsageError, match=r"one process, got one of 4 .*test_topology.*launch"):
            call()
