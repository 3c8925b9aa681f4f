"""Threads of the user's: calls of several at once, and waits in a circle."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import blockpipe as bp
from blockpipe._common.threads import standstill
from blockpipe._common.threads.model_turns import alone_with
from blockpipe.crossing.torch_patches import Eager
from blockpipe.errors import StateError, UsageError
from blockpipe.recording.watching import closed_modules

from ..stage_devices import assert_close, equal, stages


@pytest.fixture(name="pool")
def _pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "PATIENCE", 0.4)
    monkeypatch.setattr(standstill, "_SHARE", 0.3)


class Net(nn.Module):
    """Two stages; tells when its forward begins for the first time, and waits there."""

    def __init__(self, encoder: nn.Module | None = None) -> None:
        super().__init__()
        self.a, self.b = encoder or nn.Linear(4, 4), nn.Linear(4, 4)
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.begun_by: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.begun_by is None and not self.go_on.is_set():
            object.__setattr__(self, "begun_by", threading.get_ident())
            self.begun.set()
            assert self.go_on.wait(20)
        with bp.Block(0):
            x = self.a(x)
        with bp.Block(1):
            return self.b(x)


def quick() -> Net:
    net = Net()
    net.go_on.set()
    return net


def pipeline(net: nn.Module, **options: Any) -> bp.Pipeline:
    return bp.Pipeline(net, devices=stages(2), chunks=2, **options)


def in_recording(pool: ThreadPoolExecutor, net: Net, *calls: Callable[[], Any]) -> list[Any]:
    """A pipeline's first call, held in the middle of its recording until these calls are under way
    in another thread; the results of all."""
    x = torch.ones(4, 4)
    futures: list[Future[Any]] = [pool.submit(pipeline(net), x)]
    assert net.begun.wait(20)
    for call in calls:
        started = threading.Event()

        def start(call: Callable[[], Any] = call, started: threading.Event = started) -> Any:
            started.set()
            return call()

        futures.append(pool.submit(start))
        assert started.wait(20)
    net.go_on.set()
    return [future.result(20) for future in futures]


def assert_plain(net: nn.Module) -> None:
    for name, module in net.named_modules():
        assert "forward" not in module.__dict__, name
    assert not any(isinstance(t, FakeTensor) for t in [*net.parameters(), *net.buffers()])


def test_recordings_at_the_same_time_leave_the_compiler_as_it_was():
    """The last one to end sets back what the first one has set."""
    torch.compiler.reset()
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with Eager():
            entered.set()
            assert left.wait(20)

    thread = threading.Thread(target=other)
    with Eager():
        thread.start()
        assert entered.wait(20)
    left.set()
    thread.join()
    graphs = []

    @torch.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
    def double(x):
        return x * 2

    assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0))
    assert graphs


def test_first_calls_of_two_threads(pool: ThreadPoolExecutor) -> None:
    """Two threads may both make a pipeline's first call."""
    net = Net()
    expected = F.linear(F.linear(torch.ones(4, 4), *net.a.parameters()), *net.b.parameters())
    for found in in_recording(pool, net, lambda: pipeline(net)(torch.ones(4, 4))):
        assert type(found) is Tensor
        assert_close(found, expected)
    assert_plain(net)


class Reads(nn.Linear):
    """A layer whose forward waits, when it is told to, before it reads its weight."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def forward(self, x: Tensor) -> Tensor:
        self.begun.set()
        assert self.go_on.wait(20)
        return F.linear(x, self.weight, self.bias)


@pytest.mark.cpu("the plain model has to be in one place")
def test_a_plain_call_that_is_under_way_when_a_recording_begins(pool: ThreadPoolExecutor) -> None:
    """A call of another thread that is inside of a module ends before the recording begins."""
    layer = Reads()
    net, x = Net(layer), torch.ones(4, 4)
    net.go_on.set()
    expected = F.linear(x, *layer.parameters())
    layer.go_on.clear()
    plain = pool.submit(layer, x)
    assert layer.begun.wait(20)
    layer.begun.clear()
    first = pool.submit(pipeline(net), x)
    assert not layer.begun.wait(0.3)  # no forward of the recording has come here
    layer.go_on.set()
    assert equal(plain.result(20), expected)
    assert type(plain.result(20)) is Tensor
    assert_close(first.result(20), F.linear(expected, *net.b.parameters()))
    assert_plain(net)


@pytest.mark.cpu("the plain model has to be in one place")
def test_a_plain_call_that_never_ends_holds_no_recording_up(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of another thread that waits, maybe for this one, is not waited for."""
    monkeypatch.setattr(closed_modules, "_STILL", 0.2)
    net, x = quick(), torch.ones(4, 4)
    net.c, waiting = nn.Identity(), threading.Event()  # a part that no stage calls
    net.c.register_forward_pre_hook(lambda *_: waiting.set() or (net.begun.wait(20) and None))
    plain = pool.submit(net.c, x)
    assert waiting.wait(20)
    assert type(pipeline(net)(x)) is Tensor
    net.begun.set()
    assert plain.result(20) is x


