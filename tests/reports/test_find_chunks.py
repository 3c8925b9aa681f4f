"""find_chunks: what it tries, what it leaves alone, and what its numbers are."""

import itertools
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockpipe as bp
from blockpipe.errors import ScheduleError, UsageError
from blockpipe.execution.step_runner import StepRunner
from blockpipe.reports import find_chunks as chunks_module
from blockpipe.reports.find_chunks import ChunksReport
from blockpipe.schedules.builders import make_schedule

from ..stage_devices import equal, stages


def _pipe(chunks: int = 2, **options: Any) -> bp.Pipeline:
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(), nn.Linear(16, 4))
    bp.begin_blocks(net, {"2": 1})
    return bp.Pipeline(net, devices=stages(2), chunks=chunks, **options)


def _batch(samples: int = 12) -> dict[str, Any]:
    return {"target": torch.randint(0, 4, (samples,)), "loss_fn": F.cross_entropy, "repeats": 1}


def _tried(report: ChunksReport) -> list[tuple[str, int]]:
    return [(trial.schedule, trial.microbatches) for trial in report.trials]


def test_candidates_are_powers_of_two_and_the_pipelines_own():
    """Powers of two up to eight for each stage, and the pipeline's own; no more than samples."""
    report = _pipe(chunks=3).find_chunks(torch.randn(12, 8), **_batch() | {"candidates": None})
    assert [n for _, n in _tried(report)] == [1, 2, 3, 4, 8, 12]
    assert all(trial.seconds is not None and trial.seconds > 0 for trial in report.trials)


def test_a_batch_smaller_than_the_candidates():
    """What makes the same micro-batches is tried once; an odd batch is no error."""
    report = _pipe().find_chunks(torch.randn(5, 8), **_batch(5), candidates=[2, 8, 5, 16])
    assert _tried(report) == [("1f1b", 2), ("1f1b", 5)]
    assert [trial.chunks for trial in report.trials] == [2, 8]


def test_each_schedule_is_tried_with_each_number():
    """Each is tried with each number, ``"uncut"`` without a prediction."""
    report = _pipe().find_chunks(
        torch.randn(12, 8), **_batch(), candidates=[2, 4], schedules=["gpipe", "uncut"]
    )
    assert _tried(report) == [("gpipe", 2), ("gpipe", 4), ("uncut", 2), ("uncut", 4)]
    assert [t.bubble is None for t in report.trials] == [False, False, True, True]


def test_a_schedule_of_ones_own_for_other_microbatches():
    """It is told, and the others are tried."""
    own = make_schedule("gpipe", (0, 1), 4)
    report = _pipe().find_chunks(torch.randn(12, 8), **_batch(), candidates=[2, 4], schedules=[own])
    assert report.trials[0].seconds is None
    assert "is for 4 micro-batches" in str(report.trials[0].why_not)
    assert report.best is report.trials[1]


def test_seconds_are_the_median_after_the_first_step(monkeypatch: pytest.MonkeyPatch):
    """The median of the steps after the first, by a clock of the test's; the best is the least."""
    clock = itertools.count()
    left_out = 9.0  # the first step of each candidate
    took = [left_out, left_out, 1.0, 4.0, 5.0, 2.0, 3.0, 3.0]  # in turns
    times: list[float] = []
    for i, seconds in enumerate(took):
        times += [100.0 * i, 100.0 * i + seconds]
    own = SimpleNamespace(perf_counter=lambda: times[next(clock)])
    monkeypatch.setattr(chunks_module, "time", own)  # not that of a recording
    report = _find_by_clock()
    one, other = report.trials
    assert one.seconds == statistics.median([1.0, 5.0, 3.0])
    assert other.seconds == statistics.median([4.0, 2.0, 3.0])
    assert one.samples_per_second == 12 / 3.0
    assert report.repeats == 3


class _NoStep(StepRunner):
    def forward_backward(self, *args: Any, **kwargs: Any) -> None:
        pass


