"""Batches and losses that do not fit: who is told what, and that nothing has changed."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockpipe.errors import (
    MicrobatchError,
    PlanError,
    RecordingError,
    UsageError,
)

from ..models import SCHEDULES
from .bad_input import HERE, marked_net, pipeline, train, unchanged, x

# --- batches


@pytest.mark.parametrize("inputs", [(torch.ones(8, 5),), (), ("hello",)], ids=str)
@pytest.mark.parametrize("as_sample", [False, True])
def test_a_sample_that_does_not_fit_names_its_signature(
    inputs: tuple[Any, ...], as_sample: bool
) -> None:
    """A batch or sample that the forward does not take is a RecordingError with its signature."""
    net = marked_net()
    with unchanged(net):
        with pytest.raises(RecordingError, match=r"Sequential's forward fails on the sample \("):  # noqa: PT012
            if as_sample:
                pipeline(net, sample=(inputs, {}))
            else:
                pipeline(net)(*inputs)


@pytest.mark.parametrize("rows", [0, 6, 16])
def test_a_target_that_does_not_split_like_the_inputs_is_refused(rows: int) -> None:
    """A target of another batch size is a MicrobatchError with both sizes, before any forward."""
    net = marked_net()
    with unchanged(net):
        with pytest.raises(MicrobatchError, match=rf"8 samples.*\({rows}, 4\).*batch_dims"):
            pipeline(net).forward_backward(x(), target=torch.zeros(rows, 4), loss_fn=F.mse_loss)


def test_an_empty_batch_is_refused() -> None:
    """A batch of no samples is a MicrobatchError."""
    net = marked_net()
    with unchanged(net):
        with pytest.raises(MicrobatchError, match="at least one sample"):
            pipeline(net)(torch.ones(0, 4))


class Two(nn.Module):
    """Takes two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.linear(a) + b.sum()


@pytest.mark.parametrize(
    ("batch_dims", "shape"),
    [
        ({0: 0, 1: 1}, (2, 6)),
        ({0: 0, "b": 1}, (2, 6)),
        (0, (6, 2)),
        ({1: 3}, (8, 2)),
        (5, (8, 2)),
        ({1: -3}, (8, 2)),
    ],
    ids=str,
)
def test_batch_dims_that_do_not_fit_are_refused(batch_dims: Any, shape: tuple[int, ...]) -> None:
    """A dim named in batch_dims that is not there, or of another size, is a MicrobatchError."""
    pipe = pipeline(Two(), devices=["cpu"], batch_dims=batch_dims)
    with pytest.raises(MicrobatchError, match="batch_dims"):  # noqa: PT012
        if isinstance(batch_dims, dict) and "b" in batch_dims:
            pipe(x(), b=torch.ones(shape))
        else:
            pipe(x(), torch.ones(shape))


@pytest.mark.parametrize("batch_dims", [{"nope": 1}, {9: 0}], ids=str)
def test_batch_dims_of_an_argument_that_is_not_there_are_refused(batch_dims: Any) -> None:
    """batch_dims for an argument that the call does not have is a MicrobatchError naming it."""
    name = next(iter(batch_dims))
    with pytest.raises(MicrobatchError, match=f"{name!r}"):
        pipeline(batch_dims=batch_dims)(x())


@pytest.mark.parametrize("number", [-1, 0, float("nan"), float("inf"), "a"])
def test_a_loss_reduction_that_gives_no_weights_is_refused(number: Any) -> None:
    """A loss_reduction that gives no usable number is a MicrobatchError before any forward."""
    net = marked_net()
    pipe = pipeline(net, loss_reduction=lambda args, kwargs, target: number)
    with unchanged(net):
        with pytest.raises(
            MicrobatchError, match=r"expected .*weights.* for loss_reduction, got \["
        ):
            train(pipe)


def test_a_meta_model_without_values_is_refused() -> None:
    """A model on the meta device has no values to train: a PlanError that says to load it."""
    net = marked_net().to("meta")
    with unchanged(net):
        with pytest.raises(
            PlanError, match="meta device; pass weights=… .a checkpoint. or init=… to Pipeline"
        ):
            train(pipeline(net))


