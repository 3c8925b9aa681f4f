"""Routes and state that no pipeline can follow, and what their errors say."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.distributed import build_stage
from blockpipe.errors import (
    CrossingError,
    PlanError,
    RouteError,
    StateError,
)

from ..models import SCHEDULES
from ..parameter_sets import each_value, every_pair
from ..stage_devices import stages
from .bad_input import HERE, pipeline, train, x

# --- routes and state


class Ways(nn.Module):
    """After stage 0 a micro-batch goes one way or the other, by its first value."""

    def __init__(self, usual: list[int], other: list[int]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.usual, self.other = usual, other

    def forward(self, value: Tensor) -> Tensor:
        way = self.usual if bool(value[0, 0] < 0.5) else self.other
        with bp.Block(0):
            value = self.first(value)
        for stage in way:
            with bp.Block(stage):
                value = self.layers[stage](value)
        return value


def two_ways() -> Tensor:
    """Micro-batches 0 to 2 go the usual way, 3 the other."""
    inputs = torch.zeros(8, 4)
    inputs[6:] = 1
    return inputs


@each_value(
    schedule=SCHEDULES,
    other=[[2, 1], [1, 2, 0], [1, 2, 5], [1, 2, 1]],
)
def test_a_route_that_was_not_recorded_is_refused(schedule: str, other: list[int]) -> None:
    """A micro-batch off the recorded route is a RouteError with both routes and the line."""
    pipe = pipeline(Ways([1, 2], other), schedule=schedule)
    with pytest.raises(RouteError, match=rf"micro-batch 3 .*route is \[0, 1, 2\].*{HERE}"):
        train(pipe, two_ways())


@each_value(
    schedule=SCHEDULES,
    other=[[2], [1], []],
)
def test_skipped_hops_are_fine(schedule: str, other: list[int]) -> None:
    """A micro-batch may skip hops: gradients are the plain loop's."""
    torch.manual_seed(0)
    net, plain = Ways([1, 2], other), Ways([1, 2], other)
    plain.load_state_dict(net.state_dict())
    train(pipeline(net, schedule=schedule), two_ways())
    for part in two_ways().chunk(4):
        (F.mse_loss(plain(part), torch.zeros(2, 4)) / 4).backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or q.grad is None or torch.equal(p.grad, q.grad)


class Switched(nn.Module):
    """Each of three blocks runs its layer, or does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.off: int | None = None

    def forward(self, value: Tensor) -> Tensor:
        for stage, layer in enumerate(self.layers):
            with bp.Block(stage):
                value = value if stage == self.off else layer(value)
        return value


@each_value(schedule=SCHEDULES, off=[0, 1, 2])
def test_a_block_may_do_nothing_for_a_while(schedule: str, off: int) -> None:
    """Stages behind it stay where they are, and gradients are the plain loop's."""
    torch.manual_seed(0)
    net = Switched()
    plain = copy.deepcopy(net)
    pipe = pipeline(net, schedule=schedule)
    for net.off in (None, off, None):
        plain.off = net.off
        train(pipe, two_ways())
        for part in two_ways().chunk(4):
            (F.mse_loss(plain(part), torch.zeros(2, 4)) / 4).backward()
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            assert q.grad is not None
            torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0)
    assert pipe.recording is not None
    assert pipe.recording.route == [0, 1, 2]


def test_a_block_that_does_nothing_from_the_first_step_on_is_told() -> None:
    """A warning names the stage and the line of its mark, and the summary has it too."""
    net = Switched()
    net.off = 1
    pipe = pipeline(net)
    said = r"nothing ran on stage 1, which the mark at test_bad_routes.py:\d+ begins"
    with pytest.warns(UserWarning, match=said):
        train(pipe)
    assert re.search(said, "\n".join(bp.record(net, two_ways()).summary().notes))


