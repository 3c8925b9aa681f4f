"""What a forward does with memory that the backward of an earlier micro-batch needs."""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, one_hot
from torch.utils.checkpoint import checkpoint

import blockpipe as bp
from blockpipe.distributed.build import build_stage
from blockpipe.errors import StateError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, stages

Use = Callable[["Net", Tensor, Tensor], Tensor]
X, Y = torch.randn(8, 4), torch.randn(8, 4)


class Net(nn.Module):
    """Two stages; a test says what the code of one of them does with a result there."""

    def __init__(self, use: Use, stage: int = 0) -> None:
        super().__init__()
        self.use, self.stage = use, stage
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.ones(4))
        self.kept = [torch.ones(4, device=stages(stage + 1)[stage])]

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x) * self.weight
            h = self.use(self, x, h) if self.stage == 0 else h
        with bp.Block(stage=1):
            h = self.b(h)
            return self.use(self, x, h) if self.stage == 1 else h


class Sealed(nn.Linear):
    """A module that is called as a whole, and keeps a mean."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mean", torch.ones(4))

    def forward(self, h: Tensor) -> Tensor:
        h = super().forward(h)
        self.mean.data.mul_(0.5).add_(h.detach().mean(0))
        return h * self.mean


def _step(net: Net, steps: int = 1, **options: object) -> None:
    """A step, or several, whose gradients are the plain loop's."""
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), **{"chunks": 4, **options})
    chunks = int(str(options.get("chunks", 4)))
    for _ in range(steps):
        found = pipe.forward_backward(X, target=Y, loss_fn=mse_loss)
        assert_close(found.loss, plain_step(plain, (X,), {}, Y, mse_loss, chunks))
    assert_same_gradients(net, plain)


# --- writes that no version counts


def _copies(net: Net, x: Tensor, h: Tensor) -> Tensor:
    net.scale.data.copy_(h.detach().abs().mean(0))
    return h * net.scale


def _writes_a_part(net: Net, x: Tensor, h: Tensor) -> Tensor:
    net.scale.data[:2] = h.detach()[0, :2]
    return h * net.scale


def _writes_afterwards(net: Net, x: Tensor, h: Tensor) -> Tensor:
    h = h * net.scale.exp() * net.scale[:4]
    net.scale.data[1:].add_(h.detach()[0, 1:])
    return h


def _assigns(net: Net, x: Tensor, h: Tensor) -> Tensor:
    net.weight.data = net.weight.data * 0.5 + h.detach().abs().mean(0)
    return h


def _writes_to_a_plain_tensor(net: Net, x: Tensor, h: Tensor) -> Tensor:
    net.kept[0].data.copy_(h.detach().abs().mean(0))
    return h * net.kept[0]


WRITES = [
    (_copies, "buffer 'scale'"),
    (_writes_a_part, "buffer 'scale'"),
    (_writes_afterwards, "buffer 'scale'"),
    (_assigns, "parameter 'weight'"),
    (_writes_to_a_plain_tensor, r"a tensor of shape \(4,\) that no module registered"),
]


@pytest.mark.every
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("use", "what"), WRITES)
def test_a_write_through_data_when_an_earlier_backward_needs_it_is_refused(
    use: Use, what: str, schedule: str
) -> None:
    """The backward of micro-batch 0 read what the forward of micro-batch 1 had written."""
    with pytest.raises(
        StateError,
        match=rf"writes to {what} on hop 0 \(.*backwards\.py:\d+\), by \.data .*autograd has saved "
        r"of it \(.*backwards\.py:\d+\): schedule '.*' runs the forward of micro-batch \d before "
        r"the backward of micro-batch 0; clone\(\) it",
    ):
        _step(Net(use), schedule=schedule)


def test_a_write_through_data_when_a_sealed_module_does_it_is_refused() -> None:
    """A module that no mode looks into in a step is looked into by the recording."""
    net = bp.begin_blocks(nn.Sequential(nn.Linear(4, 4), Sealed(), nn.Linear(4, 4)), {"2": 1})
    with pytest.raises(StateError, match=r"writes to buffer '1\.mean' on hop 0"):
        _step(net)


def test_a_write_through_the_storage_when_it_changes_values_is_refused() -> None:
    """Its values are compared in the first step, for nothing says what they were made of."""

    def use(net: Net, x: Tensor, h: Tensor) -> Tensor:
        net.scale.untyped_storage().copy_(h.detach().abs().mean(0).untyped_storage())
        return h * net.scale

    with pytest.raises(StateError, match=r"writes to buffer 'scale'.*by \.data or in another way"):
        _step(Net(use))


def _halves(net: Net, x: Tensor, h: Tensor) -> Tensor:
    net.weight.data.mul_(0.5)
    return h * net.weight


def _averages(net: Net, x: Tensor, h: Tensor) -> Tensor:
    with torch.no_grad():
        net.kept[0].copy_(h.mean(0))
        net.scale.data.copy_(net.kept[0])
    return h * net.scale


