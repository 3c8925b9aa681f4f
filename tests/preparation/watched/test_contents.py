"""What counts as the content of a value."""

import array
import fractions
import functools
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from blockpipe.preparation.watched.contents import Contents


class Settings:
    """An object of the user's."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def _times(factor: float) -> Callable[[float], float]:
    return lambda x: x * factor


SEEN = [Settings(scale=n) for n in range(3)]  # alive
MAKERS: list[Callable[[int], Any]] = [
    lambda n: n,
    lambda n: [1, [n]],
    lambda n: (1, {"a": n}),
    lambda n: {1, n},
    lambda n: OrderedDict(a=n),
    lambda n: deque([n]),
    lambda n: slice(0, n),
    lambda n: range(n),
    lambda n: complex(n),
    lambda n: fractions.Fraction(1, n),
    lambda n: np.full(3, n),
    lambda n: np.float32(n),
    lambda n: [torch.float16, torch.float32, torch.float64][n],
    lambda n: functools.partial(max, n),
    lambda n: _times(n),
    lambda n: Settings(scale=[n]),
    lambda n: array.array("d", [n]),
    lambda n: bytearray([n]),
    lambda n: types.MappingProxyType({"a": [n]}),
    lambda n: weakref.ref(SEEN[n]),
    lambda n: weakref.WeakValueDictionary(one=SEEN[n]),
    lambda n: Settings(scale=1, other=n) if n == 1 else Settings(scale=2, other=n),
]


@pytest.mark.parametrize("make", MAKERS)
def test_contents_are_equal_when_the_values_are_made_alike_and_only_then(make: Any) -> None:
    """Whatever they are."""
    contents = Contents(frozenset(["scale"]))
    values = [make(1), make(1), make(2)]  # alive, as long as the contents are compared
    found = [*map(contents.of, values)]
    assert found[0] == found[1] != found[2]
    assert len({*found}) == 2


def test_what_code_does_not_mention_does_not_count() -> None:
    contents = Contents(frozenset(["scale"]))
    one, other = Settings(scale=1, calls=1), Settings(scale=1, calls=2)
    assert contents.of(one) == contents.of(other)
    assert Contents(None).of(one) != Contents(None).of(other)


def test_a_tensor_is_itself_whatever_its_value_is() -> None:
    """A tape has it, and reads its value in each run."""
    one, other = torch.ones(2), torch.ones(2)
    assert Contents(None).of([one]) == Contents(None).of([one])
    assert Contents(None).of([one]) != Contents(None).of([other])


def test_what_contains_itself_has_a_content() -> None:
    values: list[Any] = [1]
    values.append(values)
    assert Contents(None).of(values) == Contents(None).of(values)


def test_a_view_of_memory_that_may_be_written_is_itself() -> None:
    """It has a hash that raises another error than others do."""
    one, other = memoryview(bytearray(2)), memoryview(bytearray(2))
    assert Contents(None).of(one) == Contents(None).of(one)
    assert Contents(None).of(one) != Contents(None).of(other)
