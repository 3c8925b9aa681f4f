"""Functions of torch's, and methods of a library's classes, in whose place the user's are."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import blockpipe as bp
from blockpipe._torch import patched_functions
from blockpipe.errors import StateError

from ..alike import DEVICE
from ..models import square
from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages


class Net(nn.Module):
    """Two layers with a function of torch's between them, in the forward's own code."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.call = nn.Linear(4, 4), nn.Linear(4, 4), call

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            x = self.call(self.a(x))
        with bp.Block(stage=1):
            return self.b(x)


CALLS: dict[str, tuple[Any, str, Callable[[Tensor], Tensor]]] = {
    "F.relu": (F, "relu", lambda h: F.relu(h)),
    "F.softmax": (F, "softmax", lambda h: F.softmax(h, -1)),
    "F.layer_norm": (F, "layer_norm", lambda h: F.layer_norm(h, (4,))),
    "F.max_pool1d": (F, "max_pool1d", lambda h: F.max_pool1d(h[None], 3, 1, 1)[0]),
    "F.interpolate": (F, "interpolate", lambda h: F.interpolate(h[None], size=4)[0]),
    "F.linear": (F, "linear", lambda h: F.linear(h, torch.eye(4, device=h.device))),
    "Tensor.softmax": (Tensor, "softmax", lambda h: h.softmax(-1)),
    "Tensor.norm": (Tensor, "norm", lambda h: h / h.norm()),
    "Tensor.__rsub__": (Tensor, "__rsub__", lambda h: 2 - h),
    "Tensor.clamp_min": (Tensor, "clamp_min", lambda h: h.clamp_min(0)),
    "torch.functional.einsum": (
        torch.functional,
        "einsum",
        lambda h: torch.functional.einsum("ab,cb->ac", h, h).mean(1, keepdim=True) * h,
    ),
    "torch.matmul": (torch, "matmul", lambda h: torch.matmul(h, torch.eye(4, device=h.device))),
}


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("what", CALLS)
def test_a_function_in_the_place_of_torchs_is_applied_once(
    what: str, wraps: bool, monkeypatch: pytest.MonkeyPatch
):
    """Attack 21: torch hands a function mode what it finds by the name, which had called torch's
    own already. The count shows that a recording leaves none behind."""
    owner, name, call = CALLS[what]
    original, count = getattr(owner, name), Counter[str]()

    def patched(*args: Any, **kwargs: Any) -> Any:
        count["calls"] += 1
        return original(*args, **kwargs) * 3

    if wraps:
        patched = functools.wraps(original)(patched)
    monkeypatch.setattr(owner, name, patched)
    net, plain, x = Net(call), Net(call).to(DEVICE), torch.randn(8, 4)
    plain.load_state_dict(net.state_dict())
    expected, batch = [], x.to(DEVICE)
    for _ in range(2):
        expected.append(plain_step(plain, (batch,), {}, None, square, 4))
    of_plain = count.pop("calls")
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    for loss in expected:
        assert_close(pipe.forward_backward(x, loss_fn=square).loss, loss)
    assert count["calls"] == of_plain
    assert_same_gradients(net, plain)


class Sees(TorchFunctionMode):
    """Applies what it is given, and keeps what was another function than that."""

    def __init__(self) -> None:
        super().__init__()
        self.others = list[tuple[object, object]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = patched_functions.torchs_own(func)
        if own is not func:
            self.others.append((func, own))
        return own(*args, **(kwargs or {}))


def of_all_kinds(x: Tensor) -> Iterator[object]:
    yield from (F.relu(x), F.max_pool2d(x, 2), F.max_pool2d(x, 2, return_indices=True))
    yield from (F.adaptive_avg_pool2d(x, 1), F.adaptive_max_pool2d(x, 1), F.gumbel_softmax(x))
    yield from (F.fractional_max_pool2d(x, 2, output_size=2), F.cross_entropy(x, x), F.gelu(x))
    yield from (x.norm(), 2 - x, 2**x, x**2, 2 // x, 2 % x, 2 / x, x.split(2), x.unique(), x.T)
    yield from (len(x), 1 in x, [*reversed(x)], x.requires_grad, x.unflatten(0, (1, 2)), repr(x))
    yield from (torch.einsum("abcd->a", x), torch.norm(x), torch.unique(x), torch.cdist(x, x))
    yield from (torch.block_diag(x[0, 0]), torch.atleast_3d(x), torch.broadcast_tensors(x, x))
    yield (torch.nn.init.kaiming_normal_(x), F.scaled_dot_product_attention(x, x, x))


@pytest.mark.filterwarnings("ignore:The use of")
def test_torchs_own_functions_are_taken_as_they_are():
    with Sees() as sees:
        assert len([*of_all_kinds(torch.randn(2, 3, 4, 4))]) > 30
    assert sees.others == []


SCALE, ENTRY = 1.0, {"scale": 1.0}


def by_global(h: Tensor) -> Tensor:
    global SCALE
    SCALE *= 0.99
    return h.tanh() * SCALE


def by_entry(h: Tensor) -> Tensor:
    ENTRY["scale"] *= 0.99
    return h.tanh() * ENTRY["scale"]


def with_closure() -> Callable[[Tensor], Tensor]:
    scale = 1.0

    def by_closure(h: Tensor) -> Tensor:
        nonlocal scale
        scale *= 0.99
        return h.tanh() * scale

    return by_closure


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", ["global", "entry", "closure"])
def test_state_of_a_method_in_the_place_of_a_librarys(
    kind: str, count: int, monkeypatch: pytest.MonkeyPatch
):
    """Attack 21: nobody had looked at it. On one stage, a recording puts it back; on two, it is
    refused."""

    def put() -> None:
        method = with_closure() if kind == "closure" else globals()[f"by_{kind}"]
        monkeypatch.setattr(nn.Tanh, "forward", lambda self, h: method(h))
        monkeypatch.setitem(globals(), "SCALE", 1.0)
        monkeypatch.setitem(ENTRY, "scale", 1.0)

    layers = (nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh() if count == 2 else nn.ReLU())
    net = bp.begin_blocks(nn.Sequential(*layers), {"2": 1})
    plain, x = nn.Sequential(*layers).to(DEVICE), torch.randn(8, 4)
    put()
    expected = [plain_step(plain, (x.to(DEVICE),), {}, None, square, 4) for _ in range(2)]
    plain.zero_grad()
    put()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    if count == 2:
        with pytest.raises(StateError, match=r"on hops \[0, 1\]"):
            pipe.forward_backward(x, loss_fn=square)
    else:
        for loss in expected:
            assert_close(pipe.forward_backward(x, loss_fn=square).loss, loss)