class Detour(nn.Module):
    """Stays on its stage, or goes to stage 2 and back, by its first value."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        if bool(value[0, 0] > 0.5):
            with bp.Block(2):
                value = self.other(value)
        return self.usual(value)


class WithDetour(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.detour, self.last = Detour(), nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        with bp.Block(0):
            value = value + 0
        with bp.Block(1):
            value = self.detour(value)
        with bp.Block(2):
            return self.last(value)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_detour_inside_a_module_that_was_on_one_stage_is_refused(schedule: str) -> None:
    """A mark that moves a micro-batch inside a sealed module is a RouteError, not ignored."""
    with pytest.raises(RouteError, match=f"micro-batch 3 .*stage 2.*{HERE}"):
        train(pipeline(WithDetour(), schedule=schedule), two_ways())


GLOBAL: dict[str, Tensor] = {}


class Keeps(nn.Module):
    """Leaves a tensor on self or in a global, which the next micro-batch reads."""

    def __init__(self, where: str, reader: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.where, self.reader = where, reader
        self.kept: Tensor | None = None

    def read(self, stage: int, value: Tensor) -> Tensor:
        if stage != self.reader:
            return value
        kept = self.kept if self.where == "self" else GLOBAL.get("kept")
        return value if kept is None else value + kept

    def forward(self, value: Tensor) -> Tensor:
        for stage, layer in enumerate(self.layers):
            with bp.Block(stage):
                value = self.read(stage, layer(value))
                if stage == 1:
                    kept = value.mean() if self.reader == 1 else value.detach().mean()
                    if self.where == "self":
                        self.kept = kept
                    else:
                        GLOBAL["kept"] = kept
        return value


@every_pair(
    schedule=SCHEDULES,
    how=["forward_backward", "call"],
    where=["self", "global"],
    reader=[0, 1],
)
def test_a_tensor_of_another_microbatch_is_refused(
    schedule: str, how: str, where: str, reader: int
) -> None:
    """State with a gradient is a StateError with both micro-batches; state that a later stage
    leaves for an earlier one is one with both lines, unless they come one by one."""
    GLOBAL.clear()
    why = "gradient path" if reader == 1 else "made on stage 1"
    match = rf"micro-batch (\d) on stage {reader} .*micro-batch (\d).*{why}.*{HERE}.*current_microb"
    if reader == 0 and schedule != "sequential":
        match = rf"on hops \[1\] \(.*{HERE}.*reads it on hops \[0\] \(.*{HERE}.*schedule='uncut'"
    with pytest.raises(StateError, match=match):  # noqa: PT012
        pipe = pipeline(Keeps(where, reader), schedule=schedule, sample=((x(),), {}))
        GLOBAL.clear()
        train(pipe) if how == "forward_backward" else pipe(x())


def test_a_tensor_of_an_earlier_step_is_refused() -> None:
    """A tensor with a gradient path that an earlier step left is a StateError that says so."""
    GLOBAL.clear()
    net = Keeps("global", 1)
    pipe = pipeline(net, chunks=1, devices=["cpu"] * 3, sample=((x(),), {}))
    GLOBAL.clear()
    train(pipe)
    with pytest.raises(StateError, match=f"micro-batch 0 of an earlier step.*{HERE}"):
        train(pipe)


def test_a_global_that_the_recording_left_is_put_back() -> None:
    """What the recording left in a global is put back: the error is of the step."""
    GLOBAL.clear()
    pipe = pipeline(Keeps("global", 1))
    with pytest.raises(StateError, match="belongs to micro-batch 0 of this step"):
        train(pipe)


class KeepsInside(nn.Module):
    """A module without marks that leaves a tensor with a gradient path on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))
        self.kept: Tensor | None = None

    def forward(self, value: Tensor) -> Tensor:
        value = value + self.bias
        if self.kept is not None:
            value = value + self.kept
        self.kept = value
        return value


class SealedKeeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), KeepsInside(), nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        with bp.Block(0):
            value = self.first(value)
        with bp.Block(1):
            value = self.middle(value)
        with bp.Block(2):
            return self.last(value)


