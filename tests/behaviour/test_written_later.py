"""State that a forward begins to write after it was recorded, registered or not."""

import copy

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import StateError

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close
from .noticed_models import _pipe

# --- what begins to be written later


class _Rebinds(nn.Module):
    """A layer that from its fifth call on gives a buffer of the whole another tensor."""

    def __init__(self, whole: nn.Module, count: bytearray) -> None:
        super().__init__()
        self.l, self.whole, self.count = nn.Linear(8, 8), [whole], count

    def forward(self, x: Tensor) -> Tensor:
        h, whole = self.l(x), self.whole[0]
        if self.count and self.count[0] > 0:
            whole.ema = whole.ema.lerp(h.detach().mean(0), 0.5)
        return h + whole.ema


@pytest.mark.cpu("the write races with a copy, as it would on any accelerator, before it is found")
def test_a_buffer_that_is_assigned_anew_later_and_read_on_two_stages_is_noticed():
    net = nn.Sequential(nn.Identity(), nn.Identity())
    net.register_buffer("ema", torch.ones(8))
    count = bytearray([0])  # in which nobody looks
    net[0], net[1] = _Rebinds(net, count), bp.BeginBlock(_Rebinds(net, bytearray()), stage=1)
    pipe = _pipe(net)
    pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)
    count[0] = 1
    with pytest.raises(StateError, match="'ema'.* was (written|set) during the step"):
        pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)


class _Warms(nn.Module):
    """Keeps a detached mean of its own after a warm-up; another module may read it then."""

    def __init__(self, warm: bytearray, reads: "_Warms | None" = None) -> None:
        super().__init__()
        self.l, self.warm, self.reads = nn.Linear(8, 8), warm, [reads]
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        if self.warm[0]:
            if self.reads[0] is not None:
                return h + self.reads[0].mean
            with torch.no_grad():
                self.mean.lerp_(h.mean(0), 0.5)
        return h


@pytest.mark.cpu("the write races with a copy, as it would on any accelerator, before it is found")
@pytest.mark.parametrize("is_read", [False, True])
def test_a_buffer_that_is_written_later_is_recorded_anew(is_read: bool):
    """Where only its own stage has it, all is well; where another reads it by now, it is an error."""
    warm = bytearray([False])  # in which nobody looks
    first = _Warms(warm)
    second = _Warms(warm if is_read else bytearray([False]), first)
    net = nn.Sequential(first, bp.BeginBlock(second, stage=1))
    plain = copy.deepcopy(net)
    pipe = _pipe(net)
    x = torch.ones(8, 8)
    pipe.forward_backward(x, loss_fn=torch.sum)
    plain_step(plain, (x,), {}, None, torch.sum, 4)
    warm[0] = plain[0].warm[0] = True
    if is_read:
        with pytest.raises(
            StateError, match=r"0\.mean was written.*buffer '0\.mean' is written by"
        ):
            pipe.forward_backward(x, loss_fn=torch.sum)
        return
    before = pipe.recording
    for _ in range(2):
        pipe.forward_backward(x, loss_fn=torch.sum)
        plain_step(plain, (x,), {}, None, torch.sum, 4)
    assert pipe.recording is not before, "and is known until the next one"
    assert_same_gradients(net, plain)
    assert_close(net[0].mean, plain[0].mean)


# --- tensors that no module registered


class _Stats:
    """A running mean in an object of the user's."""

    def __init__(self) -> None:
        self.ema = torch.ones(8)


MEANS = [torch.ones(8)]


def _of_an_object(net: nn.Module) -> Tensor:
    return net.stats.ema


def _of_a_global_list(net: nn.Module) -> Tensor:
    return MEANS[0]


def _of_a_dict(net: nn.Module) -> Tensor:
    return net.means["a"]


def _of_itself(net: nn.Module) -> Tensor:
    return net.mean


class _Keeps(nn.Module):
    """Reads such a tensor, and writes to it first where it is asked to."""

    def __init__(self, whole: nn.Module, mean, writes) -> None:
        super().__init__()
        self.l, self.whole, self.mean, self.writes = nn.Linear(8, 8), [whole], mean, writes

    def forward(self, x: Tensor) -> Tensor:
        h, mean = self.l(x), self.mean(self.whole[0])
        if self.writes():
            mean.mul_(0.5).add_(h.detach().mean(0))
        return h * mean.clone()


def _keeping(mean, writes, other=None, second=lambda: False) -> nn.Sequential:
    net = nn.Sequential(nn.Identity(), nn.Identity())
    net.stats, net.means, net.mean = _Stats(), {"a": torch.ones(8)}, torch.ones(8)
    net[0] = _Keeps(net, mean, writes)
    net[1] = bp.BeginBlock(_Keeps(net, other or mean, second), stage=1)
    MEANS[0] = torch.ones(8)
    return net


@pytest.mark.cpu(
    "a tensor that no module registered stays on the host, and its writer is not there"
)
@pytest.mark.parametrize("mean", [_of_an_object, _of_a_global_list, _of_a_dict, _of_itself])
def test_an_unregistered_tensor_that_two_stages_share_and_one_writes_to_is_refused(mean):
    """Both modules run untouched, and each micro-batch read what the others had made of it."""
    x = torch.randn(8, 8)
    net = _keeping(mean, lambda: True)
    with pytest.raises(
        StateError,
        match=r"a tensor of shape \(8,\) that no module registered, and reads it on hops \[0, 1\]",
    ):
        _pipe(net).forward_backward(x, loss_fn=torch.sum)
    found = _pipe(net, schedule="sequential").forward_backward(x, loss_fn=torch.sum)
    plain = _keeping(mean, lambda: True)
    plain.load_state_dict(net.state_dict())
    assert_close(found.loss, plain_step(plain, (x,), {}, None, torch.sum, 4))


