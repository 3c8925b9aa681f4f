"""``torch.distributed.checkpoint`` beside tensors on several devices of one process."""

import pytest
import torch
from torch import nn

import blockpipe as bp

from ..stage_devices import is_simulated, stages

if not is_simulated():
    pytest.skip("needs several accelerators: --simulated", allow_module_level=True)

from .. import simulated


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    """Tensors on each device, in a process that has had a pipeline over several."""
    net = bp.begin_blocks(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), {"1": 1, "2": 2})
    bp.Pipeline(net, devices=stages(3), chunks=2)(torch.randn(4, 8))
    return {f"w{k}": torch.randn(64).to(where) for k, where in enumerate(stages(4))}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_saved_is_there_on_every_device(state, tmp_path):
    """``dcp.save`` waited for the copies from the current device alone, and saved of the others
    what the memory of the copy had held before: in every second try, with copies as slow as these."""
    import torch.distributed.checkpoint as dcp

    simulated.set_delay(0, 0, copy_lo=20_000, copy_hi=50_000)
    try:
        for turn in range(6):
            dcp.save(state, checkpoint_id=tmp_path / str(turn), no_dist=True)
    finally:
        simulated.set_delay(0, 0)
    for turn in range(6):
        found = {name: torch.zeros(64) for name in state}
        dcp.load(found, checkpoint_id=tmp_path / str(turn), no_dist=True)
        assert all(torch.equal(found[name], tensor.cpu()) for name, tensor in state.items())


def test_what_is_staged_is_waited_for_on_every_device(state, monkeypatch):
    """``dcp.async_save`` copies to pinned memory, which only CUDA has."""
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager

    waited = set()
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.add)
    StateDictStager().stage(state)
    assert waited == {tensor.device for tensor in state.values()}
