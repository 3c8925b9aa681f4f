"""What processes compare before a step."""

import enum
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import leaky_relu

import blockpipe as bp
from blockpipe.distributed import DistributedPipeline, engines, kinds
from blockpipe.distributed.kinds import arguments_in_words, modes_in_words

from . import ranks


def test_modes_of_shared_parts_are_counted_once() -> None:
    """As ``modules()`` and ``parameters()`` count them, in one order in each process."""
    shared, frozen = nn.Linear(2, 2), nn.Linear(2, 2, bias=False).requires_grad_(False)
    net = nn.Sequential(shared, frozen, nn.Sequential(shared, nn.Dropout().eval()))
    words = modes_in_words(net)
    assert words["trained parameters"] in ("2 yes, 1 no", "1 no, 2 yes")
    counted = [int(run.split()[0]) for run in words["modules in training mode"].split(", ")]
    assert sum(counted) == len([*net.modules()])
    again = nn.Sequential(shared, frozen, nn.Sequential(shared, nn.Dropout()))
    assert modes_in_words(again)["modules in training mode"] == "5 yes"


def test_modes_of_a_deep_model_take_few_calls() -> None:
    """Each step asks for them in every process."""
    net = nn.Sequential(*[nn.Sequential(nn.Linear(1, 1), nn.ReLU()) for _ in range(100)])
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        modes_in_words(net)
    finally:
        sys.setprofile(before)
    assert calls < 2 * len([*net.modules()])


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.cpu("the process group has no simulated accelerator")
@pytest.mark.usefixtures("one_process")
@ranks.NEEDS_SCHEDULES
def test_a_sharded_stage_is_refused_at_once() -> None:
    """Before it is recorded, and before a step if it was sharded later."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    bp.begin_blocks(net, {"1": 1})
    x = torch.ones(8, 4)
    options: dict[str, Any] = {"device": "cpu", "chunks": 4, "schedule": "looped-bfs"}
    pipe = DistributedPipeline(net, sample=x, **options)
    fully_shard(net[1], mesh=init_device_mesh("cpu", (1,)))
    said = r"got fully_shard on module '1' \(.*test_kinds\.py.*leave it out"
    with pytest.raises(bp.BlockpipeError, match=said):
        pipe.forward_backward(x, loss_fn=torch.sum)
    with pytest.raises(bp.BlockpipeError, match=said):
        DistributedPipeline(net, sample=x, **options)


@pytest.mark.cpu("the process group has no simulated accelerator")
@pytest.mark.usefixtures("one_process")
@ranks.NEEDS_SCHEDULES
def test_a_step_looks_at_the_modes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its micro-batches have two sizes, and so two engines."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 2))
    bp.begin_blocks(net, {"1": 1})
    options: dict[str, Any] = {"device": "cpu", "chunks": 3, "schedule": "looped-bfs"}
    pipe = DistributedPipeline(net, sample=torch.ones(8, 4), **options)
    looked = []

    def look(model: nn.Module) -> dict[str, str]:
        looked.append(model)
        return modes_in_words(model)

    monkeypatch.setattr(engines, "modes_in_words", look)
    monkeypatch.setattr(kinds, "modes_in_words", look)
    pipe.forward_backward(torch.ones(8, 4), loss_fn=torch.sum)
    assert looked == [net]
    net.eval()
    with torch.no_grad():
        found = pipe(torch.ones(8, 4))
        torch.testing.assert_close(found, net(torch.ones(8, 4)))  # recorded anew, with no dropout
    assert looked == [net, net]


class Mode(enum.Enum):
    """What a forward is told to do."""

    ONCE = 1
    TWICE = 2


class Scale:
    """An object that a forward calls."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, h: Tensor) -> Tensor:
        return h * self.by


class Told(nn.Module):
    """Its code between modules does what an argument says."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, what: Any) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
        with bp.Block(stage=1):
            if isinstance(what, Mode):
                h = h * what.value
            elif isinstance(what, torch.dtype):
                h = h.to(what).float()
            elif isinstance(what, slice):
                h = h + h[:, what].sum(1, keepdim=True)
            elif isinstance(what, dict):
                h = what["act"](h)
            elif isinstance(what, list):
                h = h * len("".join(map(str, what)))
            else:
                h = what(h)
            return self.b(h)


_ONE: dict[str, Any] = {"device": "cpu", "chunks": 2, "schedule": "looped-bfs"}
_CHANGED = Scale(1.0)


def _changed() -> Scale:
    _CHANGED.by = 3.0
    return _CHANGED


@pytest.mark.cpu("the process group has no simulated accelerator")
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("first", "later"),
    [
        (Mode.ONCE, lambda: Mode.TWICE),
        (torch.float64, lambda: torch.bfloat16),
        (slice(0, 1), lambda: slice(0, 3)),
        (torch.tanh, lambda: torch.relu),
        (partial(leaky_relu, negative_slope=0.1), lambda: partial(leaky_relu, negative_slope=2.0)),
        (Scale(1.0), lambda: Scale(2.0)),
        (Scale(1.0).__call__, lambda: Scale(2.0).__call__),
        (_CHANGED, _changed),
        ({"act": torch.tanh}, lambda: {"act": torch.relu}),
    ],
)
@ranks.NEEDS_SCHEDULES
def test_a_forward_does_what_the_present_step_tells_it(first: Any, later: Any) -> None:
    """Arguments without words for them were those of the first step for ever, without a word."""
    net, x = Told(), torch.randn(8, 4)
    pipe = DistributedPipeline(net, sample=(x, first), **_ONE)
    for told in (lambda: first, lambda: first, later, later):
        what = told()
        with torch.no_grad():
            torch.testing.assert_close(pipe(x, what), net(x, what))


class Acts(enum.Enum):
    """Its values are other objects in each process."""

    LEAKY = partial(leaky_relu, negative_slope=0.1)


def test_words_for_arguments_are_the_same_in_every_process() -> None:
    given = [Acts.LEAKY, Mode.ONCE, torch.float64, slice(0, 1), leaky_relu, Scale(1.0), None, "a"]
    words = arguments_in_words(given, {})
    assert " at 0x" not in words
    assert "Acts.LEAKY" in words
    assert "torch.float64" in words


@pytest.mark.cpu("the process group has no simulated accelerator")
@pytest.mark.usefixtures("one_process")
@ranks.NEEDS_SCHEDULES
def test_plain_arguments_of_each_micro_batch_are_refused() -> None:
    """All micro-batches computed with those of the first one."""
    x, what = torch.randn(8, 4), ["a"] * 4 + ["bb"] * 4
    pipe = DistributedPipeline(Told(), sample=(x, what), batch_dims={1: "list"}, **_ONE)
    with torch.no_grad():
        pipe(x, ["a"] * 8)
        with pytest.raises(bp.BlockpipeError, match=r"another args\[1\]\[0\] for micro-batch 1"):
            pipe(x, what)
