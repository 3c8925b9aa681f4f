"""What pieces take: measured where they run, and told apart from each other."""

import statistics
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.batches.step_arguments import StepArguments
from blockpipe.devices.stopwatch import Stopwatch
from blockpipe.errors import UsageError
from blockpipe.partitioning.cut_points import why_closed
from blockpipe.partitioning.timing import segment_stamps, segment_timing
from blockpipe.partitioning.timing.segment_timing import (
    SegmentTimer,
    SegmentTimes,
    TimingOptions,
    _corrected,
    _in_a_crowd,
)

from ...hiding import hidden


class Clock:
    """Seconds that pass where a test says so; of real ones only a thousandth, so that the
    machine's other work is no matter."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds + time.perf_counter() / 1000

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


CLOCK = Clock()


@pytest.fixture(autouse=True)
def _on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_timing, "Stopwatch", partial(Stopwatch, clock=CLOCK))


class _Slow(torch.autograd.Function):
    """Takes so many seconds forward, and so many backward."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_seconds = backward
        CLOCK.sleep(forward)
        return x + 0

    @staticmethod
    def backward(ctx, gradient):
        CLOCK.sleep(ctx.backward_seconds)
        return gradient, None, None


class Slow(nn.Module):
    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.seconds = forward, backward
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return _Slow.apply(x * self.weight, *self.seconds)


def _measured(
    model: nn.Module,
    *args: Tensor,
    target: Tensor | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    lanes: int = 1,
    repeats: int = 1,
) -> SegmentTimes:
    recording = bp.record(model, args, plan=bp.StagePlan([]))
    cuts = [i for i, why in enumerate(why_closed(recording)) if why is None]
    sample = StepArguments(args, {}, target, loss_fn)
    timing = TimingOptions(torch.device("cpu"), lanes=lanes, repeats=repeats)
    return SegmentTimer(model, recording, cuts, sample, timing).measure()


class Crossed(nn.Module):
    """Skips, a branch, and a module called twice: autograd comes to the pieces in reverse order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Slow(0.01, 0.03), Slow(0.03, 0.01), Slow(0.0, 0.05)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(x) + a
        return self.c(b) + a + self.a(b)


def test_each_piece_has_its_own_time() -> None:
    """And the sum is a step's time."""
    times = _measured(Crossed(), torch.ones(2, 4))
    assert times.forward == pytest.approx([0.01, 0.03, 0.0, 0.01], abs=1e-3)
    assert times.backward == pytest.approx([0.03, 0.01, 0.05, 0.03], abs=1e-3)
    assert times.step == pytest.approx(0.17, abs=1e-3)


def test_a_disturbed_piece_takes_nothing_from_the_others() -> None:
    """All that pieces add up to beyond a step was once taken for the stamps' cost."""
    forward, backward = [1e-4] * 40, [1e-4] * 40
    backward[5] = 12e-3
    forward, backward = _corrected(forward, backward, whole=8.2e-3, stamp=1e-6)
    assert sum(forward) + sum(backward) == pytest.approx(8.2e-3)
    others = [*forward, *backward[:5], *backward[6:]]
    assert min(others) == pytest.approx(max(others)) == pytest.approx(backward[5] / 120, rel=0.02)


@pytest.mark.parametrize("stamp", [3e-6, 3e-5])
def test_stamps_are_taken_off(stamp: float) -> None:
    """Where they took most of the time; and no more than the pieces add up to beyond a step."""
    true = [1e-6, 3e-6, 5e-6]
    stamped = [t + 3e-6 for t in true]
    forward, backward = _corrected(stamped, stamped, whole=2 * sum(true), stamp=stamp)
    assert forward == backward == pytest.approx(true)


def test_looking_at_the_graph_is_no_stamps_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is between forward and backward, and small pieces were left with nothing for it."""

    def slowly(roots: list[Tensor]) -> list[object]:
        CLOCK.sleep(0.05)
        return list(nodes(roots))

    nodes = segment_stamps._nodes
    monkeypatch.setattr(segment_stamps, "_nodes", slowly)
    net = nn.Sequential(Slow(0.002, 0.002), Slow(0.002, 0.002), Slow(0.01, 0.01))
    times = _measured(net, torch.ones(2, 4))
    assert min(*times.forward, *times.backward) > 0.001


def test_balance_cuts_by_what_was_measured() -> None:
    """The estimates know nothing of sleep: the slow backward is found by running it."""
    net = nn.Sequential(Slow(0, 0), Slow(0, 0), Slow(0, 0.04), Slow(0, 0.04))
    x = torch.ones(2, 4)
    plan = bp.balance(net, x, 2, repeats=1)
    assert plan.shares[1].begins == "3"
    assert "measured on cpu" in str(plan)


def test_the_loss_is_the_last_stages() -> None:
    """Its forward and its backward."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return _Slow.apply((output - target).sum(), 0.03, 0.05)

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    times = _measured(net, torch.ones(2, 4), target=torch.zeros(2, 4), loss_fn=loss)
    assert times.forward[1] > 10 * times.forward[0]
    assert times.backward[1] > 10 * times.backward[0]


