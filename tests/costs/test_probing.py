"""Rates are measured once, when a prediction is asked for, and shown. No time is asserted."""

import threading

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.costs import probing
from blockpipe.costs.probing import copy_line, rates_of
from blockpipe.costs.rates import STATED_ACCELERATOR, STATED_CPU
from blockpipe.costs.work import CONVOLUTION, KINDS, PRODUCT

from ..stage_devices import stages

FIND, TIME_COPIES = probing._find, probing._time_copies  # before the fixture takes them off


@pytest.fixture
def measures(monkeypatch):
    """Real measurements, of small probes; yields what was measured."""
    found = []
    timed = probing._Sample._seconds

    def note(sample):
        found.append(threading.current_thread().name)
        return timed(sample)

    monkeypatch.setattr(probing, "_find", FIND)
    monkeypatch.setattr(probing, "_time_copies", TIME_COPIES)
    monkeypatch.setattr(probing, "_SIZES", 3)
    monkeypatch.setattr(probing._Sample, "_seconds", note)
    return found


def net_and_pipe(**options):
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    bp.begin_blocks(net, {"2": 1})
    return bp.Pipeline(net, devices=stages(2), chunks=2, **options), torch.ones(4, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_measured(measures, kind):
    """Forward and backward take time, and more for more work."""
    dtype = "float32" if kind in (PRODUCT, CONVOLUTION) else ""
    pair = rates_of(stages(1)[0], 1).pair(kind, dtype)
    for line in (pair.forward, pair.backward):
        assert [amount for amount, _ in line.points] == sorted(a for a, _ in line.points)
        assert [s for _, s in line.points] == sorted(s for _, s in line.points)
        assert line.per_byte >= 0
    assert pair.forward.points[0][1] > 0
    assert measures


def test_a_step_measures_nothing(measures):
    """Only what is asked for a prediction does."""
    pipe, x = net_and_pipe()
    pipe.forward_backward(x, loss_fn=torch.sum)
    pipe.memory(x)
    assert not measures
    pipe.summary(x)
    assert measures


def test_auto_measures_in_its_first_step(measures):
    """And says so."""
    pipe, x = net_and_pipe(schedule="auto")
    pipe.forward_backward(x, loss_fn=torch.sum)
    assert measures
    count = len(measures)
    pipe.forward_backward(x, loss_fn=torch.sum)
    assert len(measures) == count
    assert f"auto: by rates measured on {stages(1)[0]}" in str(pipe.summary())


def test_a_device_is_measured_once_for_each_number_of_threads(measures):
    rates = rates_of("cpu", 1)
    assert rates_of("cpu", 1) is rates
    assert rates_of("cpu", 2) is not rates
    assert rates.source == "measured on cpu, 1 thread"
    assert rates_of("cpu", 2).source == "measured on cpu, 2 threads"
    rates.pair("pass")
    count = len(measures)
    rates.pair("pass")
    assert len(measures) == count


def test_lanes_share_the_threads(measures, monkeypatch):
    """Of the CPU: a stage's operations have its share of them."""
    torch.set_num_threads(4)
    pipe, x = net_and_pipe()
    if pipe.devices[0].type == "cpu":
        assert "measured on cpu, 2 threads" in str(pipe.summary(x))
    plan = bp.balance(pipe.module, x, 2, measure=False, devices=["cpu"] * 2)
    assert "times are estimated by rates measured on cpu, 2 threads" in plan.notes


def test_probes_leave_nothing_behind(measures):
    """Neither the caller's modes nor its random numbers have a part in it."""
    before = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        pair = rates_of("cpu", 1).pair("random")
    assert pair.forward.points[0][1] > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert set(measures) == {"blockpipe probe"}
    assert "blockpipe probe" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("device", "known", "why"),
    [
        ("cuda:99", STATED_ACCELERATOR, "cuda:99 is not there"),
        ("the large one", STATED_ACCELERATOR, "the large one is not there"),
        ("meta", STATED_CPU, "meta computes nothing"),
    ],
)
def test_what_cannot_be_measured_is_stated(measures, device, known, why):
    rates = rates_of(device)
    assert rates.source == f"{known.source}: {why}"
    assert rates.pair(PRODUCT, "float32") == known.pair(PRODUCT, "float32")
    assert not measures


def test_a_probe_that_does_not_run_has_another_stand_in_for_it(measures, monkeypatch):
    """As where a device has no kernel for it."""

    def fails(*operands):
        raise NotImplementedError

    probe = probing._PROBES["window"]
    monkeypatch.setitem(probing._PROBES, "window", probe._replace(run=fails))
    rates = rates_of("cpu", 1)
    assert len(rates.pair("window").forward.points) == 3
    for kind in KINDS:
        monkeypatch.setitem(probing._PROBES, kind, probe._replace(run=fails))
    assert rates.pair("function") == STATED_CPU.pair("function")


def test_copy_lines_take_no_time_on_one_device():
    """Where there is nothing to copy it takes no time; between devices, what was measured."""
    cpu = torch.device("cpu")
    assert copy_line(cpu, cpu).seconds(1e9) == 0
    there = torch.device(stages(2)[1])
    if there != cpu:
        line = TIME_COPIES(cpu, there)
        assert 0 < line.seconds(1) <= line.seconds(1e9)