def _find_by_clock() -> ChunksReport:
    report = ChunksReport([], 12, 3)
    pipe = _pipe(sample=(torch.randn(2, 8),))
    tries = [
        chunks_module._TrialRun(
            chunks_module.Trial("1f1b", m, m),
            _NoStep(pipe._preparer, pipe._options),
            pipe._preparer.known.copy(),
        )
        for m in (2, 3)
    ]
    batch = chunks_module.StepArguments((torch.randn(12, 8),), {}, None, torch.sum)
    chunks_module._measure(batch, tries, 3)
    for one in tries:
        one.trial.seconds = statistics.median(one.times)
        one.trial.samples_per_second = 12 / one.trial.seconds
        report.trials.append(one.trial)
    return report


def test_predictions_are_the_pipelines():
    """Memory is what ``pipe.memory`` says at that number, the bubble the schedule's."""
    x = torch.randn(12, 8)
    report = _pipe().find_chunks(x, **_batch(), candidates=[2, 4], optimizer="adam")
    for trial in report.trials:
        pipe = _pipe(chunks=trial.chunks)
        told = pipe.memory(x, optimizer="adam")
        assert trial.memory == max(told.by_device.values())
        prepared = pipe._preparer.sketch(pipe._runner.split((x,), {})[0], pipe._options)
        played = bp.simulate(make_schedule("1f1b", (0, 1), trial.microbatches), prepared.costs)
        assert trial.bubble == pytest.approx(played.bubble)
        assert trial.predicted_seconds == pytest.approx(played.makespan)


def test_what_is_over_the_limit_is_told_and_not_tried():
    """What is predicted to need more than there is is told, and not tried."""
    x = torch.randn(12, 8)
    need = [t.memory for t in _pipe().find_chunks(x, **_batch(), candidates=[1, 12]).trials]
    assert need[1] is not None
    assert need[0] is not None
    assert need[1] < need[0]
    report = _pipe().find_chunks(x, **_batch(), candidates=[1, 12], limit=need[1])
    assert "predicted, over" in str(report.trials[0].why_not)
    assert report.best is report.trials[1]
    nothing = _pipe().find_chunks(x, **_batch(), candidates=[1], limit=1)
    assert nothing.best is None
    assert "no candidate could be measured" in str(nothing)


class _Hungry(nn.Linear):
    """Runs out of memory above a size."""

    error: Exception = torch.OutOfMemoryError("out of memory, on purpose")

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 4 and not type(x).__name__.startswith("Fake"):
            raise self.error
        return super().forward(x)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("on purpose"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"),
    ],
)
def test_out_of_memory_is_told(error: Exception):
    """And the others are tried all the same."""
    net = nn.Sequential(_Hungry(8, 8), nn.Linear(8, 4))
    net[0].error = error
    bp.begin_blocks(net, {"1": 1})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, sample=(torch.randn(8, 8),))
    report = pipe.find_chunks(torch.randn(8, 8), loss_fn=torch.sum, candidates=[1, 2], repeats=2)
    assert [trial.why_not for trial in report.trials] == ["out of memory", None]
    assert report.best is report.trials[1]


def test_a_failure_of_some_is_told():
    """Batch norm in micro-batches of one sample, at once or at the end."""
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    bp.begin_blocks(net, {"2": 1})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    report = pipe.find_chunks(torch.randn(5, 8), loss_fn=torch.sum, candidates=[2, 3, 5])
    assert [trial.seconds is None for trial in report.trials] == [False, True, True]
    assert all("more than 1 value" in str(trial.why_not) for trial in report.trials[1:])
    assert equal(net[1].num_batches_tracked, torch.tensor(0))


def test_a_failure_of_all_is_the_callers():
    """It comes with its note, and nothing is left of the search."""
    net = nn.Sequential(_Hungry(8, 8), nn.Linear(8, 4))
    net[0].error = RuntimeError("broken on purpose")
    bp.begin_blocks(net, {"1": 1})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, sample=(torch.randn(8, 8),))
    with pytest.raises(RuntimeError, match="on purpose"):
        pipe.find_chunks(torch.randn(8, 8), loss_fn=torch.sum, candidates=[1])
    assert (pipe.chunks, pipe.schedule) == (4, "1f1b")
    assert net[0].weight.grad is None


