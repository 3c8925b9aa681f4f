"""Where a read may find what it names."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import StateError
from blockpipe.recording.plain_values.evaluation.members import owners_of

from ....models import square
from ....stage_devices import stages


class Kind(type):
    scale = 0.0


class Options(metaclass=Kind):
    depth = 1


class More(Options):
    pass


@pytest.fixture(autouse=True)
def _scale_is_put_back() -> Iterator[None]:
    yield
    Kind.scale = 0.0


class Net(nn.Module):
    def __init__(self, reads: type) -> None:
        super().__init__()
        self.a, self.b, self.reads = nn.Linear(4, 4), nn.Linear(4, 4), reads

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            x = self.a(x)
            Kind.scale = float(x.detach().sum())
        with bp.Block(stage=1):
            return self.b(x) * self.reads.scale


def test_a_read_may_be_about_classes_and_metaclasses() -> None:
    """Up to the one that has the name."""
    more = More()
    assert list(owners_of(more, "depth")) == [more, More, Options]
    assert list(owners_of(More, "scale")) == [More, Options, object, Kind]


@pytest.mark.parametrize("reads", [Kind, Options, More])
def test_what_a_stage_sets_on_a_metaclass_and_another_reads_is_refused(reads: type) -> None:
    """Read through a class of it, too."""
    pipe = bp.Pipeline(Net(reads), devices=stages(2), chunks=4, schedule="gpipe")
    with pytest.raises(StateError, match=r"the forward changes Kind\.scale"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=square)
