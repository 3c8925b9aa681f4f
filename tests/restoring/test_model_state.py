"""A recording leaves no trace: not on objects of the user's, however deep, nor on parameters."""

import copy
import dataclasses
import logging
import random
from collections import OrderedDict, UserDict, deque

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import blockpipe as bp
from blockpipe.restoring import model_state as snapshot
from blockpipe.restoring.model_state import ModelState
from blockpipe.restoring.writes_undone import WritesUndone

from ..behaviour import restored_objects
from ..behaviour.restored_objects import refusing
from ..models import square
from ..parity import difference, plain_step
from ..stage_devices import assert_close, stages


class Samples(Dataset):
    def __init__(self, items) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class State:
    """A plain object: a moving average, a counter, containers in containers, generators."""

    __slots__ = ("__dict__", "_ema", "slot")

    def __init__(self):
        self.ema, self.count, self.slot = None, 0, None
        self.nested = {"lists": [[0], deque([1])], "sets": ({1},), "user": UserDict(a=0)}
        self.python = random.Random(0)
        self.seen = []
        numpy = pytest.importorskip("numpy")
        self.numpy, self.array = numpy.random.default_rng(0), numpy.zeros(2)
        self.objects = numpy.array([0, [0]], dtype=object)
        self.rows = numpy.array([(0, [0])], dtype=[("n", int), ("held", object)])
        self.tensor = torch.zeros(2)

    @property
    def ema(self):
        return self._ema

    @ema.setter
    def ema(self, value):
        self._ema = value

    def step(self, h):
        """What a forward does to it; what it gives depends on all of it."""
        m = h.detach().abs().mean()
        self.ema = m if self.ema is None else 0.9 * self.ema + 0.1 * m
        self.count += 1
        self.slot = m
        self.nested["lists"][0][0] += 1
        self.nested["lists"][1].append(self.count)
        self.nested["sets"][0].add(self.count)
        self.nested["user"]["a"] += 1
        self.seen.append(m)
        self.array += 1
        self.objects[0], self.rows["n"][0] = self.count, self.count
        for held in (self.objects[1], self.rows["held"][0]):
            held[0] += 1
        drawn = self.python.random() + self.numpy.random() + self.array.sum()
        counted = self.count + len(self.seen) + self.nested["lists"][0][0]
        counted += self.objects[0] + self.objects[1][0] + int(self.rows["n"][0])
        counted += self.rows["held"][0][0]
        return h / self.ema * (1 + 0.01 * drawn + 0.01 * counted)


class Net(nn.Module):
    def __init__(self, *, reads):
        super().__init__()
        self.a, self.k, self.b = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.state, self.reads = State(), reads

    def forward(self, x):
        with bp.Block(0):
            h = self.k(self.state.step(self.a(x)))
        with bp.Block(1):
            if self.reads and h.sum().item() > 1e9:
                return h
            return self.b(h)


@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize("reads", [False, True])
def test_state_of_plain_objects_is_put_back(reads):
    """Also where the recording is a real run: five steps train as the plain loop's."""
    net = Net(reads=reads)
    plain, x = copy.deepcopy(net), torch.randn(8, 6)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, schedule="sequential")
    pairs = [(m, torch.optim.SGD(m.parameters(), 0.1)) for m in (net, plain)]
    for _ in range(5):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            if model is net:
                loss = pipe.forward_backward(x, loss_fn=square).loss
            else:
                expected = plain_step(plain, (x,), {}, None, square, 2)
        assert difference(net, plain, loss, expected).same
        for _, optimizer in pairs:
            optimizer.step()
    assert net.state.count == plain.state.count == 10
    assert type(net.state.ema) is torch.Tensor


class InPlace(nn.Linear):
    """Plain tensors, one of them nobody's attribute, that are written in place."""

    count = torch.zeros(3)

    def __init__(self, *, reads):
        super().__init__(4, 4)
        self.reads, self.total, self.nested = reads, torch.zeros(()), [torch.zeros(2)]

    def forward(self, x):
        self.total += 1
        self.nested[0][0].mul_(2).add_(3)
        if not self.reads:
            InPlace.count += 1
        return super().forward(x if not self.reads or x.sum() < 1e9 else -x)