@pytest.mark.cpu("the plain model has to be in one place")
def test_hooks_of_a_plain_call_wait_for_a_recording(pool: ThreadPoolExecutor) -> None:
    """A hook that another thread's call runs before the forward reads no fake parameter."""
    net, seen, call = Net(), [], nn.Module.__call__
    net.b.register_forward_pre_hook(
        lambda module, _: seen.append((threading.current_thread(), module.weight))
    )

    def plain() -> threading.Thread:
        net.b(torch.ones(4, 4))
        return threading.current_thread()

    _, thread = in_recording(pool, net, plain)
    assert not any(isinstance(weight, FakeTensor) for by, weight in seen if by is thread)
    assert nn.Module.__call__ is call


@pytest.mark.cpu("the plain model has to be in one place")
def test_a_plain_call_of_a_module_compiled_in_place_waits_for_a_recording(
    pool: ThreadPoolExecutor,
) -> None:
    """It runs what was compiled, which is off while the forward is recorded."""
    net, x, ran = Net(), torch.ones(4, 4), list[int]()
    compiled = nn.Module._call_impl

    def call(x: Tensor) -> Any:
        ran.append(threading.get_ident())
        return compiled(net.b, x)

    net.b._compiled_call_impl = call
    with closed_modules.closed_to_others(net):
        plain = pool.submit(lambda: (net.b(x), threading.get_ident()))
        with pytest.raises(TimeoutError):
            plain.result(0.3)
    found, by = plain.result(20)
    assert_close(found, F.linear(x, *net.b.parameters()))
    assert ran == [by]
    ran.clear()
    _, (found, by) = in_recording(pool, net, lambda: (net.b(x), threading.get_ident()))
    assert_close(found, F.linear(x, *net.b.parameters()))
    assert by in ran
    assert vars(net.b)["_compiled_call_impl"] is call


@pytest.mark.cpu("the plain model has to be in one place")
def test_a_call_of_a_forward_itself_that_waits_for_a_recording(pool: ThreadPoolExecutor) -> None:
    """What Blockpipe holds for a thread that waits is not taken for what the forward has left."""
    net, x = Net(), torch.ones(4, 4)
    expected = F.linear(x, *net.a.parameters())
    _, found = in_recording(pool, net, lambda: net.a.forward(x))
    assert equal(found, expected)
    assert_plain(net)


@pytest.mark.cpu("the plain model has to be in one place")
def test_plain_call_during_a_recording(pool: ThreadPoolExecutor) -> None:
    """The user's own call of a module in another thread has the real parameters."""
    net = Net()
    x = torch.ones(4, 4)
    expected = F.linear(x, *net.a.parameters())
    _, whole, part = in_recording(pool, net, lambda: net(x), lambda: net.a(x))
    assert type(whole) is Tensor
    assert type(part) is Tensor
    assert equal(part, expected)
    assert_plain(net)


@pytest.mark.cpu("the plain model has to be in one place")
def test_pipelines_that_share_a_module(pool: ThreadPoolExecutor) -> None:
    """Steps of two pipelines over one encoder take turns: each leaves the module as it was."""
    one, other = quick(), quick()
    other.a = one.a
    x = torch.ones(4, 4)
    pipes = [pipeline(one), pipeline(other)]

    def steps(pipe: bp.Pipeline) -> None:
        for _ in range(4):
            pipe.forward_backward(x, loss_fn=torch.sum)

    for future in [pool.submit(steps, pipe) for pipe in pipes]:
        future.result(20)
    assert_plain(one)
    assert_plain(other)
    for net in (one, other):
        weight = net.b.weight
        found, weight.grad = weight.grad, None
        (net(x).sum() / 2 * 4).backward()  # the mean of two micro-batches, four steps
        assert_close(found, weight.grad)


@pytest.mark.usefixtures("_impatient")
def test_a_loss_that_waits_for_a_cold_teacher(pool: ThreadPoolExecutor) -> None:
    """Both draw random numbers in their first step: one waits for the other, which is an error."""
    student, teacher = pipeline(quick()), pipeline(quick())
    x = torch.ones(4, 4)

    def loss_fn(output: Tensor) -> Tensor:
        return F.mse_loss(output, pool.submit(torch.no_grad()(teacher), x[:2]).result(20))

    with pytest.raises(UsageError, match="take turns.*call it before the step"):
        student.forward_backward(x, loss_fn=loss_fn)
    torch.no_grad()(teacher)(x[:2])
    assert student.forward_backward(x, loss_fn=loss_fn).loss.isfinite()


