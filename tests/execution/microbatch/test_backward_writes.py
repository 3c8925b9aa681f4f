"""State that the forward reads and a backward writes: in a hook, or in a recomputation of the user's."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import blockpipe as bp
from blockpipe.errors import StateError

from ...alike import DEVICE
from ...models import square
from ...parameter_sets import every_pair
from ...parity import assert_same_gradients, difference, plain_step
from ...stage_devices import stages

# torch 2.11 warns of a hook on a module whose inputs need no gradient.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing when gradients are computed"
)


class Again(nn.Sequential):
    """Layers that are recomputed in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Scales(nn.Linear):
    """A layer with a scale that follows its gradient."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("size", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.size.clone()  # which is what autograd keeps

    def follow(self, module: nn.Module, gradients: tuple[Tensor, ...]) -> None:
        self.size.lerp_(gradients[0].norm(), 0.1)


def _recomputed() -> nn.Sequential:
    return _net(Again(nn.Linear(4, 4), nn.BatchNorm1d(4)))


def _hooked(stage: int) -> nn.Sequential:
    layer = Scales()
    layer.register_full_backward_pre_hook(layer.follow)
    return _net(layer, stage=stage)


def _net(layer: nn.Module, stage: int = 0) -> nn.Sequential:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    layers.insert(stage, layer)
    net = nn.Sequential(layers[0], nn.Tanh(), layers[1], layers[2])
    return bp.begin_blocks(net, {"2": 1})


def _step(net: nn.Module, **options: object) -> Tensor:
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, **options)
    return pipe.forward_backward(X, loss_fn=_loss).loss


def _loss(output: Tensor) -> Tensor:
    return output.square().mean()


X = torch.randn(8, 4)


@pytest.mark.every
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize(
    ("net", "name"),
    [(_recomputed, r"0\.1\.num_batches_tracked"), (lambda: _hooked(0), r"0\.size")],
    ids=["checkpoint", "hook"],
)
def test_what_a_backward_writes_and_a_forward_reads_is_refused(net, name, schedule):
    """Running means took another course than in the plain loop, without a word."""
    match = rf"buffer '{name}', which the forward reads \(.*\d\), is written in a backward.*instead"
    with pytest.raises(StateError, match=match):
        _step(net(), schedule=schedule)


@pytest.mark.parametrize(
    ("net", "options"),
    [
        (_recomputed, {"schedule": "sequential"}),
        (lambda: _hooked(0), {"schedule": "sequential"}),
        (lambda: _hooked(1), {"schedule": "1f1b"}),
    ],
    ids=["checkpoint", "hook", "hook on the last stage"],
)
def test_it_is_the_plain_loops_where_each_backward_comes_before_the_next_forward(net, options):
    """So it does on the last stage of 1F1B."""
    ours = net()
    plain = copy.deepcopy(ours)
    loss = _step(ours, **options)
    assert difference(ours, plain, loss, plain_step(plain, (X,), {}, None, _loss, 4)).same


def test_batch_norm_that_is_deferred_or_recomputed_by_the_pipeline_is_fine():
    """Its statistics do not depend on when something runs again."""
    net = _recomputed()
    _step(net, deferred_batch_norm=True)
    assert net[0][1].num_batches_tracked == 1
    net = _net(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    _step(net, checkpoint="always")
    assert net[0][1].num_batches_tracked == 4


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            x = self.a(x)
        with bp.Block(stage=1):
            return self.b(x)


def _decays(weight: Tensor) -> Callable[[Tensor], Tensor]:
    def loss(output: Tensor) -> Tensor:
        weight.data.mul_(0.9)
        return output.square().mean()

    return loss


@pytest.mark.parametrize(("on", "schedule"), [("b", "gpipe"), ("a", "1f1b"), ("a", "gpipe")])
def test_a_loss_that_writes_to_a_weight_by_data_is_refused_where_others_read_it(
    on: str, schedule: str
) -> None:
    """Autograd does not notice: gradients were others than the plain loop's, silently."""
    net = Pair()
    pipe = bp.Pipeline(
        net, devices=stages(2), chunks=4, schedule=schedule, sample=torch.randn(2, 4)
    )
    with pytest.raises(StateError, match=rf"'{on}\.weight'.*write it|set it between"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=_decays(getattr(net, on).weight))


