"""Keras' pipelining options: what they are here, and what its tests refuse."""

import copy
import enum

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.compat import keras
from blockpipe.devices.devices import default_devices
from blockpipe.errors import PlanError, UsageError

from ...parity import any_loss, plain_step
from ...stage_devices import equal


class Method(enum.Enum):
    """As TensorFlow's enumeration has its members."""

    SUM = 0
    MEAN = 1


@pytest.mark.parametrize("method", ["sum", "mean", Method.MEAN])
def test_a_pipeline_with_keras_options(method):
    """Two stages on one device; gradients are added up, or their mean."""
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    keras.set_pipeline_stage_assignment(net, [0, 0, 1])
    twin, x = copy.deepcopy(net), torch.randn(6, 4)
    options = keras.pipelining_options(
        gradient_accumulation_steps_per_replica=3,
        device_mapping=[0, 0],
        gradient_accumulation_reduction_method=method,
    )
    pipe = bp.Pipeline(net, **options)
    loss = pipe.forward_backward(x, loss_fn=any_loss).loss
    reduction = "sum" if method == "sum" else "mean"
    assert equal(loss, plain_step(twin, (x,), {}, None, any_loss, 3, reduction))
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert equal(p.grad, q.grad)


def test_schedules_and_offloading():
    assert keras.pipelining_options()["loss_reduction"] == "sum"
    assert "devices" not in keras.pipelining_options()
    assert keras.pipelining_options(pipeline_schedule="Sequential")["schedule"] == "sequential"
    assert keras.pipelining_options(pipeline_schedule="Interleaved")["schedule"] == "1f1b"
    assert keras.pipelining_options(offload_activations=True)["offload"] is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_accumulation_steps_per_replica": -1}, "a positive integer .*, got -1"),
        ({"device_mapping": [0.0] * 10}, "a list of integers from 0 on for device_mapping"),
        ({"gradient_accumulation_reduction_method": "max"}, "'sum', 'mean'.*got 'max'"),
        ({"pipeline_schedule": "GPipe"}, "'Grouped', 'Interleaved', 'Sequential'"),
    ],
)
def test_wrong_values_are_refused(options, message):
    with pytest.raises(PlanError, match=message):
        keras.pipelining_options(**options)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("gradient_accumulation_count", "gradient_accumulation_steps_per_replica"),
        ("gradient_accumulation_steps", "pass gradient_accumulation_steps_per_replica"),
        ("recomputation_mode", "checkpoint='except_last' to Pipeline"),
        ("repeat_count", "the training loop is yours"),
        ("batch_serialization_iterations", "runs once for each micro-batch"),
        ("accumulate_outfeed", "see the page"),
    ],
)
def test_other_arguments_are_refused_with_the_reason(name, instead):
    with pytest.raises(UsageError, match=f"{name}.*test_options.*{instead}"):
        keras.pipelining_options(**{name: 10})


def test_a_device_that_is_not_there_is_refused():
    if default_devices() is None:
        assert keras.pipelining_options(device_mapping=[0, 7])["devices"] == ["cpu:0", "cpu:7"]
    else:
        with pytest.raises(PlanError, match="numbers of the machine's"):
            keras.pipelining_options(device_mapping=[0, 1000])
