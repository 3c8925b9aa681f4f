"""Transforms inside of a forward: torch.func, and forward-mode AD."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import mse_loss

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


class _Chooses(nn.Module):
    """One of two functions, by the data."""

    def forward(self, h: Tensor) -> Tensor:
        chosen: Tensor = torch.cond(h.sum() > 0, lambda z: z * 2, lambda z: z + 1, (h,))
        return chosen


class _Attends(nn.Module):
    """torch's attention of many kinds, which has no backward on the CPU."""

    def forward(self, h: Tensor) -> Tensor:
        heads = h.view(1, 1, *h.shape)
        attended: Tensor = flex_attention(heads, heads, heads)
        return attended[0, 0]


@pytest.mark.cpu("torch compiles it")
@pytest.mark.parametrize("schedule", ["1f1b", "uncut"])
def test_a_module_that_calls_functions_by_an_operator_is_one_call(schedule: str) -> None:
    """Attack 30: it was an AttributeError that the split was blamed for."""
    net = nn.Sequential(nn.Linear(4, 4), _Chooses(), nn.Linear(4, 4))
    plain, x, y = copy.deepcopy(net), torch.randn(8, 4), torch.randn(8, 4)
    net[1] = bp.BeginBlock(net[1], stage=1)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    loss = pipe.forward_backward(x, target=y, loss_fn=mse_loss).loss
    assert difference(net, plain, loss, plain_step(plain, (x,), {}, y, mse_loss, 4)).exact


@pytest.mark.cpu("torch compiles it")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_of_many_kinds_runs_in_a_module() -> None:
    """Attack 30: like any operator of the kind, it was refused."""
    net = nn.Sequential(nn.Linear(16, 16), _Attends(), nn.Linear(16, 16)).requires_grad_(False)
    plain, x = copy.deepcopy(net), torch.randn(16, 16)
    net[1] = bp.BeginBlock(net[1], stage=1)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=1)
    with torch.no_grad():
        assert torch.equal(pipe(x), plain(x))


@pytest.mark.cpu("torch compiles it")
def test_outside_of_a_module_such_an_operator_is_refused() -> None:
    """What its functions read, nobody sees."""

    def forward(s: Scripted, x: Tensor) -> Tensor:
        with B(0):
            h = s.a(x)
        with B(1):
            return s.b(torch.cond(h.sum() > 0, lambda z: z * 2, lambda z: z + 1, (h,)))

    pipe = bp.Pipeline(Scripted(forward), devices=stages(2), chunks=2)
    with pytest.raises(CrossingError, match="torch's cond .*module of its own"):
        pipe.forward_backward(torch.randn(4, 4), loss_fn=torch.sum)


USES = {
    "vmap": lambda t: torch.vmap(lambda z: z * 1)(t),
    "vjp": lambda t: torch.func.vjp(torch.sin, t)[0],
    "grad": lambda t: torch.func.grad(lambda z: z.square().sum())(t),
    "functionalize": lambda t: torch.func.functionalize(lambda z: z * 1)(t),
}
WRITES = {
    "add_": lambda t: t.add_(1),
    "vmap": lambda t: torch.vmap(lambda z: z.add_(1))(t),
    "set_": lambda t: t.set_(t + 1),
}


@pytest.mark.cpu("a buffer and a transform on other devices are refused by other words")
@pytest.mark.parametrize("is_buffer", [False, True])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("use", USES)
def test_what_a_transform_is_given_is_read(use: str, write: str, is_buffer: bool) -> None:
    """Attack 31: the transform wraps it before anybody sees it, so that nobody had read it."""

    def forward(s: Scripted, x: Tensor) -> Tensor:
        with B(0):
            h = s.a(x)
            WRITES[write](s.t if is_buffer else s.kept[0])
        with B(1):
            return s.b(h) * USES[use](s.t if is_buffer else s.kept[0])

    net = Scripted(forward)
    net.register_buffer("t", torch.ones(4))
    net.kept = [torch.ones(4)]
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="written by the forward|changes a tensor"):
        pipe.forward_backward(torch.randn(8, 4), target=torch.randn(8, 4), loss_fn=mse_loss)


def test_a_buffer_that_the_forward_sets_is_written() -> None:
    """No mode sees ``set_``."""

    def forward(s: Scripted, x: Tensor) -> Tensor:
        with B(0):
            h = s.a(x)
            s.t.set_(s.t.detach() + 1)
        with B(1):
            return s.b(h) * s.t

    net = Scripted(forward)
    net.register_buffer("t", torch.ones(4))
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="buffer 't' is written"):
        pipe.forward_backward(torch.randn(8, 4), target=torch.randn(8, 4), loss_fn=mse_loss)
