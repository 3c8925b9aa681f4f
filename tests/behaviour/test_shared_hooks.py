"""Hooks of parameters on two stages that share plain values: stages run their backwards at once."""

import bisect
import functools
import heapq
import itertools
import operator
import random
import statistics
import struct
from collections import Counter, UserList, defaultdict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import stages

# torch 2.11 warns of a hook on a module whose inputs need no gradient.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing when gradients are computed"
)

Hook = Callable[[Tensor], Tensor | None]


class Net(nn.Module):
    """Two layers on two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x).tanh()
        with bp.Block(stage=1):
            return self.b(h)


class Clip:
    """Clip by the median of all norms so far."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def __call__(self, gradient: Tensor) -> Tensor:
        self.norms.append(gradient.norm().item())
        return gradient * min(1.0, statistics.median(self.norms))


class Meter:
    """Average the norms."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def clip(self, gradient: Tensor) -> Tensor:
        self.total, self.count = self.total + gradient.norm().item(), self.count + 1
        return gradient / (1 + self.mean)

    @property
    def mean(self) -> float:
        return self.total / self.count


def _partial() -> Hook:
    def clip(norms: deque[float], gradient: Tensor) -> Tensor:
        norms.append(gradient.norm().item())
        return gradient / (1 + max(norms))

    return functools.partial(clip, deque(maxlen=3))


def _namespace() -> Hook:
    names = SimpleNamespace(calls=0)

    def bump() -> int:
        names.calls += 1
        return int(names.calls)

    return lambda gradient: gradient / bump()


def _nonlocal() -> Hook:
    calls = 0

    def hook(gradient: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return gradient / calls

    return hook


def _counter() -> Hook:
    calls = Counter[str]()

    def hook(gradient: Tensor) -> Tensor:
        calls.update(["hook"])
        return gradient / calls.total()

    return hook


def _array() -> Hook:
    total = numpy.zeros(1)

    def hook(gradient: Tensor) -> Tensor:
        numpy.add(total, gradient.norm().item(), out=total)
        return gradient / (1 + total[0])

    return hook


def _random() -> Hook:
    numbers = random.Random(1)
    return lambda gradient: gradient * numbers.random()


def _count() -> Hook:
    numbers = itertools.count(1)
    return lambda gradient: gradient / next(numbers)


def _generator() -> Hook:
    def made() -> Iterator[int]:
        yield from range(1, 1000)

    numbers = made()
    return lambda gradient: gradient / next(numbers)


def _turns() -> Hook:
    numbers = itertools.count(1)

    def hook(gradient: Tensor) -> Tensor:
        for number, _ in zip(numbers, "a", strict=False):
            gradient = gradient / number
        return gradient

    return hook


def _filled(fill: Callable[[Any, float], object], kept: Any) -> Hook:
    def hook(gradient: Tensor) -> Tensor:
        fill(kept, gradient.norm().item())
        return gradient / (1 + kept[0])

    return hook


def _by_heapq() -> Hook:
    heap: list[float] = []

    def hook(gradient: Tensor) -> Tensor:
        heapq.heappush(heap, gradient.norm().item())
        return gradient / (1 + heap[0])

    return hook


def _by_bisect() -> Hook:
    return _filled(bisect.insort, [])


def _by_operator() -> Hook:
    kept = [1.0]

    def hook(gradient: Tensor) -> Tensor:
        operator.setitem(kept, 0, kept[0] + gradient.norm().item())
        return gradient / kept[0]

    return hook


def _by_ufunc() -> Hook:
    return _filled(lambda kept, norm: numpy.add.at(kept, [0], norm), numpy.zeros(1))


def _by_copyto() -> Hook:
    return _filled(lambda kept, norm: numpy.copyto(kept, kept / 2 + norm), numpy.zeros(1))


def _by_shuffle() -> Hook:
    return _filled(lambda kept, norm: random.Random(1).shuffle(kept), [1.0, 2.0, 3.0])


def _by_struct() -> Hook:
    memory = bytearray(8)

    def hook(gradient: Tensor) -> Tensor:
        before = struct.unpack_from("d", memory)[0]
        struct.pack_into("d", memory, 0, before + gradient.norm().item())
        return gradient / (1 + before)

    return hook


def _unbound() -> Hook:
    return _filled(list.append, [])


def _bound() -> Hook:
    norms: list[float] = []
    push = norms.append

    def hook(gradient: Tensor) -> Tensor:
        push(gradient.norm().item())
        return gradient / (1 + sum(norms))

    return hook


def _of_library() -> Hook:
    norms = UserList[float]()

    def hook(gradient: Tensor) -> Tensor:
        norms.append(gradient.norm().item())
        return gradient / (1 + sum(norms))

    return hook


SHARING: list[Callable[[], Hook]] = [
    *(Clip, lambda: Meter().clip, _partial, _namespace, _nonlocal, _counter, _array),
    *(_random, _count, _generator, _turns, _by_heapq, _by_bisect, _by_operator, _by_ufunc),
    *(_by_copyto, _by_shuffle, _by_struct, _unbound, _bound, _of_library),
]


def _on_parameters(net: nn.Module, hook: Hook) -> None:
    for parameter in net.parameters():
        parameter.register_hook(hook)


def _after_parameters(net: nn.Module, hook: Hook) -> None:
    def after(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = hook(parameter.grad)

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(after)


def _on_modules(net: Net, hook: Hook) -> None:
    for module in (net.a, net.b):
        module.register_full_backward_pre_hook(lambda module, got: (hook(got[0]),))


def _step(net: Net, **options: Any) -> None:
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, **options)
    pipe.forward_backward(X, target=X, loss_fn=mse_loss)


X = torch.randn(8, 4)


@pytest.mark.every
@pytest.mark.parametrize("register", [_on_parameters, _on_modules])
@pytest.mark.parametrize("make", SHARING)
def test_what_hooks_of_two_stages_set_and_read_is_refused(
    make: Callable[[], Hook], register: Callable[[Net, Hook], None]
) -> None:
    """Each stage's hooks read what the other's had set by then, without a word."""
    net = Net()
    register(net, make())
    where = r"in a backward on hops \[0, 1\].*test_shared_hooks\.py:\d+.*each stage"
    with pytest.raises(StateError, match=where):
        _step(net)


@pytest.mark.parametrize("make", SHARING)
def test_one_by_one_they_are_called_in_the_plain_loops_order(make: Callable[[], Hook]) -> None:
    net, plain = Net(), Net()
    plain.load_state_dict(net.state_dict())
    for model in (net, plain):
        _on_parameters(model, make())
    _step(net, schedule="sequential")
    plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert_same_gradients(net, plain)


def _logs() -> Hook:
    norms: list[float] = []
    largest: list[float] = []

    def hook(gradient: Tensor) -> None:
        norms.append(gradient.norm().item())
        heapq.heappush(largest, gradient.norm().item())

    return hook


def _reads() -> Hook:
    options = {"most": 0.1}
    scales = [1.0, 0.5]

    def hook(gradient: Tensor) -> Tensor:
        return gradient.clamp(-options["most"], options["most"]) * max(scales)

    return hook


def _only_counts() -> Hook:
    calls = 0

    def hook(gradient: Tensor) -> None:
        nonlocal calls
        calls += 1

    return hook


@pytest.mark.parametrize("make", [_logs, _reads, _only_counts])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_hooks_may_share_a_log_options_and_a_count(make: Callable[[], Hook], schedule: str) -> None:
    net, plain = Net(), Net()
    plain.load_state_dict(net.state_dict())
    for model in (net, plain):
        _on_parameters(model, make())
    _step(net, schedule=schedule)
    plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert_same_gradients(net, plain)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_each_hook_may_have_an_entry_of_its_own_in_a_defaultdict(schedule: str) -> None:
    """The first call makes it."""
    net, plain = Net(), Net()
    plain.load_state_dict(net.state_dict())
    found = list[defaultdict[str, list[float]]]()
    for model in (net, plain):
        norms: defaultdict[str, list[float]] = defaultdict(list)
        found.append(norms)
        for name, parameter in model.named_parameters():
            parameter.register_hook(
                lambda gradient, name=name, norms=norms: norms[name].append(gradient.norm().item())
            )
    _step(net, schedule=schedule)
    plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert_same_gradients(net, plain)
    assert found[0].keys() == found[1].keys()
    for name, norms in found[0].items():
        assert norms == pytest.approx(found[1][name])


@pytest.mark.parametrize("make", SHARING)
def test_hooks_of_one_stage_may_share_anything(make: Callable[[], Hook]) -> None:
    net, plain = Net(), Net()
    plain.load_state_dict(net.state_dict())
    for model in (net, plain):
        _on_parameters(model.a, make())
        _on_parameters(model.b, make())
    _step(net, schedule="1f1b")
    plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert_same_gradients(net, plain)


@pytest.mark.parametrize("register", [_on_parameters, _on_modules, _after_parameters])
def test_hooks_that_come_between_steps_are_looked_at_before_they_run(
    register: Callable[[Net, Hook], None],
) -> None:
    """As those that are there from the start."""
    net, clip, x = Net(), Clip(), torch.randn(8, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    pipe.forward_backward(x, target=x, loss_fn=mse_loss)
    register(net, clip)
    with pytest.raises(StateError, match=r"in a backward on hops \[0, 1\]"):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)
    assert clip.norms == []