@pytest.mark.parametrize("reads", [False, True])
def test_plain_tensors_that_are_written_in_place_are_put_back(reads):
    """torch computes on real tensors in the midst of fake ones."""
    net = InPlace(reads=reads)
    pipe = bp.Pipeline(net, devices=stages(1), chunks=2)
    x = torch.ones(4, 4)
    bp.record(net, x)
    pipe.summary(x)
    pipe.memory(x)
    assert not net.total
    assert not net.nested[0].any()
    assert not net.count.any()


def test_what_hooks_hold_in_their_closures_is_put_back():
    """A list that is filled, and a name that is bound anew."""
    net, seen, count = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [], 0

    def hook(module, args, output):
        nonlocal count
        count += 1
        seen.append(output)

    net[0].register_forward_hook(hook)
    bp.record(net, torch.randn(2, 4))
    assert (seen, count) == ([], 0)


class Frozen(OrderedDict):
    """As diffusers' configurations are: nobody writes."""

    def refuse(self, *args, **kwargs):
        raise TypeError("frozen")

    update = clear = pop = setdefault = __setitem__ = __delitem__ = refuse

    def __init__(self, pairs):
        for key, value in pairs.items():
            OrderedDict.__setitem__(self, key, value)


@dataclasses.dataclass(frozen=True)
class Point:
    at: list