def test_a_lazy_model_is_refused_and_stays_lazy() -> None:
    """A model whose lazy modules have no shapes yet is refused, and stays lazy."""
    net = nn.Sequential(nn.LazyLinear(4))
    with unchanged(net):
        with pytest.raises(
            RecordingError, match=rf"lazy modules.*: 0\.weight, 0\.bias \(.*{HERE}\); run the"
        ):
            pipeline(net, devices=["cpu"])(x())


def test_a_model_with_lazy_buffers_is_refused_and_stays_lazy() -> None:
    """A buffer without a shape has no memory that places could share."""
    net = nn.Sequential(nn.LazyBatchNorm1d(affine=False))
    pipe = pipeline(net, devices=["cpu"])
    with pytest.raises(RecordingError, match=r"lazy modules.*: 0\.running_mean, 0\.running_var \("):
        pipe(x())
    assert net[0].has_uninitialized_params()
    net(x())
    pipe(x())


# --- losses


@pytest.mark.parametrize(
    ("loss_fn", "came"),
    [
        (lambda output, target: output - target, r"one of shape \(2, 4\)"),
        (lambda output, target: 3.0, "float"),
        (lambda output, target: None, "NoneType"),
    ],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loss_that_is_no_number_is_refused(loss_fn: Any, came: str, schedule: str) -> None:
    """A loss that is no tensor with one element is a UsageError with what came."""
    net = marked_net()
    pipe = pipeline(net, schedule=schedule, sample=((x(),), {}))
    with unchanged(net):
        with pytest.raises(UsageError, match=f"one element for the loss, got {came}"):
            pipe.forward_backward(x(), target=x(), loss_fn=loss_fn)


@pytest.mark.parametrize("loss_fn", [3, "mse"])
def test_a_loss_fn_that_is_no_function_is_refused(loss_fn: Any) -> None:
    """A loss_fn that cannot be called is a UsageError before any forward."""
    with pytest.raises(UsageError, match=rf"for loss_fn, got {loss_fn!r} .*{HERE}"):
        pipeline().forward_backward(x(), target=x(), loss_fn=loss_fn)


def test_a_step_without_a_loss_is_refused() -> None:
    """Without loss_fn and without a loss of the model's, a UsageError says what came."""
    with pytest.raises(UsageError, match=r"loss.*\(2, 4\).*pass a loss_fn"):
        pipeline().forward_backward(x())


def test_a_target_without_loss_fn_is_refused() -> None:
    """A target that nothing would read is a UsageError, not ignored."""

    class OwnLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, value: Tensor) -> Tensor:
            return self.linear(value).sum()

    with pytest.raises(UsageError, match=r"target.*loss_fn"):
        pipeline(OwnLoss(), devices=["cpu"]).forward_backward(x(), target=x())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_a_frozen_model_is_refused(schedule: str) -> None:
    """Training a model without a parameter that needs grad is a UsageError."""
    net = marked_net().requires_grad_(False)
    with unchanged(net):
        with pytest.raises(
            UsageError, match="one that does not require grad .*leave a parameter trainable"
        ):
            train(pipeline(net, schedule=schedule))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_without_grad_is_refused(mode: Any) -> None:
    """forward_backward under no_grad or inference_mode is a UsageError."""
    net = marked_net()
    with unchanged(net), mode():
        with pytest.raises(UsageError, match="no_grad"):
            train(pipeline(net))


def test_an_error_in_a_model_without_own_code_names_the_users_call() -> None:
    """Where no frame of the user's is in a run, an error names the user's call."""
    with pytest.raises(UsageError, match=HERE) as caught:
        pipeline().forward_backward(x(), target=x(), loss_fn=torch.sub)
    text = "".join([str(caught.value), *caught.value.__notes__])
    assert "<unknown>" not in text
    assert "threading.py" not in text
