"""torchrun starts a failed script again, which goes on from its last checkpoint."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ..distributed import ranks, restarting

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cpu("the processes have no simulated accelerator"),
    ranks.NEEDS_SCHEDULES,
]


@pytest.mark.timeout(600)
def test_a_killed_process_is_started_again_and_the_numbers_are_the_same(tmp_path: Path) -> None:
    """To the digit: losses and weights are those of a run without a failure."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").mkdir()
    begin, restarts, losses, state = _run(tmp_path / "whole", "lives")
    assert (begin, restarts) == (0, "0")
    begin, restarts, again, after = _run(tmp_path / "broken", "dies")
    assert (begin, restarts) == (3, "1")
    assert again == losses
    assert len(losses) == restarting.STEPS
    assert after.keys() == state.keys()
    for name in state:
        assert torch.equal(after[name], state[name]), name


def _run(folder: Path, what: str) -> Any:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    script = Path(restarting.__file__)
    command = [sys.executable, *torchrun, "--max-restarts", "1", str(script), str(folder), what]
    root = str(script.parents[2])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Else gloo finds the addresses of the first attempt in the store that torchrun keeps for
        # the second one (https://github.com/pytorch/pytorch/issues/135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / "result")