@each_value(
    schedule=SCHEDULES,
    how=["forward_backward", "call"],
)
def test_a_tensor_of_another_microbatch_inside_a_sealed_module_is_refused(
    schedule: str, how: str
) -> None:
    """State with a gradient that a module keeps inside is a StateError too, never a silent mix."""
    pipe = pipeline(SealedKeeps(), schedule=schedule)
    with pytest.raises(StateError, match="micro-batch"):  # noqa: PT012
        if how == "forward_backward":
            train(pipe)
        else:
            F.mse_loss(pipe(x()), x()).backward()


def test_a_tensor_from_outside_with_a_gradient_path_is_refused() -> None:
    """A tensor computed outside of the forward, with a gradient path, is a CrossingError."""
    weight = torch.ones(4, requires_grad=True) * 2

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, value: Tensor) -> Tensor:
            with bp.Block(0):
                value = self.linear(value)
            with bp.Block(1):
                return value * weight

    with pytest.raises(CrossingError, match=f"gradient path.*{HERE}"):
        train(pipeline(Outside()))


class LayerDrop(nn.Module):
    """Skips its marked layer, or does not, by its first value."""

    def __init__(self, skipped: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.layers[1] = bp.BeginBlock(self.layers[1], stage=1)
        self.skipped = skipped

    def forward(self, value: Tensor) -> Tensor:
        first = bool(value[0, 0] > 0.5)
        for index, layer in enumerate(self.layers):
            if index != 1 or first != self.skipped:
                value = layer(value)
        return value


@pytest.mark.filterwarnings("ignore:.*but never called")
@each_value(schedule=SCHEDULES, skipped=[True, False])
def test_a_marked_layer_that_is_skipped_is_named(schedule: str, skipped: bool) -> None:
    """The error says that the mark was skipped with the layer."""
    pipe = bp.Pipeline(LayerDrop(skipped), devices=stages(2), chunks=4, schedule=schedule)
    with pytest.raises(
        RouteError, match="skips a marked layer .*layerdrop.*decide inside of a block"
    ):
        train(pipe, two_ways())


def test_a_process_with_nothing_to_do_is_refused() -> None:
    """A stage on which nothing runs is idle in one process; over several it is a PlanError."""
    net = Switched()
    net.off = 1
    with pytest.raises(PlanError, match=r"got \[0, 2\], .*nothing ran on stage 1"):
        build_stage(net, 0, (two_ways(),))


class Pool(nn.Module):
    """Two stages take a layer of one pool, each the one that its data choose."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.pool = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (int(n) for n in x[0, :2])
        with bp.Block(stage=0):
            h = self.pool[first](self.a(x))
        with bp.Block(stage=1):
            return self.pool[second](self.b(h))


@pytest.mark.parametrize(
    ("seen", "now", "name"),
    [((0, 1), (1, 0), "'pool.1.weight'"), ((0, 0), (0, 2), r"a leaf of shape \(4, 4\)")],
)
def test_a_parameter_that_data_have_read_earlier_than_before_is_refused_with_a_way_that_works(
    seen: tuple[int, int], now: tuple[int, int], name: str
) -> None:
    x = torch.zeros(6, 4)
    x[:2, :2], x[2:4, :2], x[4:, :2] = (torch.tensor(two) for two in (seen, now, (2, 0)))
    net = Pool()
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=3)
    with pytest.raises(RouteError, match=rf"reads {name}.* schedule='uncut'"):
        pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
    net.zero_grad()
    plain = copy.deepcopy(net)
    for part in x.split(2):
        (F.mse_loss(plain(part), part) / 3).backward()
    uncut = bp.Pipeline(net, devices=["cpu"] * 2, chunks=3, schedule="uncut")
    uncut.forward_backward(x, target=x, loss_fn=F.mse_loss)
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert ours.grad is None if theirs.grad is None else torch.allclose(ours.grad, theirs.grad)
