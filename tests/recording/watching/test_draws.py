"""Draws from random generators of the user's own."""

from types import SimpleNamespace
from typing import Any

import torch

from blockpipe.recording.watching.draws import RandomDraws


def test_a_generator_when_an_earlier_one_is_gone_is_another_one() -> None:
    """It had the memory of the first one, and the two were taken for one of several hops."""
    run, calls = SimpleNamespace(hop=0), SimpleNamespace(refuse=lambda why: None)
    stand_ins: Any = (run, SimpleNamespace(hops=[]), calls)
    draws = RandomDraws(*stand_ins)
    for hop in range(8):
        run.hop = hop
        draws.drew(torch.Generator())
    assert [use.hops for use in draws.generators.values()] == [[hop] for hop in range(8)]