@pytest.mark.cpu(
    "a tensor that no module registered stays on the host, and its writer is not there"
)
def test_an_unregistered_tensor_of_each_stage_is_its_own():
    """A mean of its own for each stage, and two rows of one table: none of them is shared."""
    for first, second in [
        (_of_an_object, _of_a_dict),
        (lambda net: net.rows[0], lambda net: net.rows[1]),
    ]:
        net = _keeping(first, lambda: True, second, lambda: True)
        net.rows = [*torch.ones(2, 8)]
        plain = _keeping(first, lambda: True, second, lambda: True)
        plain.rows = [*torch.ones(2, 8)]
        plain.load_state_dict(net.state_dict())
        x, pipe = torch.randn(8, 8), _pipe(net)
        for _ in range(2):
            found = pipe.forward_backward(x, loss_fn=torch.sum)
            assert_close(found.loss, plain_step(plain, (x,), {}, None, torch.sum, 4))
        assert_same_gradients(net, plain)


@pytest.mark.cpu("the write races with a copy, as it would on any accelerator, before it is found")
@pytest.mark.parametrize("mean", [_of_an_object, _of_a_global_list, _of_itself])
def test_an_unregistered_tensor_that_is_written_later_is_found_by_that_step(mean):
    """The model was recorded anew, but the step had gone wrong by then, and nothing said so."""
    warm = bytearray([False])  # in which nobody looks
    pipe = _pipe(_keeping(mean, lambda: bool(warm[0])))
    pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)
    warm[0] = True
    with pytest.raises(StateError, match=r"no module registered was written during the step"):
        pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)


@pytest.mark.cpu(
    "a tensor that no module registered stays on the host, and its writer is not there"
)
def test_an_unregistered_tensor_that_one_stage_begins_to_write_is_recorded_anew_once():
    warm = [False]
    net = _keeping(_of_an_object, lambda: warm[0], _of_a_dict)
    pipe, x, recordings = _pipe(net), torch.ones(8, 8), {}
    for step in range(5):
        warm[0] = step > 1
        pipe.forward_backward(x, loss_fn=torch.sum)
        recordings[id(pipe.recording)] = pipe.recording
    assert len(recordings) == 2


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_dictionary_by_microbatch_is_not_shared(checkpoint: str) -> None:
    """What one stage puts in under ``current_microbatch()``, another may take out."""
    kept: dict[int | None, Tensor] = {}

    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not bp.is_recomputing():
                kept[bp.current_microbatch()] = x
            return super().forward(x).tanh().sigmoid()

    class Takes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + kept.pop(bp.current_microbatch())

    net = nn.Sequential(Keeps(8, 8), nn.Linear(8, 8), Takes(8, 8))
    plain, x = copy.deepcopy(net), torch.rand(8, 8)
    pipe = _pipe(bp.begin_blocks(net, {"1": 1}), checkpoint=checkpoint)
    result = pipe.forward_backward(x, loss_fn=torch.mean, return_outputs=True)
    assert_close(result.outputs, plain(x))
    plain(x).mean().backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)
    assert not kept


# --- blocks that are dropped by chance


class _Dropped(nn.Module):
    """A residual block with a batch norm that is skipped now and then: stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(()) < 0.4:
            return x
        return x + self.branch(x)


class _Stochastic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Dropped() for _ in range(4))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            with bp.Block(stage=index // 2):
                x = block(x)
        return self.head(x)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("seed", range(6))
def test_blocks_that_chance_drops_may_write_buffers_when_they_run(seed: int, checkpoint: str):
    """Whichever of them ran when the model was recorded."""
    torch.manual_seed(100 + seed)
    nets = [_Stochastic()]
    nets.append(copy.deepcopy(nets[0]))
    for net, schedule in zip(nets, ("1f1b", "sequential"), strict=True):
        torch.manual_seed(seed)
        pipe = _pipe(net, schedule=schedule, checkpoint=checkpoint)
        for _ in range(4):
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
            pipe.forward_backward(x, loss_fn=torch.sum)
    assert_same_gradients(*nets)
    for one, other in zip(*(net.buffers() for net in nets), strict=True):
        assert_close(one, other)


class _Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.l(x).tanh())


class _SharesItsRouter(nn.Module):
    """Experts that data choose on stage 0, by a router that stage 1 calls too."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(_Expert() for _ in range(3))
        self.router, self.head = nn.Linear(8, 3), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.experts[int(self.router(x.detach()).sum(0).argmax())](x)
        with bp.Block(stage=1):
            return self.head(h) * self.router(h).mean()


def test_experts_with_buffers_may_have_a_router_that_two_stages_call():
    """The router runs sealed on its own stage alone, before as after another expert has run."""
    torch.manual_seed(0)
    net = _SharesItsRouter()
    plain, pipe = copy.deepcopy(net), _pipe(net)
    for _ in range(3):
        x, y = torch.randn(16, 8), torch.randn(16, 8)
        pipe.forward_backward(x, target=y, loss_fn=nn.functional.mse_loss)
        plain_step(plain, (x,), {}, y, nn.functional.mse_loss, 4)
        assert_same_gradients(net, plain)
    for ours, theirs in zip(net.buffers(), plain.buffers(), strict=True):
        assert_close(ours, theirs)
    assert sum(int(expert.norm.num_batches_tracked > 0) for expert in net.experts) > 1
