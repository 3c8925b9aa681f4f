"""What people type first by another library's names, each with the words of the error that says what
was meant.

``test_first_tries`` has those by Blockpipe's names.
"""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import blockpipe as bp
from blockpipe.compat import keras, poptorch
from blockpipe.compat.torchgpipe import GPipe

from ..models import linears
from ..stage_devices import is_simulated, stages

X = torch.ones(4, 4)


def gpipe() -> GPipe:
    return GPipe(linears(2), [1, 1], devices=stages(2), chunks=2)


# By what is typed: what it does, and words of the error.
TRIES: dict[str, tuple[Callable[[], Any], str]] = {
    "GPipe(m, micro_batches=)": (
        lambda: GPipe(linears(2), [1, 1], micro_batches=4),  # type: ignore[call-arg]
        "GPipe() got an unexpected keyword argument 'micro_batches'",
    ),
    "get_pipeline_stage_assignment(m)": (
        lambda: keras.get_pipeline_stage_assignment(linears(2)),
        "write get_pipeline_stage_assignment(model, x)",
    ),
    "get_pipeline_stage_assignment(pipe)": (
        lambda: keras.get_pipeline_stage_assignment(bp.Pipeline(linears(2))),
        "first call: get_pipeline_stage_assignment(pipe, x)",
    ),
    "get_pipeline_stage_assignment(m, (8, 4))": (
        lambda: keras.get_pipeline_stage_assignment(linears(2), (8, 4)),
        "pass tensors, not their shapes: torch.zeros(8, 4)",
    ),
    "print_…_summary(m)": (
        lambda: keras.print_pipeline_stage_assignment_summary(linears(2)),
        "write print_pipeline_stage_assignment_summary(model, args=x)",
    ),
    "print_…_summary(pipe)": (
        lambda: keras.print_pipeline_stage_assignment_summary(bp.Pipeline(linears(2))),
        "first call: print_pipeline_stage_assignment_summary(pipe, args=x)",
    ),
    "print_…_summary(m, x)": (
        lambda: keras.print_pipeline_stage_assignment_summary(linears(2), X),  # type: ignore[arg-type]
        "pass a sample by name: args=…",
    ),
    "keras.Sequential": (lambda: keras.Sequential, "PyTorch's: torch.nn.Sequential"),
    "poptorch.TrainingModel": (lambda: poptorch.TrainingModel, "did you mean 'trainingModel'?"),
    "opts.gradientAccumulation()": (
        lambda: poptorch.Options().gradientAccumulation(4),
        "it is one of Training: Options().Training.gradientAccumulation(…)",
    ),
    "training_model.getLatency()": (
        lambda: poptorch.inferenceModel(linears(2)).getLatency(),
        "measure a step by model.pipeline.profile()",
    ),
    "GPipe(…)(x, x)": (lambda: gpipe()(X, X), "got 2 by position"),
    "GPipe(…)(x=x)": (lambda: gpipe()(x=X), "got 0 by position and ['x'] by name"),
}  # fmt: skip


@pytest.mark.parametrize("typed", TRIES)
def test_a_first_try_by_another_librarys_name_says_what_was_meant(typed: str) -> None:
    """Each row of the table."""
    call, words = TRIES[typed]
    with pytest.raises(Exception, match=re.escape(words)):
        call()


def test_a_poptorch_model_prints_what_runs_it() -> None:
    model = poptorch.inferenceModel(linears(2), devices=stages(2))
    assert str(model) == "PoplarExecutor(Sequential): Options(), not called yet"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one micro-batch keeps one of two devices at work
        model(X)
    assert "PoplarExecutor(Sequential): Pipeline(Sequential" in str(model)


@pytest.mark.skipif(not is_simulated(), reason="lanes of the CPU are one device")
def test_one_micro_batch_on_several_devices_is_warned_of_once_through_a_door() -> None:
    """Under the schedule that was asked for: the door changes no option to have no warning."""
    model = poptorch.inferenceModel(linears(2), devices=stages(2))
    said = "chunks=1 on 2 devices: only one works at a time; .* 8 micro-batches"
    with pytest.warns(UserWarning, match=said) as caught:
        model(X)
    assert [Path(warning.filename).name for warning in caught] == ["test_first_tries_by_door.py"]
    assert model.pipeline.schedule == "1f1b"
