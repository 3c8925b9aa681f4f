"""Inputs that a graph of the caller's has saved, and at which a recording or ``verify`` looks."""

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp

from ..stage_devices import stages

LOOKS: dict[str, Callable[[bp.Pipeline, Tensor], Any]] = {
    "pipe(x)": lambda pipe, x: pipe(x),
    "no_grad": lambda pipe, x: torch.no_grad()(pipe)(x),
    "forward_backward": lambda pipe, x: pipe.forward_backward(x.detach(), loss_fn=torch.mean),
    "summary": lambda pipe, x: pipe.summary(x),
    "memory": lambda pipe, x: pipe.memory(x),
    "record": lambda pipe, x: bp.record(pipe.module, x),
    "verify": lambda pipe, x: pipe.verify(x.detach(), loss_fn=torch.mean),
}


class Looking(nn.Module):
    """Reads a value, so that its recording is a real run, and writes in place to a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.total, self.last = torch.zeros(4), 0.0

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x).tanh()
        with bp.Block(stage=1):
            self.last = h.detach().mean().item()
            with torch.no_grad():
                self.total += h.mean(0).cpu()
            return self.b(h)


@pytest.mark.parametrize("look", LOOKS)
def test_a_graph_that_has_saved_an_input_still_runs_its_backward(look: str) -> None:
    encoder = nn.Linear(4, 4).to(stages(2)[0])
    x = encoder(torch.randn(6, 4, device=stages(2)[0])).tanh()  # whose backward needs the result
    before, pipe = x._version, bp.Pipeline(Looking(), devices=stages(2), chunks=2)
    LOOKS[look](pipe, x)
    assert x._version == before
    x.sum().backward()


def test_the_first_backward_runs_behind_a_second_look_at_the_forward() -> None:
    """A tensor that is written in place has the recording look at a second forward."""
    pipe = bp.Pipeline(Looking(), devices=stages(2), chunks=2)
    for _ in range(2):
        pipe(torch.randn(6, 4)).sum().backward()


def test_an_input_that_a_recorded_forward_writes_has_its_value_and_its_version_again() -> None:
    class Writing(Looking):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.add_(1))

    x = torch.randn(6, 4, device=stages(2)[0])
    expected, before = x.clone(), x._version
    bp.record(Writing(), x)
    assert torch.equal(x, expected)
    assert x._version == before


def _mapped(path: Path) -> Tensor:
    """A batch in the memory of a file that may only be read: to write there ends the process."""
    file = path / "batch"
    file.write_bytes(torch.ones(6, 4).numpy().tobytes())
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    return torch.frombuffer(mapped, dtype=torch.float32).view(6, 4)


@pytest.mark.cpu("its memory is the host's")
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("kind", ["read-only", "expanded"])
def test_memory_that_nobody_may_write_is_not_written(kind: str, look: str, tmp_path: Path) -> None:
    x = _mapped(tmp_path) if kind == "read-only" else torch.ones(4).expand(6, 4)
    LOOKS[look](bp.Pipeline(Looking(), devices=stages(2), chunks=2), x)
    assert torch.equal(x, torch.ones(6, 4))