@pytest.mark.parametrize("schedule", ["1f1b", "sequential"])
def test_a_loss_that_writes_to_a_weight_by_data_is_the_plain_loops_elsewhere(schedule: str) -> None:
    net, x = Pair(), torch.randn(8, 4)
    plain = copy.deepcopy(net).to(stages(1)[0])
    pipe = bp.Pipeline(
        net, devices=stages(2), chunks=4, schedule=schedule, sample=torch.randn(2, 4)
    )
    pipe.forward_backward(x, loss_fn=_decays(net.b.weight))
    plain_step(plain, (x.to(stages(1)[0]),), {}, None, _decays(plain.b.weight), 4)
    assert_same_gradients(net, plain)


def _by_data(weight: Tensor) -> None:
    weight.data.mul_(0.9)


def _counted(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(0.9)


@every_pair(on=["a", "b"], write=[_by_data, _counted], schedule=["gpipe", "1f1b", "zb-h1"])
def test_a_hook_that_writes_to_a_weight_is_refused_where_others_read_it(
    on: str, write: Callable[[Tensor], None], schedule: str
) -> None:
    """Also to one that autograd has not saved: gradients were others, silently."""
    net = Pair()
    weight = getattr(net, on).weight

    def hook(gradient: Tensor) -> None:
        write(weight)

    weight.register_hook(hook)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    if on == "b" and schedule != "gpipe":  # as in the plain loop
        pipe.forward_backward(torch.randn(8, 4), loss_fn=square)
        return
    with pytest.raises(StateError, match=r"a backward writes to"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=square)


class ScaledPair(Pair):
    """Its first stage scales by a tensor that no module registered."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [torch.ones(())]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.kept[0])


@pytest.mark.every
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "sequential"])
@pytest.mark.parametrize("write", [_by_data, _counted])
def test_a_hook_that_writes_to_a_tensor_outside_is_refused_where_others_read_it(
    write: Callable[[Tensor], None], schedule: str
) -> None:
    """By ``.data``, too, which nothing counts: forwards of later micro-batches had read it."""
    net, x = ScaledPair(), torch.randn(8, 4)

    def hook(module: nn.Module, _: object, __: object) -> None:
        write(module.kept[0])

    net.a.kept = net.kept
    net.a.register_full_backward_hook(hook)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    if schedule != "sequential":
        with pytest.raises(StateError, match="that no module registered"):
            pipe.forward_backward(x, loss_fn=square)
        return
    plain = copy.deepcopy(net).to(DEVICE)
    pipe.forward_backward(x, loss_fn=square)
    plain_step(plain, (x,), {}, None, square, 4)
    assert_same_gradients(net, plain)


class Recurrent(nn.Module):
    """Its first stage carries a hidden state, which begins with zeros."""

    def __init__(self, cell: type[nn.GRUCell | nn.RNNCell | nn.GRU]) -> None:
        super().__init__()
        self.a, self.b, self.cell = nn.Linear(4, 4), nn.Linear(4, 4), cell(4, 4)
        shape = (1, 2, 4) if cell is nn.GRU else (2, 4)
        self.state = torch.zeros(shape, device=DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            if isinstance(self.cell, nn.GRU):
                h, state = self.cell(h[None], self.state)
                h = h[0]
            else:
                h = state = self.cell(h, self.state)
            self.state = state.detach()
        with bp.Block(stage=1):
            return self.b(h)


@pytest.mark.cpu("the simulated accelerator has no fused kernel of a GRU")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("cell", [nn.GRUCell, nn.RNNCell, nn.GRU])
def test_a_tensor_that_the_graph_alone_still_has_is_not_written(
    cell: type[nn.GRUCell | nn.RNNCell | nn.GRU], schedule: str
) -> None:
    """The first state ends with the backward that needed it, which was taken for a write."""
    net = Recurrent(cell)
    plain, x = copy.deepcopy(net).to(DEVICE), torch.randn(8, 4, device=DEVICE)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    for _ in range(2):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)
        plain_step(plain, (x,), {}, x, mse_loss, 4)
    assert_same_gradients(net, plain)
