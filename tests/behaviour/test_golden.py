"""Summaries of real models, to the letter: ``pytest --update-golden`` accepts what changed.

Lines of library files are left out, since a library's update moves them. What else an update may change
(how many operations a forward has, what an attention costs) is no fault here: a file's first line says which
versions it is of, and with others a difference is a skip that names them.
"""

import dataclasses
import difflib
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import blockpipe as bp
from blockpipe.preparation import preparer
from blockpipe.reports.summary.columns import COLUMNS

from ..golden_models import MARKS, make

FILES = Path(__file__).parents[1] / "golden"
ALL = [name for name in COLUMNS if name != "device"]
PACKAGES = {"torchvision": "torchvision", "timm": "timm", "huggingface": "transformers"}


def versions(family: str) -> str:
    """The libraries' that a summary of a family's model depends on; which build it is does not count."""
    return ", ".join(
        f"{package} {metadata.version(package).partition('+')[0]}"
        for package in ("torch", PACKAGES[family])
    )


def without_library_lines(value: Any) -> Any:
    """The same data, where ``modeling_llama.py:63`` is ``modeling_llama.py:0``.

    In the data and not in the text: a number with more digits would make a column wider.
    """
    if isinstance(value, str):
        return re.sub(r"(?<!golden_models)(\.py):\d+", r"\1:0", value)
    if isinstance(value, list):
        value[:] = [without_library_lines(item) for item in value]
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name not in ("parent", "inbound", "reader"):  # calls, which are in the list
                setattr(value, field.name, without_library_lines(getattr(value, field.name)))
    return value


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Any:
    def check(name: str, of: str, text: str) -> None:
        file = FILES / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            file.write_text(f"{of}\n\n{text}\n")
        assert file.exists(), f"{file.name} is missing: pytest --update-golden writes it"
        accepted, _, *expected = file.read_text().splitlines()
        diff = difflib.unified_diff(expected, text.splitlines(), "golden", "now", lineterm="")
        found = "\n".join(diff)
        if found and accepted != of:
            pytest.skip(f"{file.name} is of {accepted}, and differs with {of}")
        assert not found, f"{file.name} differs (pytest --update-golden accepts it):\n{found}"

    return check


@pytest.mark.parametrize("name", MARKS)
@pytest.mark.filterwarnings("ignore")
def test_summary_is_as_accepted(name: str, golden: Any) -> None:
    """What is usual, and a deep tree with all columns."""
    family = MARKS[name][0]
    pytest.importorskip(PACKAGES[family])
    model, args, kwargs = make(name)
    recording = without_library_lines(bp.record(model, args, kwargs))
    deep, _, _ = str(recording.summary(depth=3, columns=ALL)).partition("\n\n")
    explained = recording.explain(recording.calls[-1].path)
    golden(name, versions(family), "\n\n\n".join([str(recording.summary()), deep, explained]))


def test_a_pipelines_summary_is_as_accepted(golden: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With devices, peaks and a predicted step."""
    record = preparer.record_planned
    monkeypatch.setattr(
        preparer,
        "record_planned",
        lambda *args, **named: without_library_lines(record(*args, **named)),
    )
    model, args, _ = make("resnet50")
    pipe = bp.Pipeline(model, devices=["cpu"] * 3, chunks=3, checkpoint="except_last")
    text = f"{pipe.summary(*args)}\n\n\n{pipe.explain('layer4', *args)}"
    golden("resnet50_pipeline", versions("torchvision"), text)


def test_a_summary_that_changed_is_shown_as_a_difference(
    golden: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is written; with other versions of the libraries it is a skip."""
    monkeypatch.setattr(request.config.option, "update_golden", False)
    before = (FILES / "resnet50.txt").read_text()
    of, _, *text = before.splitlines()
    changed = "\n".join(text).replace("ResNet", "another")
    with pytest.raises(AssertionError, match=r"resnet50\.txt differs[\s\S]*\+another"):
        golden("resnet50", of, changed)
    with pytest.raises(pytest.skip.Exception, match=f"is of {of}, and differs with torch 0.1"):
        golden("resnet50", "torch 0.1", changed)
    golden("resnet50", "torch 0.1", "\n".join(text))
    assert (FILES / "resnet50.txt").read_text() == before