def test_what_is_recomputed_counts_in_the_backward() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), Slow(0.04, 0.0)

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self._end, self.a(x), use_reentrant=False)

        def _end(self, x: Tensor) -> Tensor:
            return self.b(x).exp()  # which keeps its result: all before it is recomputed

    times = _measured(Net(), torch.ones(2, 4))
    assert sum(times.backward) > 0.5 * sum(times.forward)


def test_a_compiled_module_is_measured_as_one() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    net[1].compile(backend="eager")
    compiled = net[1]._compiled_call_impl
    assert bp.record(net, torch.ones(2, 4), plan=bp.StagePlan([])).segments[1].why_not is None
    times = _measured(net, torch.ones(2, 4))
    assert times.forward[1] > 0.0
    assert times.forward[2] == times.backward[2] == 0.0  # inside of it
    assert net[1]._compiled_call_impl is compiled


def test_frozen_pieces_have_no_backward() -> None:
    # Large enough that no noise in what the stamps cost, which is taken off, is as long.
    net = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 512))
    net[0].requires_grad_(False)
    times = _measured(net, torch.ones(512, 512))
    assert times.backward[0] == 0.0 < times.backward[1]


def test_it_leaves_nothing_behind_when_the_forward_fails() -> None:
    """A forward that runs on fake tensors, but not with values."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Embedding(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b((self.a(x) * 0 + 99).sum(1).long())

    net = Net()
    net.a.weight.grad = gradient = torch.ones(4, 4)
    parameters = [id(p) for p in net.parameters()]
    with pytest.raises(IndexError, match="index out of range"):
        bp.balance(net, torch.ones(2, 4), 2)
    assert [id(p) for p in net.parameters()] == parameters
    assert net.a.weight.grad is gradient
    assert all("forward" not in module.__dict__ for module in net.modules())


def test_hooks_of_the_users_parameters_do_not_run() -> None:
    """An optimizer that steps in the backward would train the model."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    ran = []
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(ran.append)
    _measured(net, torch.ones(2, 4))
    assert ran == []
    assert all(p.grad is None for p in net.parameters())


def test_a_result_without_a_gradient_path_is_refused_in_training() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    with pytest.raises(UsageError, match="a gradient path, but there is none.*training=False"):
        bp.balance(net, torch.ones(2, 4), 2)
    assert bp.balance(net, torch.ones(2, 4), 2, training=False).num_stages == 2


def test_it_runs_with_the_threads_of_a_stage_and_gives_them_back() -> None:
    seen: list[int] = []
    shelf = hidden(seen)

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            shelf().append(torch.get_num_threads())
            return super().forward(x)

    torch.set_num_threads(4)
    plan = bp.balance(nn.Sequential(Net(4, 4), Net(4, 4)), torch.ones(2, 4), 2)
    assert statistics.mode(seen) == 2
    assert torch.get_num_threads() == 4
    assert "2 thread(s)" in plan.source


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_an_accelerator_it_is_measured_by_events() -> None:
    """The model stays on the CPU; its copy runs on the device."""
    layers = [nn.Linear(2048, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 2048)]
    net, x = (
        nn.Sequential(*layers, *(nn.Linear(2048, 2048) for _ in range(5))),
        torch.ones(4096, 2048),
    )
    plan = bp.balance(net, x, 2, devices=["cuda:0"] * 2, repeats=5)
    assert "measured on cuda:0" in str(plan)
    assert plan.shares[1].begins in ("3", "4", "5")
    assert all(p.device.type == "cpu" and p.grad is None for p in net.parameters())
    # A matrix product of these sizes takes no more than a tenth of a second on any accelerator,
    # and launches take microseconds each: a host clock would find the whole in the last piece.
    assert plan.imbalance < 1.5


def test_weights_that_a_forward_writes_to_are_left_alone() -> None:
    """An embedding with ``max_norm`` renormalizes its weight in place."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Embedding(10, 8, max_norm=0.1), nn.Linear(8, 8)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.b(self.a(tokens))

    net = Net()
    weight = net.a.weight.detach().clone()
    bp.balance(net, torch.arange(10), 2, repeats=1)
    assert torch.equal(net.a.weight, weight)


def test_a_crowd_takes_steps_and_goes_home() -> None:
    """While a step is timed, others take steps in threads of their own, as the caller's; then they
    are gone."""
    taken, modes = threading.Event(), []

    def step() -> None:
        modes.append((threading.get_ident(), torch.is_autocast_enabled("cpu")))
        if len({ident for ident, _ in modes}) == 2:
            taken.set()

    before = threading.active_count()
    with torch.autocast("cpu"), _in_a_crowd(step, 2):
        assert taken.wait(timeout=20)
        assert threading.active_count() == before + 2
    assert threading.active_count() == before
    assert all(is_on for _, is_on in modes)


def test_a_model_that_cannot_run_twice_at_once_is_measured_alone() -> None:
    """The crowd is measuring's own doing: what a model cannot do in it is no error of the user's."""

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(256, 256), nn.Linear(256, 256)
            self.is_running = False

        def forward(self, x: Tensor) -> Tensor:
            if self.is_running:
                raise RuntimeError("not re-entrant")
            self.is_running = True
            time.sleep(0.005)
            x = self.b(self.a(x).relu())
            self.is_running = False
            return x

    net = Alone()
    times = _measured(net, torch.rand(8, 256), lanes=2, repeats=5)
    assert times.crowded == 1
    assert not net.is_running
