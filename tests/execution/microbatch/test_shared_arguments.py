"""Arguments that share memory with each other or with the target, one of them written in place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockpipe as bp
from blockpipe.errors import CrossingError, StateError

from ...parameter_sets import every_pair
from ...parity import assert_same_gradients, plain_step
from ...stage_devices import assert_close, stages


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first = nn.Sequential(nn.ReLU(inplace=True), self.a)


class _WritesFirst(_Two):
    def forward(self, x: Tensor, y: Any = None) -> Tensor:
        with bp.Block(stage=0):
            x.mul_(2)
            h = self.a(x)
        with bp.Block(stage=1):
            return self.b(h) if y is None else self.b(h) * _only(y).sum(1, keepdim=True)


class _WritesInAModule(_Two):
    def forward(self, x: Tensor, y: Any = None) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(x)
        with bp.Block(stage=1):
            return self.b(h) if y is None else self.b(h) * _only(y).sum(1, keepdim=True)


class _WritesLater(_Two):
    def forward(self, x: Tensor, y: Any = None) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x.clone())
        with bp.Block(stage=1):
            (x if y is None else _only(y)).mul_(2)
            h = self.b(h)
        with bp.Block(stage=0):
            return h + x


def _only(value: Any) -> Tensor:
    return value["nested"][0] if isinstance(value, dict) else value


ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "same": lambda x: x,
    "view": lambda x: x[:],
    "detached": lambda x: x.detach(),
    "nested": lambda x: {"nested": [x[:, :]]},
    "part": lambda x: x[:, 1:3],
    "turned": lambda x: x.t()[1:].t(),
}


def _batch(alias: Callable[[Tensor], Any], device: str) -> tuple[Tensor, Any]:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).to(device)
    return x, alias(x)


def _loss(output: Tensor, target: Any) -> Tensor:
    target = _only(target)
    return F.mse_loss(output[:, : target.shape[1]], target)


def _compare(
    kind: type[nn.Module], call: Callable[[str], tuple[tuple[Any, ...], dict[str, Any], Any]], **how
) -> bp.Pipeline:
    """Compare a step with the plain loop, given what makes the batch on a device: both write to
    it."""
    torch.manual_seed(0)
    net, plain = kind(), kind()
    plain.load_state_dict(net.state_dict())
    device = stages(1)[0]
    (args, kwargs, target), loss_fn = call(device), _loss
    if target is None:
        target = torch.ones(8, 4, device=device)
    loss = plain_step(plain, args, kwargs, target, loss_fn, 4)
    args, kwargs, shared = call(device)
    target = target if shared is None else shared
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, **how)
    result = pipe.forward_backward(*args, target=target, loss_fn=loss_fn, **kwargs)
    assert_close(result.loss, loss)
    assert_same_gradients(net, plain)
    return pipe


@every_pair(
    how=[{}, {"isolate": True}, {"schedule": "uncut"}],
    alias=ALIASES,
    kind=[_WritesFirst, _WritesInAModule],
)
def test_an_argument_shares_a_write_to_another_one_on_the_first_stage(
    kind: type[nn.Module], alias: str, how: dict[str, Any]
):
    """It has the new values on a later stage, as an argument with or without a name."""

    def call(device: str) -> Any:
        return _batch(ALIASES[alias], device), {}, None

    def by_name(device: str) -> Any:
        x, y = _batch(ALIASES[alias], device)
        return (x,), {"y": y}, None

    _compare(kind, call, **how)
    _compare(kind, by_name, **how)


@every_pair(
    how=[{}, {"isolate": True}, {"schedule": "uncut"}],
    alias=ALIASES,
    kind=[_WritesFirst, _WritesInAModule],
)
def test_the_target_shares_a_write_to_an_argument(
    kind: type[nn.Module], alias: str, how: dict[str, Any]
):
    """The loss on the last stage reads what the forward has left."""

    def call(device: str) -> Any:
        x, y = _batch(ALIASES[alias], device)
        return (x,), {}, y

    _compare(kind, call, **how)


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("alias", ["same", "view", "detached", "nested"])
def test_a_write_on_a_later_stage_is_one_to_all_arguments_that_are_the_same(
    alias: str, isolate: bool
):
    """Later readers of either one see it, and so does the loss."""

    def argument(device: str) -> Any:
        return _batch(ALIASES[alias], device), {}, None

    def target(device: str) -> Any:
        x, y = _batch(ALIASES[alias], device)
        return (x,), {}, y

    _compare(_WritesLater, argument, isolate=isolate)
    _compare(_WritesLater, target, isolate=isolate)


@pytest.mark.parametrize("isolate", [False, True])
def test_a_write_on_a_later_stage_to_a_part_of_another_argument_is_refused(isolate: bool):
    """A view of it has crossed; the error names the line that would miss the write."""
    pipe = bp.Pipeline(_WritesLater(), devices=stages(2), chunks=4, isolate=isolate)
    with pytest.raises(CrossingError, match=r"test_shared_arguments.py:\d+.*would miss the write"):
        pipe.forward_backward(*_batch(lambda x: x[:, :1], stages(1)[0]), loss_fn=torch.sum)
    x = torch.ones(8, 4)
    with pytest.raises(CrossingError, match=r"test_shared_arguments.py:\d+.*would miss the write"):
        pipe.forward_backward(x, target=x[:, :2], loss_fn=_loss)


def test_what_counts_no_writes_shares_them_as_well():
    """Arguments that were made in inference mode."""
    net = _WritesFirst()
    with torch.inference_mode():
        x, y = _batch(ALIASES["part"], stages(1)[0])
        shared = bp.Pipeline(net, devices=stages(2), chunks=4, isolate=True)(x, y)
        x, y = _batch(ALIASES["part"], stages(1)[0])
        apart = bp.Pipeline(net, devices=stages(2), chunks=4)(x.clone(), 2 * y)
    assert_close(shared, apart)


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("chunks", [1, 4])
def test_the_plain_loop_on_one_device_shares_writes_too(alias: str, chunks: int):
    """It is taken from the second step on, and the batch may come from the host."""
    net, plain = _WritesFirst(), _WritesFirst()
    plain.load_state_dict(net.state_dict())
    pipe = bp.Pipeline(net, devices=stages(1) * 2, chunks=chunks)
    for _ in range(2):
        x, y = _batch(ALIASES[alias], stages(1)[0])
        loss = plain_step(plain, (x, y), {}, x, _loss, chunks)
        x, y = _batch(ALIASES[alias], "cpu")
        assert_close(pipe.forward_backward(x, y, target=x, loss_fn=_loss).loss, loss)
    assert_same_gradients(net, plain)


@pytest.mark.parametrize("isolate", [False, True])
def test_columns_of_one_table_may_be_written(isolate: bool):
    """Features and labels lie between each other in memory, and share none of it."""

    def call(device: str) -> Any:
        table = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).to(device)
        return (table[:, :4], table[:, 4:]), {}, table[:, 4:]

    _compare(_WritesInAModule, call, isolate=isolate)


def test_arguments_that_nobody_writes_stay_apart():
    """Their copies go to the stages that read them, and no write is looked for."""
    net = bp.begin_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"1": 1})
    x = torch.ones(8, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
    assert not pipe.recording.writes_inputs


class _WritesSometimes(_Two):
    def forward(self, x: Tensor, flag: bytearray) -> Tensor:
        with bp.Block(stage=0):
            if flag[0]:
                x.mul_(2)
            h = self.a(x)
        with bp.Block(stage=1):
            return self.b(h)


def test_a_write_that_the_recorded_forward_did_not_do_is_an_error():
    """The target went to the last stage before it."""
    flag = bytearray([0])
    pipe = bp.Pipeline(_WritesSometimes(), devices=stages(2), chunks=4)
    x = torch.ones(8, 4)
    pipe.forward_backward(x, flag, target=x, loss_fn=F.mse_loss)
    flag[0] = 1
    with pytest.raises(StateError, match=r"share memory.*which the recorded forward did not"):
        pipe.forward_backward(x, flag, target=x, loss_fn=F.mse_loss)
    pipe.forward_backward(x, flag, target=x.clone(), loss_fn=F.mse_loss)


def test_what_no_copy_can_be_made_of_together_is_refused():
    """Two dtypes of one memory, or a target that every micro-batch gets whole."""
    x = torch.ones(8, 4)
    pipe = bp.Pipeline(_WritesFirst(), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match="share memory.*other dtypes"):
        pipe.forward_backward(x, target=x.view(torch.int32), loss_fn=lambda h, y: (h * y).sum())
    dims = {"target": None}
    pipe = bp.Pipeline(_WritesFirst(), devices=stages(2), chunks=4, batch_dims=dims)
    with pytest.raises(StateError, match="share memory.*the whole of the target"):
        pipe.forward_backward(x, target=x, loss_fn=lambda h, y: (h.sum() * y).sum())