def test_what_refuses_is_put_back_all_the_same():
    """By the built-in classes' own methods, and only what has changed."""

    class Writes(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.config = Frozen({"a": 1})
            self.kept = [refusing(kind)([1]) for kind in (list, set, deque)]
            self.table = refusing(dict)(a=1)
            self.point = Point([])

        def forward(self, x):
            list.append(self.kept[0], 2)
            set.add(self.kept[1], 2)
            deque.append(self.kept[2], 2)
            dict.update(self.table, b=2)
            self.point.at.append(x)
            object.__setattr__(self.point, "more", x)
            return super().forward(x)

    net = nn.Sequential(Writes(), nn.Linear(4, 4))
    bp.record(net, torch.randn(2, 4))
    assert [list(kept) for kept in net[0].kept] == [[1]] * 3
    assert (dict(net[0].table), dict(net[0].config)) == ({"a": 1}, {"a": 1})
    assert vars(net[0].point) == {"at": []}


class Momentum(nn.Module):
    """A real recording, for a value is read; writes to a parameter, and has a backward of its own."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.b = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        with bp.Block(0):
            with torch.no_grad():
                self.k.weight.mul_(0.9).add_(self.q.weight, alpha=0.1)
                self.k.bias.data = self.k.bias.data * 0.5
            h = self.k(x)
            with torch.enable_grad():
                self.q(x.detach()).square().mean().backward()
        with bp.Block(1):
            if h.detach().sum().item() > 1e9:
                return h
            return self.b(h)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("look", ["record", "summary", "memory"])
def test_a_real_recording_does_not_train(look, gradients):
    """Parameters, their storage and their gradients are as before."""
    net, x = Momentum(), torch.randn(8, 6)
    if gradients:
        net(x).sum().backward()
    before = [
        (p.detach().clone(), p.grad, None if p.grad is None else p.grad.clone())
        for p in net.parameters()
    ]
    storages = [p.data_ptr() for p in net.parameters()]
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
    recording = bp.record(net, x) if look == "record" else getattr(pipe, look)(x) and pipe.recording
    assert recording is None or recording.why_real
    assert [p.data_ptr() for p in net.parameters()] == storages
    for p, (value, gradient, its_value) in zip(net.parameters(), before, strict=True):
        assert_close(p.detach(), value)
        assert p.grad is gradient
        if gradient is not None:
            assert_close(gradient, its_value)


def test_copies_are_made_of_what_is_written_only():
    """A forward that writes to no parameter needs no memory for them."""
    net = Momentum()
    with WritesUndone(net) as undone, torch.no_grad():
        net.b(torch.randn(2, 6))
        assert undone._copies == []
        net.k.weight.zero_()
        net.k.weight.zero_()
        assert len(undone._copies) == 1
    assert net.k.weight.abs().sum() > 0


def test_what_is_far_is_left_alone(monkeypatch):
    """A trainer may be in reach, and its data set with it: what is near comes first."""
    net = nn.Linear(2, 2)
    net.near, net.far = [0], [[[object()] for _ in range(100)]]
    monkeypatch.setattr(snapshot, "MOST_OBJECTS", 30)
    state = ModelState(net, values=False)
    net.near[0] = 1
    net.far[0][50][0] = None
    state.restore()
    assert net.near == [0]
    assert net.far[0][50][0] is None


@pytest.mark.parametrize("reads", [False, True])
def test_hooks_that_a_forward_adds_to_a_leaf_are_removed_and_others_stay(reads):
    """They doubled its gradient once more in each step."""
    leaf = torch.zeros(6, requires_grad=True)
    net = Net(reads=reads)
    net.leaf = leaf

    def add(module, args):
        for tensor in (leaf, module.a.weight):
            tensor.register_hook(lambda gradient: gradient * 2)
            tensor.register_post_accumulate_grad_hook(lambda tensor: None)

    leaf.register_hook(lambda gradient: gradient * 3)
    net.register_forward_pre_hook(add)
    bp.record(net, torch.randn(4, 6))
    leaf.sum().backward()
    assert leaf.grad.tolist() == [3] * 6
    assert not leaf._post_accumulate_grad_hooks
    assert not net.a.weight._backward_hooks


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: DataLoader(data)])
@pytest.mark.parametrize("kind", [list, tuple, deque])
def test_a_long_data_set_is_restored_without_a_look_at_its_samples(kind, wrap):
    """A first step with a loader of 100,000 samples in reach took seconds."""
    data = Samples(kind({"n": n} for n in range(2_000)))
    module = nn.Module()
    module.loader, items = wrap(data), list(data.items)
    state = ModelState(module, values=False)
    assert len(state.objects()) < 100
    with state:
        if kind is not tuple:
            data.items.append({})
        data.items = kind([])
    assert data.items == kind(items)


class _Spreads(nn.Module):
    """Decays a sparse matrix of its own in each forward."""

    def __init__(self, layout: str, write) -> None:
        super().__init__()
        self.a, self.b, self.write = nn.Linear(4, 4), nn.Linear(4, 4), write
        dense = torch.eye(4)
        self.adjacency = dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()

    def forward(self, x):
        with bp.Block(stage=0):
            self.write(self.adjacency)
            h = (self.adjacency @ self.a(x).T).T
        with bp.Block(stage=1):
            return self.b(h)


@pytest.mark.cpu("sparse tensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize(
    "write",
    [
        lambda matrix: matrix.mul_(0.9),
        lambda matrix: matrix.values().mul_(0.9),
        lambda matrix: matrix.copy_(matrix * 0.9),
    ],
)
def test_writes_to_a_sparse_tensor_are_undone(layout, write):
    """In its place: what is detached of it has indices and values of its own."""
    net = _Spreads(layout, write)
    x, matrix = torch.randn(4, 4), net.adjacency
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, schedule="sequential")
    pipe.summary(x)
    assert torch.equal(matrix.to_dense(), torch.eye(4))
    pipe.verify(x, loss_fn=lambda y: y.square().mean())
    assert torch.equal(matrix.to_dense(), torch.eye(4))
    pipe.forward_backward(x, loss_fn=lambda y: y.square().mean())
    assert torch.allclose(net.adjacency.to_dense(), 0.81 * torch.eye(4))
    assert net.adjacency is matrix


class ByName(nn.Module):
    """What a function finds by a name alone, or in all variables of another module."""

    def __init__(self, found) -> None:
        super().__init__()
        self.a, self.found, self.levels = nn.Linear(4, 4), found, []

    def forward(self, x):
        self.levels.append(logging.getLogger("blockpipe_by_name").level)
        logging.getLogger("blockpipe_by_name").setLevel(30)
        names = vars(restored_objects)
        names["FOUND"] += 1
        self.found.append(names["FOUND"])
        return self.a(x)


def test_what_a_function_finds_by_name_alone_is_as_before_a_recording(monkeypatch) -> None:
    """Attack 43: the first micro-batch saw what the recording had set."""
    monkeypatch.setattr(restored_objects, "FOUND", 0, raising=False)
    logger = logging.getLogger("blockpipe_by_name")
    logger.setLevel(10)
    net = ByName([])
    bp.record(net, torch.ones(2, 4))
    assert (logger.level, restored_objects.FOUND, net.levels, net.found) == (10, 0, [], [])