@pytest.mark.usefixtures("_impatient")
def test_a_loss_that_waits_for_its_own_model(pool: ThreadPoolExecutor) -> None:
    """A call of the same model by another thread waits for the step, and the step for it."""
    net = quick()
    pipe = pipeline(net, schedule="sequential")
    x = torch.ones(4, 4)

    def loss_fn(output: Tensor) -> Tensor:
        return output.sum() + pool.submit(torch.no_grad()(pipe), x).result(20).sum()

    with pytest.raises(UsageError, match="share modules take turns.*call it before the step"):
        pipe.forward_backward(x, loss_fn=loss_fn)
    assert pipe.forward_backward(x, loss_fn=torch.sum).loss.isfinite()
    assert_plain(net)


class Locked(nn.Module):
    """A lock of the user's around a forward that comes back to stage 0."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(512, 512) for _ in range(3))
        self.lock: Any = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            with bp.Block(0):
                x = self.a(x)
            with bp.Block(1):
                x = self.b(x)
            with bp.Block(0):
                return self.c(x)


@pytest.mark.usefixtures("_impatient")
def test_a_lock_around_a_forward() -> None:
    """A micro-batch that waits for what another holds while that waits for its turn: an error."""
    net = Locked()
    pipe = pipeline(net, sample=((torch.ones(4, 512),), {}))
    x = torch.ones(4, 512)
    message = r"micro-batch 1 stands at .*test_threads\.py.*\(micro-batch 0 for hop 2\)"
    with pytest.raises(StateError, match=message):
        pipe.forward_backward(x, loss_fn=torch.sum)
    pipe.schedule = "sequential"
    assert pipe.forward_backward(x, loss_fn=torch.sum).loss.isfinite()
    assert_plain(net)


def test_those_who_wait_come_in_order(pool: ThreadPoolExecutor) -> None:
    """A thread that calls again at once does not come before one that waits."""
    net = quick()
    order: list[str] = []
    waits = threading.Event()

    def other() -> None:
        waits.set()
        with alone_with(net.a):  # a part of it is enough
            order.append("other")

    with alone_with(net):
        future = pool.submit(other)
        assert waits.wait(20)
        while len(_entered()) < 2:
            pass
        with alone_with(net):  # its turn already
            order.append("again")
    with alone_with(net):
        order.append("later")
    future.result(20)
    assert order == ["again", "other", "later"]


def _entered() -> list[Any]:
    from blockpipe._common.threads import model_turns as alone

    return alone._entered


@pytest.mark.cpu("no compiler makes code for it")
def test_recordings_of_two_models_when_two_threads_begin_them_take_turns(
    pool: ThreadPoolExecutor,
) -> None:
    """Torch keeps for all threads whether functions are compiled: it was off for good."""
    has_begun = threading.Event()

    class Waits(nn.Module):
        def __init__(self, until: threading.Event | None) -> None:
            super().__init__()
            self.until = until

        def forward(self, x: Tensor) -> Tensor:
            if self.until is None:
                has_begun.set()
                time.sleep(0.3)  # so that the other one ends first, if it does not wait
            else:
                self.until.wait(0.1)
            return x + 1

    first = pool.submit(bp.record, Waits(has_begun), torch.ones(2))
    second = pool.submit(bp.record, Waits(None), torch.ones(2))
    first.result(20)
    second.result(20)
    graphs = []
    torch.compiler.reset()

    @torch.compile(backend=lambda graph, _: (graphs.append(graph), graph.forward)[1])
    def double(x: Tensor) -> Tensor:
        return x * 2

    double(torch.ones(2))
    assert len(graphs) == 1


LOCK = threading.RLock()


class LocksOnce(nn.Module):
    """Takes a lock on its first stage that the caller may have: a reentrant one."""

    def __init__(self, lock: Any, attribute: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.lock = lock if attribute else None

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(0):
            with LOCK if self.lock is None else self.lock:
                x = self.a(x)
        with bp.Block(1):
            return self.b(x)


@pytest.mark.cpu("the thread that waits goes on when the step has failed and its memory is free")
@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize(
    ("lock", "attribute"), [(LOCK, False), (LOCK, True), (threading.Condition(), True)]
)
def test_a_lock_around_the_step_that_the_forward_takes_is_an_error(
    lock: Any, attribute: bool
) -> None:
    """In one thread it is free for its holder; a stage's thread waited for ever."""
    net = LocksOnce(lock, attribute)
    pipe, x = pipeline(net), torch.randn(4, 4)
    pipe.forward_backward(x, loss_fn=torch.sum)
    with lock, pytest.raises(StateError, match=r"threads\.py:\d+, .* holds a reentrant lock"):
        pipe.forward_backward(x, loss_fn=torch.sum)
    pipe.forward_backward(x, loss_fn=torch.sum)
    with lock:
        pipe.schedule = "sequential"
        pipe.forward_backward(x, loss_fn=torch.sum)
