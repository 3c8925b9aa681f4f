"""Models and helpers of several test files."""

import copy

import pytest
import torch

import blockpipe as bp

from ..models import Scripted, square
from ..stage_devices import equal, stages


def found(forward, error, match):
    net = Scripted(forward)
    before = copy.deepcopy(net.state_dict())
    for isolate in (False, True):
        pipe = bp.Pipeline(net, devices=stages(3), chunks=3, isolate=isolate)
        with pytest.raises(error, match=match):
            pipe.forward_backward(torch.randn(6, 4), loss_fn=square)
        net.zero_grad()
    assert all(equal(v, net.state_dict()[k]) for k, v in before.items())
