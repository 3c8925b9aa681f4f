"""JSON from any source, read within bounds.

``json.loads`` alone accepts texts that others refuse (a name twice, ``NaN``, half of a surrogate
pair) and goes as deep as the text says; ``Path.read_text`` reads ``/dev/zero`` until memory is
full. Every bound has a name here. A text beyond one is a ``ValueError`` that states it, from which
each caller makes an error of its own.
"""

import json
import os
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..checks import mismatch

LARGEST_TEXT = 100_000_000
"""Characters of a text; in bytes it is the limit of the safetensors format for a header."""

DEEPEST = 200
"""Brackets within each other. A plan has two for each module inside of another."""

LONGEST_NUMBER = 100
"""Digits in a row. 64 bits have 20 of them; to read a number takes the square of its length."""

# The closing quote may be missing: or each quote of a text without any would begin a search.
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NO_BRACKETS = re.compile(r"[^\[\]{}]+")
_TOO_LONG = re.compile(rf"[0-9]{{{LONGEST_NUMBER + 1}}}")
_STEP = {"[": 1, "{": 1, "]": -1, "}": -1}


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a file in UTF-8.

    Raises:
        ValueError: it is larger than :data:`LARGEST_TEXT`, or not UTF-8.
        OSError: it cannot be read.
    """
    with Path(path).open(encoding="utf-8") as file:
        text = file.read(LARGEST_TEXT + 1)
    _check_size(text)
    return text


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, has a name twice in one object, has half of a surrogate pair, or
            is beyond :data:`LARGEST_TEXT`, :data:`DEEPEST` or :data:`LONGEST_NUMBER`.

    Example:
        >>> parse_json('{"a": 1, "a": 2}')
        Traceback (most recent call last):
        ValueError: one object has the name 'a' twice
    """
    if not isinstance(text, str):
        raise ValueError(mismatch("text", text, for_="JSON"))
    _check_size(text)
    bare = _STRING.sub("", text)
    if _TOO_LONG.search(bare):
        raise ValueError(f"a number has more than {LONGEST_NUMBER} digits")
    depths = accumulate(map(_STEP.__getitem__, _NO_BRACKETS.sub("", bare)))
    if max(depths, default=0) > DEEPEST:
        raise ValueError(f"it is nested more than {DEEPEST} deep")
    value = json.loads(text, object_pairs_hook=_each_once, parse_constant=_refuse)
    if "\\u" in text or not text.isascii():
        json.dumps(value, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    return value


def _check_size(text: str) -> None:
    if len(text) > LARGEST_TEXT:
        raise ValueError(f"it is longer than {LARGEST_TEXT:,} characters")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"one object has the name {name[:100]!r} twice")
        found[name] = value
    return found


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
