"""The log switch: silent at first, one line to hear it, and nothing in a step that only repeats."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.errors import UsageError

PROGRAM = """
import torch, blockpipe as bp
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
net[1] = bp.BeginBlock(net[1], stage=1)
{}
pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
for _ in range(3):
    pipe.forward_backward(torch.ones(4, 4), loss_fn=torch.sum)
"""


def _stderr(setup: str = "", **environment: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != "BLOCKPIPE_LOG"} | environment
    run = [sys.executable, "-c", PROGRAM.format(setup)]
    return subprocess.run(run, env=env, check=True, capture_output=True, text=True).stderr


@pytest.fixture(autouse=True)
def _as_at_first() -> Iterator[None]:
    yield
    bp.set_log_level(None)


def _messages(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(r.name.removeprefix("blockpipe."), r.getMessage()) for r in caplog.records]


def _pipe(**options: object) -> bp.Pipeline:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 2))
    bp.begin_blocks(net, {"1": 1})
    return bp.Pipeline(net, devices=["cpu"] * 2, chunks=2, **options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_log_is_silent_unless_asked():
    """A library writes nothing of its own accord."""
    assert _stderr() == ""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["environment", "function"])
def test_one_switch_logs_recording_placement_and_threads_once(how: str):
    """By the variable or the function: recording, placement and threads, each told once."""
    if how == "environment":
        told = _stderr(BLOCKPIPE_LOG="INFO")
    else:
        told = _stderr("bp.set_log_level('info'); bp.set_log_level('info')")
    assert told.count("recorded Sequential(float32[2, 4])") == 1
    assert told.count("stage 1 on cpu: 2 tensors, 40 B") == 1
    assert told.count("2 micro-batches in one thread: operations are so small") == 1
    assert "DEBUG" not in told


@pytest.mark.slow
def test_a_program_with_handlers_of_its_own_hears_it_once():
    """Its root handler gets the messages; stderr does not get them a second time."""
    setup = (
        "import logging; logging.basicConfig(format='mine %(message)s'); bp.set_log_level('info')"
    )
    told = _stderr(setup)
    assert told.count("recorded Sequential") == 1
    assert all(line.startswith("mine") for line in told.splitlines())


@pytest.mark.slow
def test_an_unknown_level_in_the_environment_warns():
    """It is a warning that names the levels; the import goes on."""
    assert "BLOCKPIPE_LOG='loud' is ignored: expected one of debug, info" in _stderr(
        BLOCKPIPE_LOG="loud"
    )


@pytest.mark.parametrize("level", ["loud", "", True, -1, 1.5, []])
def test_an_unknown_level_is_an_error_that_names_the_levels(level: object):
    """It is an error that names the levels."""
    with pytest.raises(UsageError, match="'debug', 'info'"):
        bp.set_log_level(level)  # type: ignore[arg-type]


def test_log_none_puts_handler_and_level_back():
    """Handler and level are gone, and the program's own level counts again."""
    logger = logging.getLogger("blockpipe")
    handlers = list(logger.handlers)
    bp.set_log_level("debug")
    assert logger.level == logging.DEBUG
    assert len(logger.handlers) == len(handlers) + 1
    bp.set_log_level(None)
    assert logger.level == logging.NOTSET
    assert logger.handlers == handlers


def test_a_step_that_repeats_logs_nothing(caplog: pytest.LogCaptureFixture):
    """Decisions are made once: nothing is logged by the second step."""
    pipe = _pipe()
    with caplog.at_level(logging.DEBUG, logger="blockpipe"):
        pipe.forward_backward(torch.ones(4, 4), loss_fn=torch.sum)
        first = _messages(caplog)
        caplog.clear()
        pipe.forward_backward(torch.ones(4, 4), loss_fn=torch.sum)
    assert _messages(caplog) == []
    assert ("execution.step", "2 micro-batches on 2 lanes, a thread each") in first
    assert any(
        name == "preparation.prepared" and text.startswith("schedule 1f1b") for name, text in first
    )


def test_a_second_recording_logs_why(caplog: pytest.LogCaptureFixture):
    """Another mode, and a model that was changed."""
    pipe = _pipe(sample=(torch.ones(2, 4),))
    with caplog.at_level(logging.INFO, logger="blockpipe"):
        pipe.module.eval()
        pipe(torch.ones(4, 4))
        pipe.module[2] = nn.Linear(4, 2)
        pipe(torch.ones(4, 4))
    told = [text for name, text in _messages(caplog) if name == "preparation.preparer"]
    assert any(text.startswith("recording once more: other modes") for text in told)
    assert any(text.startswith("recording anew: modules or parameters") for text in told)


def test_a_real_recording_logs_why(caplog: pytest.LogCaptureFixture):
    """The recording says what the model asked for."""

    class Asks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 0 else x

    with caplog.at_level(logging.INFO, logger="blockpipe"):
        bp.record(Asks(4, 4), torch.ones(1, 4))
    assert any("for on fake tensors it fails: DataDep" in text for _, text in _messages(caplog))


def test_auto_logs_what_it_chose_and_why(caplog: pytest.LogCaptureFixture):
    """With the choice's reason."""
    pipe = _pipe(schedule="auto")
    with caplog.at_level(logging.INFO, logger="blockpipe"):
        pipe.forward_backward(torch.ones(4, 4), loss_fn=torch.sum)
    chosen = [text for _, text in _messages(caplog) if text.startswith("schedule ")]
    assert len(chosen) == 1
    assert "(auto: " in chosen[0]


def test_filling_logs_what_and_from_where(caplog: pytest.LogCaptureFixture):
    """Weights for a model on the meta device, and for one that has values."""
    values = {name: torch.zeros_like(t) for name, t in nn.Linear(4, 2).state_dict().items()}
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    with caplog.at_level(logging.INFO, logger="blockpipe"):
        bp.Pipeline(model, devices=["cpu"], weights=values, sample=(torch.ones(1, 4),))
        bp.Pipeline(nn.Linear(4, 2), devices=["cpu"], weights=values)
    told = [text for name, text in _messages(caplog) if name == "weights.materialize"]
    assert told == ["filled Linear from weights, stages [0]", "loaded 2 tensors into Linear"]


def test_a_recording_at_a_prompt_is_one_line():
    """One line, whatever it holds; in a notebook its summary. A memory report is its table."""
    pipe = _pipe()
    recording = bp.record(pipe.module, torch.ones(4, 4))
    assert repr(recording) == "<Recording of Sequential: 2 stages, 2 hops, 4 calls, 30 parameters>"
    assert recording._repr_html_() == recording.summary()._repr_html_()
    report = pipe.memory(torch.ones(4, 4))
    assert repr(report) == str(report)


def test_the_repr_of_a_pipeline_names_stages_and_options():
    """The model by name, stages with devices, what differs from the usual; not its modules."""
    pipe = _pipe(schedule="gpipe", checkpoint="always")
    assert "not placed yet" in repr(pipe)
    assert "devices: cpu, cpu" in repr(pipe)
    pipe.forward_backward(torch.ones(4, 4), loss_fn=torch.sum)
    first, *stages = repr(pipe).splitlines()
    assert first == (
        "Pipeline(Sequential, 30 parameters, schedule='gpipe', chunks=2, checkpoint='always')"
    )
    assert len(stages) == 2
    assert stages[0].startswith("  stage 0 on cpu: 20 parameters, 80 B, begins at the start")
    assert stages[1].startswith("  stage 1 on cpu: 10 parameters, 40 B, begins at test_log.py:")
