"""A step from functions for a stage's forward: parity, custom backwards, what is kept, errors."""

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.compat.torchdistpackage import (
    clip_grad_norm_,
    forward_backward,
    forward_eval,
    launch,
    partition_uniform,
    tpc,
)
from blockpipe.errors import PlanError, UsageError

from ...parity import plain_step
from ...stage_devices import assert_close, device_type, equal, stages

mse = nn.functional.mse_loss


def chain(*, norm: bool = False) -> list[nn.Module]:
    torch.manual_seed(0)
    last = nn.BatchNorm1d(4) if norm else nn.Tanh()
    return [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), last, nn.Linear(4, 2)]


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 4), torch.randn(rows, 2)


def two_stages() -> None:
    tpc.setup_process_groups([("pipe", 2)], devices=stages(2))


def plainly(net: nn.Module, x: Tensor, y: Tensor, chunks: int) -> Tensor:
    """The sum over the micro-batches, as the loop there has it."""
    return plain_step(net, (x,), {}, y, mse, chunks, "sum")


def same_gradients(net: nn.Module, twin: nn.Module) -> bool:
    pairs = zip(net.parameters(), twin.parameters(), strict=True)
    return all(equal(p.grad, q.grad) for p, q in pairs)


@pytest.mark.every
@pytest.mark.parametrize("rows", [8, 11])
def test_a_step_in_one_process_is_the_plain_loop(rows):
    """Gradients are the sum over the micro-batches, the last ones uneven; the loss is their mean;
    functions that are made anew at each step are recorded once."""
    two_stages()
    layers = chain(norm=True)
    twin = copy.deepcopy(nn.Sequential(*layers))
    model = nn.Sequential(*partition_uniform(layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        x, y = batch(rows)

        def fwd_fn(inputs: list[Tensor]) -> Tensor:
            return mse(model(inputs[0]), inputs[1])

        loss = forward_backward(optimizer, fwd_fn, None, [x, y], num_microbatches=4)
        twin.zero_grad()
        assert_close(loss, plainly(twin, x, y, 4) / 4)
        assert same_gradients(model, twin)
    ((_, pipe),) = model.__dict__["_torchdistpackage_steps"].values()
    assert len(pipe._preparer.known) == 1
    assert pipe.recording.route == [0, 1]
    assert equal(layers[3].running_mean, twin[3].running_mean)


def test_each_rank_has_its_functions_and_inputs():
    """The first one the inputs, the last one the targets; a middle one only the output before."""

    def main() -> tuple[nn.Module, Any]:
        tpc.setup_process_groups([("pipe", 3)], devices=stages(3))
        model = nn.Sequential(*partition_uniform(copy.deepcopy(whole)))

        def fwd_fn(inputs: Any) -> Tensor:
            if not tpc.is_last_in_pipeline_group():
                return model(inputs)
            return mse(model(inputs[0]), inputs[1])

        inputs = {0: x, 1: None, 2: [y]}[tpc.get_pp_rank()]
        loss = forward_backward(None, fwd_fn, None, inputs, num_microbatches=4)
        assert (loss is None) == (not tpc.is_last_in_pipeline_group())
        return model, loss

    whole, (x, y) = nn.Sequential(*chain()), batch()
    ranks = launch(main, 3)
    twin = copy.deepcopy(whole)
    assert_close(ranks[-1][1], plainly(twin, x, y, 4) / 4)
    assert same_gradients(nn.Sequential(*(layer for model, _ in ranks for layer in model)), twin)


@pytest.mark.every
@pytest.mark.parametrize("several", [False, True])
def test_a_custom_backward_is_called_for_each_stage(several):
    """As the rank that it is for, with the loss and without a gradient on the last one. What it
    does to gradients counts: a scaled loss, and half of what goes on to the stage before."""

    def main() -> nn.Module:
        two_stages()
        model = nn.Sequential(*partition_uniform(copy.deepcopy(whole)))

        def fwd_fn(inputs: Any) -> Any:
            if tpc.is_first_in_pipeline_group():
                return (model(inputs), inputs) if several else model(inputs)
            return mse(model(inputs[0]), inputs[-1])

        def bwd_fn(output: Any, gradient: Any) -> None:
            calls.append((tpc.is_last_in_pipeline_group(), gradient is None))
            if gradient is None:
                (output * 4).backward()
            elif several:
                output[0].backward(gradient[0] / 2)
            else:
                output.backward(gradient / 2)

        inputs = [x] if tpc.is_first_in_pipeline_group() else [y]
        forward_backward(None, fwd_fn, bwd_fn, inputs, num_microbatches=2)
        return model

    whole, (x, y), calls = nn.Sequential(*chain()), batch(), list[Any]()
    first, last = launch(main, 2)
    twin = copy.deepcopy(whole)
    plainly(twin, x, y, 2)
    for model, factor, part in ((first, 2, twin[:2]), (last, 4, twin[2:])):
        for p, q in zip(model.parameters(), part.parameters(), strict=True):
            assert equal(p.grad, q.grad * factor)
    assert sorted(calls) == [(False, False)] * 2 + [(True, True)] * 2


def test_a_loss_is_scaled_by_a_scaler_and_in_bfloat16():
    """GradScaler in the backward function, autocast in the forward function."""
    two_stages()
    layers, (x, y) = chain(), batch()
    twin = copy.deepcopy(nn.Sequential(*layers))
    model = nn.Sequential(*partition_uniform(layers))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def fwd_fn(inputs: list[Tensor]) -> Tensor:
        with torch.autocast(device_type(), dtype=torch.bfloat16):
            return mse(model(inputs[0]), inputs[1])

    def bwd_fn(loss: Tensor, gradient: Tensor | None) -> None:
        assert gradient is None
        scaler.scale(loss).backward()

    forward_backward(None, fwd_fn, bwd_fn, [x, y], num_microbatches=4)
    with torch.autocast(device_type(), dtype=torch.bfloat16):
        plainly(twin, x, y, 4)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(p.grad / 1024, q.grad)


def test_clipping_is_by_the_norm_over_all_stages():
    def main() -> tuple[nn.Module, Tensor]:
        two_stages()
        model = nn.Sequential(*partition_uniform(copy.deepcopy(whole)))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        return model, clip_grad_norm_(model.parameters(), 1.0)

    whole = nn.Sequential(*chain())
    (first, norm), (last, same) = launch(main, 2)
    count = sum(p.numel() for p in whole.parameters())
    assert_close(norm, torch.tensor(float(count)).sqrt())
    assert norm is same
    for p in (*first.parameters(), *last.parameters()):
        assert_close(p.grad, torch.full_like(p, count**-0.5))


def test_evaluation_returns_the_whole_batch():
    """Of several micro-batches too, without a graph; as the model's mode is; the last rank's."""
    two_stages()
    layers, (x, y) = chain(norm=True), batch()
    model = nn.Sequential(*partition_uniform(layers))
    forward_backward(None, lambda i: mse(model(i[0]), i[1]), None, [x, y], num_microbatches=4)
    twin = copy.deepcopy(model).to(stages(1)[0]).eval()
    model.eval()
    expected = twin(x.to(stages(1)[0]))
    out = forward_backward(None, lambda i: model(i), None, x, 4, forward_only=True)
    assert not out.requires_grad
    assert_close(out, expected)
    assert_close(forward_eval(lambda i: model(i), [x], torch.float32, num_microbatches=2), expected)

    def main() -> Any:
        part = list(twin)[:2] if tpc.is_first_in_pipeline_group() else list(twin)[2:]
        net = nn.Sequential(*part)
        inputs = x if tpc.is_first_in_pipeline_group() else None
        return forward_eval(lambda i: net(i), inputs, torch.float32, num_microbatches=2)

    nothing, out = launch(main, 2)
    assert nothing is None
    assert_close(out, expected)


class Script:
    """A model that a method uses, and a function that it calls."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def forward(self, inputs: list[Tensor]) -> Tensor:
        return mse(self.model(inputs[0]), inputs[1])


def call(model: nn.Module, inputs: list[Tensor]) -> Tensor:
    return mse(model(inputs[0]), inputs[1])


@pytest.mark.every
@pytest.mark.parametrize("way", ["method", "partial", "helper", "module"])
def test_the_model_is_found_where_the_function_has_it(way):
    """At the object of a method, among a partial's arguments, in a function that it calls."""
    two_stages()
    layers, (x, y) = chain(), batch()
    twin = copy.deepcopy(nn.Sequential(*layers))
    model = nn.Sequential(*partition_uniform(layers))

    def helper(x: Tensor) -> Tensor:
        return model(x)

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: list[Tensor]) -> Tensor:
            return mse(self.model(inputs[0]), inputs[1])

    fwd_fn = {
        "method": Script(model).forward,
        "partial": functools.partial(call, model),
        "helper": lambda inputs: mse(helper(inputs[0]), inputs[1]),
        "module": WithLoss(),
    }[way]
    forward_backward(None, fwd_fn, None, [x, y], num_microbatches=2)
    plainly(twin, x, y, 2)
    assert same_gradients(model, twin)


def test_copies_and_pickles_of_the_model_have_no_pipelines():
    two_stages()
    model = nn.Sequential(*partition_uniform(chain()))
    forward_backward(None, lambda i: model(i).sum(), None, batch()[0], num_microbatches=2)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not other.__dict__["_torchdistpackage_steps"]
        assert list(other.state_dict()) == list(model.state_dict())


def test_other_options_are_those_of_a_pipeline():
    two_stages()
    layers, (x, y) = chain(), batch()
    twin = copy.deepcopy(nn.Sequential(*layers))
    model = nn.Sequential(*partition_uniform(layers))
    given = {"schedule": "gpipe", "checkpoint": "always", "devices": stages(2)}
    forward_backward(None, lambda i: mse(model(i[0]), i[1]), None, [x, y], 2, **given)
    plainly(twin, x, y, 2)
    assert same_gradients(model, twin)
    ((_, pipe),) = model.__dict__["_torchdistpackage_steps"].values()
    assert (pipe.schedule, pipe.checkpoint) == ("gpipe", "always")


def test_what_a_step_needs_is_said():
    """Inputs, a model, a loss, a backward, a number of micro-batches."""
    two_stages()
    model, x = nn.Sequential(*partition_uniform(chain())), batch()[0]
    with pytest.raises(UsageError, match=r"the batch, as a tensor or several, .*got None"):
        forward_backward(None, lambda i: model(i).sum(), None, None, 2)
    with pytest.raises(UsageError, match=r"a module among the variables of fwd_fn.*test_steps"):
        forward_backward(None, lambda i: i.sum(), None, x, 2)
    with pytest.raises(bp.BlockpipeError, match=r"a loss of one element .*compute the loss in"):
        forward_backward(None, lambda i: model(i), None, x, 2)
    with pytest.raises(bp.BlockpipeError, match="expected bwd_fn to run a backward"):
        forward_backward(None, lambda i: model(i).sum(), lambda out, grad: None, x, 2)
    with pytest.raises(PlanError, match="a positive integer for num_microbatches, got 0"):
        forward_backward(None, lambda i: model(i).sum(), None, x, 0)


def test_variables_of_the_script_are_those_of_the_step():
    """A tensor and a number of the closure that change from step to step."""
    two_stages()
    layers = chain()
    twin = copy.deepcopy(nn.Sequential(*layers))
    model = nn.Sequential(*partition_uniform(layers))

    def train(step: int) -> None:
        x, y = batch()
        scale, factor = torch.full((2,), 1.0 + step), 1 + step

        def fwd_fn(inputs: list[Tensor]) -> Tensor:
            return mse(model(inputs[0]) * scale.to(inputs[0].device), inputs[1]) * factor

        forward_backward(None, fwd_fn, None, [x, y], num_microbatches=2)
        loss_fn = functools.partial(_scaled, factor=1.0 + step)
        plain_step(twin, (x,), {}, y, loss_fn, 2, "sum")

    for step in range(3):
        train(step)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert_close(p.grad, q.grad)


def _scaled(output: Tensor, target: Tensor, factor: float) -> Tensor:
    return mse(output * factor, target) * factor
