"""Nothing stays behind: rule 4, with the collector off."""

import contextlib
import gc
import resource
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blockpipe as bp

from ..models import SCHEDULES, WITH_UNCUT
from ..parameter_sets import each_value
from ..stage_devices import is_simulated, stages

STAGES, CHUNKS, ROWS, WIDTH = 3, 4, 8, 4


class Net(nn.Module):
    """Three stages, a skip connection over two, a tied weight; notes every intermediate tensor."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(STAGES))
        self.register_buffer("scale", torch.ones(width))
        self.seen: list[weakref.ref[Any]] = []
        self.fails: Callable[[int], None] = lambda stage: None

    def note(self, x: Tensor) -> Tensor:
        self.seen.append(weakref.ref(x))
        self.seen.append(weakref.ref(x.untyped_storage()))
        return x

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(0):
            first = x = self.note(torch.tanh(self.note(self.layers[0](x))))
        with bp.Block(1):
            x = self.note(torch.tanh(self.note(self.layers[1](x) * self.scale)))
            self.fails(1)
        with bp.Block(2):
            x = self.note(F.linear(self.note(x + first), self.layers[0].weight))
            x.add_(first)
            return self.note(self.layers[2](x))


class Failing(torch.autograd.Function):
    """Fails in backward, in the second micro-batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.microbatch = bp.current_microbatch()
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if ctx.microbatch == 1:
            raise ValueError("boom")
        return gradient


class FailsInBackward(Net):
    def note(self, x: Tensor) -> Tensor:
        return super().note(Failing.apply(x) if x.requires_grad else x)


