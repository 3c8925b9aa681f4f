"""The benchmark of two processes (examples/benchmarks/two_processes.py), where a candidate fails."""

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..distributed import ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cpu("the processes have no simulated accelerator"),
    ranks.NEEDS_SCHEDULES,
]

BENCHMARKS = Path(__file__).parents[2] / "examples/benchmarks"


@pytest.fixture(scope="module")
def peers() -> Iterator[Any]:
    """The script, whose modules go again: their names are everybody's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.syspath_prepend(str(BENCHMARKS))
        before = {*sys.modules}
        import peers as script

        yield script
        for name in {*sys.modules} - before:
            path = str(getattr(sys.modules[name], "__file__", ""))
            if path.startswith(str(BENCHMARKS)) or name.endswith("failing_candidates"):
                del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Raises", "rank 1 failed: ValueError: no luck"),
        ("Dies", "rank 1 ended, exit code -9"),
        ("Hangs", "no answer to 'step' from rank 0 and 1 for 20 s"),
        ("Untraceable", r"rank [01] failed: .+"),
    ],
)
def test_a_candidate_that_fails_is_named_and_the_others_are_timed(
    name: str,
    said: str,
    peers: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Long before torch's own patience is at an end; no process is left."""
    from . import failing_candidates

    monkeypatch.setitem(peers.CANDIDATES, "failing", getattr(failing_candidates, name))
    names, began = ["plain-loop", "failing"], time.monotonic()
    table = peers.measure("tiny", 2, names, repeats=1, untimed=0, checkpoint="never")
    assert time.monotonic() - began < 150
    assert "plain-loop" in table
    assert "failing" not in table
    printed = capsys.readouterr().out
    assert re.search(f"failing is left out: {said}", printed), printed
