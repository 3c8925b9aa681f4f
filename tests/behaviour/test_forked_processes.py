"""Processes that are forked after a step, as workers that load data are."""

import subprocess
import sys

import pytest

PROGRAM = """
import os
import torch, torch.nn.functional as F
import blockpipe as bp

net = bp.begin_blocks(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), {"1": 1})
pipe, x = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2), torch.ones(4, 4)
pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
child = os.fork()
if child == 0:
    F.mse_loss(net(x), x).backward()
    pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


@pytest.mark.cpu("torch starts threads for accelerators at the first backward in any case")
@pytest.mark.skipif(sys.platform == "win32", reason="nothing is forked there")
def test_a_forked_process_runs_backwards():
    """After a pipeline's first step, which is the process's first backward."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