@pytest.fixture(autouse=True, scope="module")
def _known_objects_apart() -> None:
    """The collector looks at what is new: what was imported since the tests were collected, too,
    would take it a second each time. It stays apart until the run ends (conftest.py)."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def make(schedule: str, net: Net | None = None, **options: Any) -> tuple[Net, bp.Pipeline]:
    torch.manual_seed(0)
    net = Net() if net is None else net
    width = net.layers[0].in_features
    pipe = bp.Pipeline(
        net,
        devices=stages(STAGES),
        chunks=CHUNKS,
        schedule=schedule,
        sample=((torch.zeros(ROWS, width),), {}),
        **options,
    )
    net.seen.clear()
    return net, pipe


def forward_backward(pipe: bp.Pipeline) -> None:
    width = pipe.module.layers[0].in_features
    x = torch.ones(ROWS, width)
    pipe.forward_backward(x, target=torch.zeros(ROWS, width), loss_fn=F.mse_loss)


def call(pipe: bp.Pipeline) -> None:
    width = pipe.module.layers[0].in_features
    x = torch.ones(ROWS, width, requires_grad=True)
    F.mse_loss(pipe(x), torch.zeros(ROWS, width, device=pipe.output_device)).backward()


def forward_only(pipe: bp.Pipeline) -> None:
    with torch.no_grad():
        pipe(torch.ones(ROWS, WIDTH))


def dropped(pipe: bp.Pipeline) -> None:
    pipe(torch.ones(ROWS, WIDTH))


WAYS = [forward_backward, call, forward_only, dropped]


def alive(net: Net) -> list[Any]:
    return [found for ref in net.seen if (found := ref()) is not None]


def alive_after_failure(net: Net) -> list[Any]:
    """What is alive once autograd's threads have let go: on an accelerator a thread of autograd's own
    reports a failure before it drops the node that failed, and nothing says when it has."""
    until = time.monotonic() + 10
    while is_simulated() and alive(net) and time.monotonic() < until:
        time.sleep(0.01)
    return alive(net)


def tensors_alive() -> int:
    return sum(issubclass(type(o), Tensor | torch.UntypedStorage) for o in gc.get_objects())


def without_failing(step: Callable[[], None], error: type[BaseException] = ValueError) -> None:
    """Run a step that fails; the exception and its traceback are gone when this returns."""
    try:
        step()
    except error:
        return
    raise AssertionError("the step did not fail")


@pytest.mark.parametrize("schedule", WITH_UNCUT)
@pytest.mark.parametrize("way", WAYS)
def test_no_activation_is_alive_after_a_step(schedule: str, way: Callable[..., None]) -> None:
    """After a step no intermediate tensor and no storage of one is alive, without a collection."""
    net, pipe = make(schedule)
    way(pipe)
    assert len(net.seen) == 2 * 7 * CHUNKS
    assert alive(net) == []


@each_value(
    schedule=SCHEDULES,
    way=[forward_backward, call],
)
def test_no_activation_is_alive_after_an_isolated_step(
    schedule: str, way: Callable[..., None]
) -> None:
    """The stage sanitizer keeps no tensor alive."""
    net, pipe = make(schedule, isolate=True)
    way(pipe)
    assert net.seen
    assert alive(net) == []


@each_value(schedule=WITH_UNCUT, way=WAYS)
def test_no_activation_is_alive_after_a_failed_forward(
    schedule: str, way: Callable[..., None]
) -> None:
    """After a failed forward, and with its exception gone, no intermediate tensor is alive."""
    net, pipe = make(schedule)

    def fails(stage: int) -> None:
        if bp.current_microbatch() == 1:
            raise ValueError("boom")

    net.fails = fails
    without_failing(lambda: way(pipe))
    assert net.seen
    assert alive(net) == []


# Not "uncut": torch itself keeps a part of an ordinary graph whose backward failed.
@each_value(
    schedule=SCHEDULES,
    way=[forward_backward, call],
)
def test_no_activation_is_alive_after_a_failed_backward(
    schedule: str, way: Callable[..., None]
) -> None:
    """After a failed backward, and with its exception gone, no intermediate tensor is alive."""
    net, pipe = make(schedule, FailsInBackward())
    without_failing(lambda: way(pipe))
    assert net.seen
    assert alive_after_failure(net) == []


def test_a_kept_output_without_graph_keeps_no_activation() -> None:
    """The outputs and the loss that forward_backward returns hold nothing of the step."""
    net, pipe = make("1f1b")
    x = torch.ones(ROWS, WIDTH)
    result = pipe.forward_backward(x, target=x, loss_fn=F.mse_loss, return_outputs=True)
    assert result.outputs.shape == x.shape
    assert result.outputs.grad_fn is None
    assert [t for t in alive(net) if isinstance(t, Tensor)] == []


def test_a_kept_output_keeps_no_activation_after_its_backward() -> None:
    """When the backward of pipe(x) has run, a loss that is still held keeps no activation alive."""
    net, pipe = make("1f1b")
    output = pipe(torch.ones(ROWS, WIDTH))
    loss = output.sum()
    loss.backward()
    assert output.grad_fn is not None
    assert alive(net) == []


def test_a_recording_keeps_no_tensor() -> None:
    """After the recording pass no tensor of it is alive, without a collection."""
    net = Net()
    bp.record(net, torch.zeros(ROWS, WIDTH))  # torch's own caches
    net.seen.clear()
    before = tensors_alive()
    recording = bp.record(net, torch.zeros(ROWS, WIDTH))
    assert recording.num_stages == STAGES
    assert alive(net) == []
    net.seen.clear()
    assert tensors_alive() <= before


def test_a_failed_recording_keeps_no_tensor() -> None:
    """After a recording that failed, and with its exception gone, no tensor of it is alive."""
    net = Net()
    pipe = bp.Pipeline(net, devices=stages(STAGES), chunks=CHUNKS)

    def fails(stage: int) -> None:
        raise ValueError("boom")

    net.fails = fails
    without_failing(lambda: dropped(pipe), bp.BlockpipeError)
    assert alive(net) == []


@pytest.mark.slow
@each_value(
    schedule=WITH_UNCUT,
    way=WAYS,
)
def test_a_hundred_steps_keep_no_more_than_one(schedule: str, way: Callable[..., None]) -> None:
    """The number of live tensors and objects is the same after 100 steps, without a collection."""
    net, pipe = make(schedule)
    for _ in range(3):
        way(pipe)
    net.seen.clear()
    tensors, objects = tensors_alive(), len(gc.get_objects())
    for _ in range(100):
        way(pipe)
        net.seen.clear()
    assert tensors_alive() <= tensors
    assert is_simulated() or len(gc.get_objects()) - objects < 200  # meta kernels make cycles


@pytest.mark.slow
@each_value(
    schedule=WITH_UNCUT,
    way=[forward_backward, call],
)
def test_a_hundred_failed_steps_keep_no_more_than_one(
    schedule: str, way: Callable[..., None]
) -> None:
    """The number of live tensors is the same after 100 failed steps, without a collection."""
    net, pipe = make(schedule)

    def fails(stage: int) -> None:
        if bp.current_microbatch() == 2:
            raise ValueError("boom")

    way(pipe)
    net.fails = fails
    for _ in range(3):
        without_failing(lambda: way(pipe))
    net.seen.clear()
    tensors, objects = tensors_alive(), len(gc.get_objects())
    for _ in range(100):
        without_failing(lambda: way(pipe))
        net.seen.clear()
    assert tensors_alive() <= tensors
    assert is_simulated() or len(gc.get_objects()) - objects < 300


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.parametrize("way", [forward_backward, call])
@pytest.mark.parametrize("fails", [False, True])
def test_resident_memory_does_not_grow_over_steps(way: Callable[..., None], fails: bool) -> None:
    """Steps leave resident memory where it was: what is kept adds up in every hundred of them, what
    the allocator takes for a new thread does not."""
    width = 512
    net, pipe = make("1f1b", FailsInBackward(width) if fails else Net(width))

    def one() -> None:
        with contextlib.suppress(ValueError):
            way(pipe)
        net.seen.clear()

    for _ in range(10):
        one()
    grown = []
    for _ in range(3):
        before = _resident()
        for _ in range(100):
            one()
        grown.append((_resident() - before) / 2**20)
    # The activations of one step are 0.1 MB and more: kept, they would be 11 MB and more.
    assert min(grown) < 7, f"{grown} MB more"


def test_a_dropped_pipeline_frees_its_model() -> None:
    """A pipeline that is dropped goes, and its model with it, without a collection."""
    net, pipe = make("1f1b")
    forward_backward(pipe)
    refs = [weakref.ref(p) for p in net.parameters()]
    gone = weakref.ref(net)
    del net, pipe
    gc.collect()  # an nn.Module may be in cycles of its own; nothing of ours may hold it
    assert gone() is None
    assert [r for r in refs if r() is not None] == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_idle_threads_hold_nothing(schedule: str) -> None:
    """The threads that wait between steps hold no part of the step before."""
    _, pipe = make(schedule)
    forward_backward(pipe)
    inputs = torch.ones(ROWS, WIDTH)
    gone = weakref.ref(inputs)
    pipe.forward_backward(inputs, target=inputs, loss_fn=F.mse_loss)
    del inputs
    assert gone() is None


class AsksValues(nn.Module):
    """Fake tensors cannot tell what it asks, so that it is recorded for real."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x).tanh()
        with bp.Block(stage=1):
            if h.abs().max() > 5:
                raise ValueError("too large")
            return self.b(h)


def test_a_model_that_is_recorded_for_real_is_freed() -> None:
    """The error of the fake tensors had the frames with their graph, and what autograd saves there led
    to that error: a cycle through the graph, which no collector sees."""
    net = AsksValues()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)
    refs = [weakref.ref(one) for one in (net, pipe, net.a.weight)]
    del net, pipe
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3
