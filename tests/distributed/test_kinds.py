"""What processes compare before a step."""

import sys
from typing import Any

from torch import nn

from blockpipe.distributed.kinds import modes_in_words


def test_modes_of_shared_parts_are_counted_once() -> None:
    """As ``modules()`` and ``parameters()`` count them, in one order in each process."""
    shared, frozen = nn.Linear(2, 2), nn.Linear(2, 2, bias=False).requires_grad_(False)
    net = nn.Sequential(shared, frozen, nn.Sequential(shared, nn.Dropout().eval()))
    words = modes_in_words(net)
    assert words["trained parameters"] in ("2 yes, 1 no", "1 no, 2 yes")
    counted = [int(run.split()[0]) for run in words["modules in training mode"].split(", ")]
    assert sum(counted) == len([*net.modules()])
    again = nn.Sequential(shared, frozen, nn.Sequential(shared, nn.Dropout()))
    assert modes_in_words(again)["modules in training mode"] == "5 yes"


def test_modes_of_a_deep_model_take_few_calls() -> None:
    """Each step asks for them in every process."""
    net = nn.Sequential(*[nn.Sequential(nn.Linear(1, 1), nn.ReLU()) for _ in range(100)])
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        modes_in_words(net)
    finally:
        sys.setprofile(before)
    assert calls < 2 * len([*net.modules()])
