"""Conjugated, nested, quantized and sparse tensors that cross without a gradient or are written to,
and tensors of transforms and of forward-mode AD, beside the plain loop."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

import blockpipe as bp
from blockpipe.errors import CrossingError

from ..alike import DEVICE, check_alike
from ..models import Scripted, square
from ..parameter_sets import every_pair
from ..stage_devices import assert_close, equal, stages

B = bp.Block
ENGINES: list[dict[str, Any]] = [
    {"schedule": "1f1b"},
    {"schedule": "gpipe", "isolate": True},
    {"schedule": "1f1b", "checkpoint": "always"},
    {"schedule": "gpipe", "checkpoint": "always", "isolate": True},
    {"schedule": "uncut"},
]
DENSE_ONLY = pytest.mark.cpu("the simulated accelerator has dense, real tensors only")
WARNINGS = pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support|The PyTorch API of nested tensors|.*[qQ]uantiz"
)

Make = Callable[[Tensor], Tensor]


def _complex(h: Tensor) -> Tensor:
    return torch.complex(h, h.sin())


def _conjugate(h: Tensor) -> Tensor:
    return _complex(h).conj()


def _negative(h: Tensor) -> Tensor:
    found = _complex(h).conj().imag
    assert found.is_neg()
    return found


def _parts(h: Tensor) -> Tensor:
    """It asks, as code does that calls a library with a flag of its own."""
    if not h.is_complex():
        return h
    assert h.is_conj()
    return torch.view_as_real(h.conj()).sum(-1) + 2 * h.imag


class Crosses(nn.Module):
    """Makes a tensor on the first stage, reads it on the second and on the third."""

    def __init__(self, make: Make, read: Make, write: Make | None, *, detached: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.make, self.read, self.write, self.detached = make, read, write, detached

    def forward(self, x: Tensor) -> Tensor:
        with B(0):
            h = self.a(x)
            made = self.make(h.detach() if self.detached else h)
        with B(1):
            if self.write is not None:
                self.write(made)
            y = self.b(h) + self.read(made)
        with B(0):
            y = y + self.read(made)
        with B(2):
            return self.c(y) * self.read(made)


def _scale_real(h: Tensor) -> Tensor:
    h.real *= 2
    return h


def _scale(h: Tensor) -> Tensor:
    return h.mul_(2)


def _requantize(h: Tensor) -> Tensor:
    return h.copy_(h.dequantize() * 2)


def _nested(layout: torch.layout) -> Make:
    return lambda h: torch.nested.as_nested_tensor([h[:1], h[1:]], layout=layout)


def _padded_sum(h: Tensor) -> Tensor:
    return h.to_padded_tensor(0.0).sum()


def _quantized(h: Tensor) -> Tensor:
    return torch.quantize_per_tensor(h, 0.1, 0, torch.qint8)


def _by_channel(h: Tensor) -> Tensor:
    return torch.quantize_per_channel(
        h, torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int64), 1, torch.qint8
    )


CONJUGATED: dict[str, tuple[Make, Make, Make | None]] = {
    "conjugate": (_conjugate, _parts, None),
    "conjugate, real part written": (_conjugate, _parts, _scale_real),
    "conjugate, written": (_conjugate, _parts, _scale),
    "negative": (_negative, _parts, None),
    "negative, written": (_negative, _parts, _scale),
}
WITHOUT_GRADIENT: dict[str, tuple[Make, Make, Make | None]] = {
    "nested": (_nested(torch.strided), _padded_sum, None),
    "nested, written": (_nested(torch.strided), _padded_sum, _scale),
    "jagged": (_nested(torch.jagged), _padded_sum, None),
    "jagged, written": (_nested(torch.jagged), _padded_sum, _scale),
    "quantized": (_quantized, Tensor.dequantize, None),
    "quantized by channel": (_by_channel, Tensor.dequantize, None),
    "quantized, written": (_quantized, Tensor.dequantize, _requantize),
    "coo": (Tensor.to_sparse, Tensor.to_dense, None),
    "coo, written": (Tensor.to_sparse, Tensor.to_dense, _scale),
    "csr": (Tensor.to_sparse_csr, Tensor.to_dense, None),
    "csr, written": (Tensor.to_sparse_csr, Tensor.to_dense, _scale),
}
EVERY = CONJUGATED | WITHOUT_GRADIENT


@DENSE_ONLY
@every_pair(detached=[False, True], engine=ENGINES, name=list(CONJUGATED))
def test_a_conjugated_tensor_that_crosses_trains_as_plain(
    name: str, engine: dict[str, Any], detached: bool
) -> None:
    """Autograd refused a write to an entry of a graph that is conjugated where it is read."""
    check_alike(Crosses(*CONJUGATED[name], detached=detached), torch.randn(6, 4), **engine)


@DENSE_ONLY
@WARNINGS
@every_pair(name=list(WITHOUT_GRADIENT), engine=ENGINES)
def test_a_tensor_without_gradient_that_is_not_dense_crosses(
    name: str, engine: dict[str, Any]
) -> None:
    """A nested tensor of the strided layout has no shape to ask for, a quantized one no strides to
    give to a copy."""
    check_alike(Crosses(*WITHOUT_GRADIENT[name], detached=True), torch.randn(6, 4), **engine)


@DENSE_ONLY
@WARNINGS
@every_pair(
    name=[name for name in EVERY if "real part" not in name],
    mode=[torch.no_grad, torch.inference_mode],
    isolate=[False, True],
)
def test_outputs_without_gradients_are_those_of_the_plain_loop(
    name: str, mode: Any, isolate: bool
) -> None:
    """In inference mode a conjugated tensor arrived as its conjugate, without an error, and a
    sparse one lost what a later stage had written to it."""
    net, x = Crosses(*EVERY[name], detached=True), torch.randn(6, 4)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(3), chunks=3, isolate=isolate)
    with mode():
        expected = torch.cat([plain(part.clone()) for part in x.split(2)])
        found = pipe(x.clone())
    assert torch.equal(found, expected)


@pytest.mark.parametrize("engine", ENGINES[:4], ids=str)
def test_a_jagged_tensor_with_a_gradient_crosses(engine: dict[str, Any]) -> None:
    """Isolated, its backward was refused for the offsets, which copies on one device share."""

    def forward(s: Any, x: Tensor) -> Tensor:
        with B(0):
            t = _nested(torch.jagged)(s.a(x))
        with B(1):
            return s.b(x) + (t * 2).to_padded_tensor(0.0).sum()

    engine = engine if DEVICE.type == "cpu" else {**engine, "isolate": False}
    check_alike(Scripted(forward), torch.randn(6, 4), **engine)


class Tangents(nn.Module):
    """Computes a derivative by forward-mode AD."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor) -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(h, torch.ones_like(h))
            value, tangent = forward_ad.unpack_dual(self.layer(dual).tanh())
            return value + tangent


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own use of it
@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("in_a_module", [False, True])
def test_tangents_on_one_stage_are_those_of_the_plain_loop(
    engine: dict[str, Any], in_a_module: bool
) -> None:
    """Isolated, the look for a tangent was refused as a read of another stage's tensor; and a
    module that was recomputed behind the level had no tangents any more."""

    class Net(Scripted):
        def __init__(self) -> None:
            super().__init__(None)
            self.d = Tangents(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            with B(0):
                h = self.a(x)
            with B(1):
                h = self.d(h) if in_a_module else Tangents.forward(self.d, h)
            with B(2):
                return self.c(h)

    check_alike(Net(), torch.randn(6, 4), **engine)


def _mapped(s: Any, x: Tensor) -> Tensor:
    with B(0):
        h = s.a(x)
        scale = h.detach().sum()
    with B(1):
        given = x if s.how == "as it is" else x.clone()
        g = torch.vmap(lambda row: row * scale)(given)
    with B(2):
        return s.c(h) + s.b(g)


@pytest.mark.parametrize("no_grad", [False, True])
def test_what_a_transform_has_made_crosses(no_grad: bool) -> None:
    """Nobody sees the result of a transform: on an accelerator it was copied before it was there."""
    net, x = Scripted(_mapped), torch.randn(6, 4)
    net.how = "cloned"
    if not no_grad:
        check_alike(net, x)
        return
    plain = copy.deepcopy(net).to(DEVICE)
    with torch.no_grad():
        expected = torch.cat([plain(part.clone()) for part in x.to(DEVICE).split(2)])
        found = bp.Pipeline(net, devices=stages(3), chunks=3)(x)
    assert equal(found, expected)


def test_a_transform_over_a_tensor_of_another_device_is_refused() -> None:
    """It was torch's error about two devices, or the sanitizer's about code that is sealed."""
    net = Scripted(_mapped)
    net.how = "as it is"
    pipe = bp.Pipeline(net, devices=stages(3), chunks=3, isolate=DEVICE.type == "cpu")
    with pytest.raises(CrossingError, match=r"vmap on stage 1 is given .*py:\d+\).*x?\.clone\(\)"):
        pipe(torch.randn(6, 4))


def test_a_tensor_that_a_forward_saves_and_loads_is_as_it_was() -> None:
    """It was torch's error about globals that it does not trust."""

    def forward(s: Any, x: Tensor) -> Tensor:
        with B(0):
            h = s.a(x)
            file = io.BytesIO()
            torch.save(h.detach(), file)
            file.seek(0)
            kept = torch.load(file)
        with B(1):
            return s.b(h) + kept.to(h.device)

    check_alike(Scripted(forward), torch.randn(6, 4))


class Quantized(Tensor):
    """A weight of integers and a scale that wraps two tensors, as torchao's do."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> "Quantized":
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)

    def __init__(self, values: Tensor, scale: Tensor) -> None:
        self.values, self.scale = values, scale

    def __tensor_flatten__(self) -> Any:
        return ["values", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> "Quantized":
        return Quantized(inner["values"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return Quantized(func(args[0].values), func(args[0].scale))
        given = tree_map_only(cls, lambda t: t.values.float() * t.scale, (args, kwargs or {}))
        return func(*given[0], **given[1])


@pytest.mark.cpu("the subclass of the test has no way to another device")
def test_a_weight_that_wraps_others_has_no_memory_of_its_own():
    """Attack 24: its storage was asked for an address."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    weight = Quantized(torch.randint(-5, 5, (8, 8), dtype=torch.int8), torch.tensor(0.1))
    net[1].weight = nn.Parameter(weight, requires_grad=False)
    x = torch.randn(8, 8)
    parts = [square(net(part)) / 4 for part in x.chunk(4)]
    sum(parts).backward()
    expected = net[0].weight.grad
    net.zero_grad()
    pipe = bp.Pipeline(bp.begin_blocks(net, {"1": 1}), devices=["cpu"] * 2, chunks=4)
    assert_close(pipe.forward_backward(x, loss_fn=square).loss, sum(parts))
    assert_close(net[0].weight.grad, expected)
