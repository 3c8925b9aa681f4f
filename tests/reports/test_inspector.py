"""Reports that other threads ask for while a model is trained."""

import threading

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp

from ..stage_devices import stages


class Counts(nn.Module):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.count = nn.Linear(4, 4), nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.count += 1
            h = self.a(x)
        with bp.Block(stage=1):
            return self.b(h)


@pytest.mark.parametrize("report", ["memory", "summary"])
def test_reports_in_other_threads_leave_a_training_alone(report: str):
    """They did not take turns with it: one put back what another, or a step, had counted."""
    net = Counts()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    x, failures = torch.randn(8, 4), list[BaseException]()

    def train() -> None:
        pipe.forward_backward(x, loss_fn=torch.sum)

    def ask() -> None:
        try:
            for _ in range(10):
                getattr(pipe, report)(x)
        except BaseException as error:
            failures.append(error)

    train()
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    steps = 1
    while any(thread.is_alive() for thread in threads):
        train()
        steps += 1
    assert not failures
    assert net.count == 4 * steps