def test_a_search_leaves_nothing_behind():
    """Values, gradients, statistics, generators, options and recordings are as they were."""
    pipe = _pipe()
    x, given = torch.randn(12, 8), _batch()
    pipe.forward_backward(x, target=given["target"], loss_fn=F.cross_entropy)
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    gradients = [p.grad for p in pipe.parameters()]
    copies = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
    known, state = pipe._preparer.known, torch.get_rng_state()
    pipe.find_chunks(x, **given, schedules=["1f1b", "gpipe"])
    assert all(equal(v, before[k]) for k, v in pipe.state_dict().items())
    assert all(p.grad is g for p, g in zip(pipe.parameters(), gradients, strict=True))
    assert all(equal(p.grad, c) for p, c in zip(pipe.parameters(), copies, strict=True))
    assert equal(torch.get_rng_state(), state)
    assert pipe._preparer.known is known
    assert (pipe.chunks, pipe.schedule) == (2, "1f1b")


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"candidates": [0, 2]}, UsageError, r"positive integers for candidates, got \[0\]"),
        ({"candidates": ["2"]}, UsageError, "positive integers for candidates"),
        ({"candidates": 3.5}, UsageError, r"positive integers for candidates, got \[3.5\]"),
        ({"candidates": []}, UsageError, "positive integers for candidates"),
        ({"repeats": 0}, UsageError, "a positive integer for repeats, got"),
        ({"repeats": True}, UsageError, "a positive integer for repeats, got"),
        ({"schedules": ["1f2b"]}, ScheduleError, "for schedule, got"),
        ({"schedules": []}, UsageError, "at least one schedule for schedules"),
        ({"optimizer": "adamm"}, UsageError, "expected a known optimizer"),
        ({"limit": 0}, UsageError, "expected a number of bytes for limit, got 0"),
        ({"loss_fn": 3}, UsageError, "expected a callable .* for loss_fn"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], error: type[Exception], match: str):
    """It is an error before anything runs."""
    pipe = _pipe()
    with pytest.raises(error, match=match):
        pipe.find_chunks(torch.randn(12, 8), **_batch() | given)
    assert pipe.recording is None


def test_the_table_has_a_line_for_each_trial():
    """A line for each trial, a star at the best, and how to use it."""
    report = ChunksReport(
        [
            chunks_module.Trial("1f1b", 2, 2, 0.004, 250.0, 0.003, 0.25, 2048),
            chunks_module.Trial("1f1b", 4, 4, 0.002, 500.0, 0.002, 0.1, 1024),
            chunks_module.Trial("1f1b", 8, 8, why_not="out of memory"),
        ],
        100,
        5,
    )
    lines = str(report).splitlines()
    assert lines[2].split() == ["1f1b", "2", "4.00", "250.0", "3.00", "25.0", "%", "2.0", "KiB"]
    assert lines[3].split()[:3] == ["1f1b", "4", "2.00*"]
    assert lines[4].split() == ["1f1b", "8", "-", "-", "-", "-", "-"]
    assert "schedule='1f1b', chunks=4" in lines[6]
    assert "1f1b, 8: out of memory" in lines[7]
    assert report.to_dict()["trials"][1]["microbatches"] == 4


def test_inputs_keep_their_gradients_and_their_graphs():
    """Steps added to the gradient of a leaf, and freed the graph behind another input."""
    pipe, front, batch = _pipe(), nn.Linear(8, 8), _batch()
    leaf, before = torch.randn(12, 8, requires_grad=True), torch.ones(12, 8)
    leaf.grad = before.clone()
    pipe.find_chunks(leaf, **batch, candidates=[1, 2])
    assert equal(leaf.grad, before)
    inside = front(torch.randn(12, 8))
    pipe.find_chunks(inside, **batch, candidates=[1, 2])
    assert front.weight.grad is None
    pipe.forward_backward(inside, target=batch["target"], loss_fn=F.cross_entropy)
    assert front.weight.grad is not None