@pytest.mark.every
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("use", [_halves, _averages])
def test_a_write_through_data_when_only_values_tell_is_compared_in_the_first_step(
    use: Use, schedule: str
) -> None:
    """What is written was computed from the model's own tensors, and is another value each time;
    where one of these has what the micro-batch left there, values need not be compared."""
    with pytest.raises(
        StateError, match=r"had written other values; clone\(\)|before the backward"
    ):
        _step(Net(use), schedule=schedule)


def _warms_up(net: Net, x: Tensor, h: Tensor) -> Tensor:
    net.calls = getattr(net, "calls", 0) + 1
    net.scale.data.fill_(2.0 if net.calls > 6 else 1.0)
    return h * net.scale


def _clips(net: Net, x: Tensor, h: Tensor) -> Tensor:
    net.calls = getattr(net, "calls", 0) + 1
    net.weight.data.clamp_(-0.5 / (1 + net.calls // 7), 0.5 / (1 + net.calls // 7))
    return h * net.weight


def _warms_up_checkpointed(net: Net, x: Tensor, h: Tensor) -> Tensor:
    net.calls = getattr(net, "calls", 0) + 1
    with torch.no_grad():
        net.scale.fill_(2.0 if net.calls > 6 else 1.0)
    return checkpoint(lambda h: h * net.scale.clone(), h, use_reentrant=False)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("use", [_warms_up, _clips, _warms_up_checkpointed])
def test_a_write_when_a_later_step_alone_writes_other_values_is_refused(use: Use, schedule: str):
    """Attack 43: temperatures in steps, and bounds that shrink. The first step alone compared."""
    net = Net(use)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    pipe.forward_backward(X, target=Y, loss_fn=mse_loss)
    with pytest.raises(StateError, match=r"a later forward had written other values; clone\(\)"):
        pipe.forward_backward(X, target=Y, loss_fn=mse_loss)


def _constrains(net: Net, x: Tensor, h: Tensor) -> Tensor:
    net.weight.data = torch.renorm(net.weight.data[None], 2, 0, 0.5)[0]
    return h * net.weight


def _clamps(net: Net, x: Tensor, h: Tensor) -> Tensor:
    net.weight.data.clamp_(-0.5, 0.5)
    return h * net.weight


def _quantizes(net: Net, x: Tensor, h: Tensor) -> Tensor:
    nearest = (h @ torch.diag(net.scale)).argmax(1)  # no gradient leads there
    net.scale.data.mul_(0.9).add_(h.detach().abs().mean(0))
    return h * one_hot(nearest, 4)


def _writes_beside(net: Net, x: Tensor, h: Tensor) -> Tensor:
    net.scale.data[2:] = h.detach()[0, 2:]
    return h * net.scale[:2].repeat(2)


def _writes_its_own(net: Net, x: Tensor, h: Tensor) -> Tensor:
    own = h.detach().abs()
    own.data.mul_(2)
    return h * own


@pytest.mark.every
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("use", [_constrains, _clamps, _quantizes, _writes_beside, _writes_its_own])
def test_a_write_through_data_when_no_backward_reads_other_values_is_fine(
    use: Use, schedule: str
) -> None:
    """A constraint leaves the same values, a codebook is not needed, the rest is not saved."""
    _step(Net(use), schedule=schedule)


# --- gradients that the forward reads


def _reads_gradient(net: Net, x: Tensor, h: Tensor) -> Tensor:
    own = net.a if net.stage == 0 else net.b
    return h if own.weight.grad is None else h * (1 + own.weight.grad.norm())


@pytest.mark.every
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_a_gradient_that_the_forward_reads_when_backwards_are_late_is_refused(
    schedule: str,
) -> None:
    """The plain loop's has the gradients of the earlier micro-batches."""
    with pytest.raises(
        StateError,
        match=r"reads the \.grad of parameter 'a\.weight' on hop 0 \(.*backwards\.py:\d+\), .* has "
        r"its gradient in the plain loop: .*read it between steps, or use schedule='sequential'",
    ):
        _step(Net(_reads_gradient), schedule=schedule)


def _sets_gradient(net: Net, x: Tensor, h: Tensor) -> Tensor:
    own = net.a if net.stage == 0 else net.b
    own.weight.grad = None
    return h


def _deletes_gradient(net: Net, x: Tensor, h: Tensor) -> Tensor:
    own = net.a if net.stage == 0 else net.b
    del own.weight.grad
    return h


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("use", [_sets_gradient, _deletes_gradient])
def test_a_gradient_that_the_forward_sets_when_backwards_are_late_is_refused(
    use: Use, schedule: str
) -> None:
    """Earlier micro-batches' gradients came after that: they were added up, silently."""
    with pytest.raises(StateError, match=r"sets the \.grad of parameter 'a\.weight' on hop 0"):
        _step(Net(use), schedule=schedule)


@pytest.mark.every
@pytest.mark.parametrize("use", [_copies, _averages, _reads_gradient, _sets_gradient])
@pytest.mark.parametrize(
    ("stage", "options"), [(1, {}), (0, {"schedule": "sequential"}), (0, {"chunks": 1})]
)
@pytest.mark.filterwarnings("ignore:chunks=1 on 2 devices:UserWarning")
def test_what_backwards_need_when_none_is_late_is_the_plain_loops(
    use: Use, stage: int, options: dict[str, object]
) -> None:
    """So it is on the last stage of 1F1B, one by one, and with one micro-batch."""
    _step(Net(use, stage), steps=2, **options)


def test_the_last_stage_when_its_backwards_are_late_is_refused() -> None:
    """GPipe runs all forwards first."""
    with pytest.raises(StateError, match=r"writes to buffer 'scale' on hop 1"):
        _step(Net(_copies, 1), schedule="gpipe")


@pytest.mark.parametrize("use", [_copies, _reads_gradient])
def test_what_backwards_need_when_there_are_none_is_fine(use: Use) -> None:
    """Without gradients nothing is saved and nothing added."""
    net = Net(use)
    with torch.no_grad():
        assert bp.Pipeline(net, devices=stages(2), chunks=4)(X).shape == Y.shape


@pytest.mark.parametrize("use", [_copies, _reads_gradient])
def test_what_backwards_need_when_the_caller_starts_them_is_refused(use: Use) -> None:
    """A call of the pipeline runs all forwards, and the caller's backward comes after them."""
    with pytest.raises(StateError, match=r"before the backward of micro-batch 0"):
        bp.Pipeline(Net(use), devices=stages(2), chunks=4)(X)


@pytest.mark.cpu("a stage of a process is built on the CPU")
def test_what_backwards_need_when_stages_are_processes_is_refused() -> None:
    """Each process runs its own stage in the order of its schedule."""
    with pytest.raises(StateError, match=r"reads the \.grad of parameter 'a\.weight'"):
        build_stage(Net(_reads_gradient), 0, X)


def test_what_backwards_need_when_a_model_is_summarized_is_noted() -> None:
    """The summary shows it before a step does."""
    assert "writes to buffer 'scale' on hop 0" in str(bp.record(Net(_copies), X).summary())


# --- what else such a write means


def test_a_write_through_data_when_two_stages_read_it_is_refused() -> None:
    """It counted as no write at all."""

    class Both(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.scale

    def use(net: Net, x: Tensor, h: Tensor) -> Tensor:
        net.scale.data.copy_(h.detach().abs().mean(0))
        return h

    with pytest.raises(StateError, match=r"buffer 'scale' is written by the forward and read on"):
        _step(Both(use))


def test_a_module_that_writes_through_data_when_it_is_recomputed_keeps_its_activations() -> None:
    """Run again, it would write to its weight again."""

    class Shrinks(nn.Linear):
        def forward(self, h: Tensor) -> Tensor:
            self.weight.data.mul_(0.5)
            return super().forward(h).tanh().exp().sin()

    net = bp.begin_blocks(nn.Sequential(nn.Linear(4, 4), Shrinks(4, 4), nn.Linear(4, 4)), {"2": 1})
    assert "no argument and no buffer" in bp.record(net, X).recomputable["1"].refuses
    _step(net, schedule="sequential", checkpoint="always")


class Router(nn.Module):
    """Sets its layer's dtype in each forward, as the routers of Switch Transformers do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.layer = self.layer.to(torch.float32)
        return self.layer(x)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forward_when_it_calls_to_on_a_module_trains_as_plain(dtype, schedule) -> None:
    """``Module.to`` looks at each ``.grad``: that was taken for a read of the forward's."""
    net = nn.Sequential(nn.Linear(4, 4), Router(dtype), nn.Linear(4, 4))
    bp.begin_blocks(net, {"2": 1})
    plain = copy.deepcopy(net).to(stages(1)[0])
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    for _ in range(2):
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        pipe.forward_backward(x, target=y, loss_fn=mse_loss)
        plain_step(plain, (x.to(stages(1)[0]),), {}, y, mse_loss, 4)
        assert_same_gradients(net, plain)


class ByNumpy(nn.Module):
    """Numpy clips a weight, of which the data say how far, or only reads it."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.writes, self.read = writes, 0.0

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            array = self.scale.detach().numpy()
            if self.writes:
                numpy.clip(array, None, 4 / max(4, x.abs().max().item()), out=array)
            else:
                self.read = float(array.max())
            h = (self.first(x) * self.scale).tanh()
        with bp.Block(stage=1):
            return self.last(h)


@pytest.mark.cpu("numpy has no memory of another device")
@pytest.mark.parametrize("writes", [False, True])
def test_what_numpy_writes_to_a_weight_is_compared(*, writes: bool) -> None:
    """No torch function writes it, in no step."""
    net = ByNumpy(writes=writes)
    plain = copy.deepcopy(net)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="gpipe")
    x = torch.linspace(-1, 1, 32).view(8, 4)
    for _ in range(3):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)
        plain_step(plain, (x,), {}, x, mse_loss, 4)
        assert_same_gradients(net, plain)
    x[4] = 100.0
    with (
        pytest.raises(StateError, match=r"may write to parameter 'scale'")
        if writes
        else nullcontext()
    ):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)
