"""Looks at values between steps that an interrupt ends half-way."""

from itertools import count

import pytest
from torch import Tensor, nn

from blockpipe.preparation.watched.watched_values import WatchedValues

from ..interrupting import interrupting, traced


class Options:
    def __init__(self, twice: int) -> None:
        self.twice = twice


class Turning(nn.Module):
    """Turns by what an object holds that is replaced between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.options, self.calls = Options(0), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return 2 * x if self.options.twice else x


@pytest.mark.slow
def test_after_an_interrupted_look_all_recordings_are_made_anew() -> None:
    """Wherever it comes: those of before do not count for the new values, and later
    changes of the new objects are seen."""

    def look() -> None:
        if not watched.has_turned():
            watched.known_by()
            return
        watched.look_around()
        watched.known_by()

    for bytecode in count(1, 17):
        net = Turning()
        watched = WatchedValues(net)
        watched.look_around()
        for net.calls in range(3):
            watched.step_is_over()
        for options in (Options(1), Options(2)):  # the second one leads to a look into it
            net.options = options
            if options.twice == 1:
                look()
        before = watched.known_by()
        net.options = Options(3)
        try:
            traced(interrupting(bytecode, [0]), look)
        except KeyboardInterrupt:
            assert watched.has_turned() or watched.known_by() != before, bytecode
        else:
            break
        watched.look_around()
        watched.has_turned()
        keys = watched.known_by()
        net.options.twice = 4
        assert watched.has_turned() or watched.known_by() != keys, bytecode
    assert bytecode > 100
