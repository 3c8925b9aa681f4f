"""Transforms inside of a forward: torch.func, and forward-mode AD."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import blockpipe as bp
from blockpipe.errors import CrossingError, StateError

from ..alike import check_alike
from ..models import Scripted, square
from ..parity import difference, plain_step
from ..stage_devices import stages

B = bp.Block
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch's first jvp itself


class _Transforms(nn.Module):
    """Computes by torch.func in a module of its own."""

    def __init__(self, transformed) -> None:
        super().__init__()
        self.inner, self.many, self.transformed = nn.Linear(4, 4), nn.Linear(4, 4), transformed
        self.log = {}

    def forward(self, h: Tensor) -> Tensor:
        result = self.transformed(self, h)
        self.log["norm"] = result.norm()  # with its graph, as in logs that are only printed
        return result


TRANSFORMS = {
    "grad": lambda s, h: torch.func.grad(lambda z: s.inner(z).sin().sum())(h),
    "vmap": lambda s, h: torch.vmap(lambda z: s.inner(z).sin())(h),
    "vmap of weights": lambda s, h: torch.vmap(lambda w: (h @ w.diag()).tanh())(s.many.weight)[0],
    "jacobian": lambda s, h: torch.vmap(torch.func.jacrev(lambda z: s.inner(z).sin()))(h).sum(-1),
    "jvp": lambda s, h: torch.func.jvp(s.inner, (h,), (h.detach().cos(),))[1] * h,
}


@pytest.mark.parametrize("options", [{}, {"isolate": True}, {"checkpoint": "always"}])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_torch_func_transform_in_a_module_on_one_stage(transform, options):
    """Its layers were called with tensors that have no storage, its closure's tensors were copied
    inside of the transform, and its results came from nowhere: each of that failed."""

    def forward(s, x):
        with B(0):
            h = s.a(x)
        with B(1):
            return s.b(h) + s.c(h)

    net = Scripted(forward)
    net.b = _Transforms(TRANSFORMS[transform])
    plain = copy.deepcopy(net)
    x = torch.randn(6, 4)
    expected = plain_step(plain, (x,), {}, None, square, 3)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=3, **options)
    loss = pipe.forward_backward(x, loss_fn=square).loss
    assert difference(net, plain, loss, expected).same


def test_tangents_do_not_cross():
    """They stayed behind, and the loss was another one without a word."""

    def forward(s, x):
        with forward_ad.dual_level():
            with B(0):
                h = s.a(forward_ad.make_dual(x, torch.ones_like(x))).tanh()
            with B(1):
                y, tangent = forward_ad.unpack_dual(s.b(h).sin())
                return y if tangent is None else y + tangent

    x = torch.randn(6, 4)
    for schedule in ("1f1b", "sequential"):
        pipe = bp.Pipeline(Scripted(forward), devices=stages(2), chunks=3, schedule=schedule)
        with pytest.raises(
            CrossingError, match=r"has a tangent .*test_transforms\.py:\d+.*'uncut'"
        ):
            pipe.forward_backward(x, loss_fn=square)
    check_alike(Scripted(forward), x, schedule="uncut")


def test_levels_of_forward_mode_on_two_stages_take_turns():
    """There is one level for all threads: two micro-batches in it failed with torch's own error."""

    def slope(module, h):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(h, torch.ones_like(h))
            y, tangent = forward_ad.unpack_dual(module(dual).sin())
        return y + tangent

    def on_two(s, x):
        with B(0):
            h = slope(s.a, x)
        with B(1):
            return slope(s.b, h)

    def on_one(s, x):
        with B(0):
            h = s.a(x)
        with B(1):
            return slope(s.b, h)

    x = torch.randn(6, 4)
    pipe = bp.Pipeline(Scripted(on_two), devices=stages(2), chunks=3)
    with pytest.raises(StateError, match=r"forward-mode AD.*on hops \[0, 1\].*'sequential'"):
        pipe.forward_backward(x, loss_fn=square)
    check_alike(Scripted(on_two), x, schedule="sequential")
    check_alike(Scripted(on_one), x)
