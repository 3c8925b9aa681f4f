"""A name for each value of a tape, which says by which calls it was made and not when.

Each process tapes the forward by itself, and independent calls may come in another order there: a
forward that goes through a set of strings does that, because Python hashes strings differently in
each process. By their numbers, two masks of one shape would then be taken for one another.
"""

from __future__ import annotations

import hashlib
import re
from enum import Enum
from typing import Any

import torch

from ..._common.nested import leaf_names, leaves
from .tape import Entry, Held, Meta, Outside, Slice, Tape, Value, references

_DEVICE = re.compile(r"(cpu|cuda|xpu|mps|meta)(:\d+)?")
_IN_WORDS = (
    *(bool, int, float, complex, str, bytes, slice, type(None), Enum),
    *(torch.dtype, torch.layout, torch.memory_format),
)


def origins(tape: Tape) -> list[str]:
    """Return the name of each value: a digest of its call and of the names of what that reads."""
    return _named(tape)[0]


def digest(tape: Tape) -> str:
    """Return what is the same for two tapes whose calls are the same, in whatever order."""
    found, calls = _named(tape)
    return _digest(*sorted(calls), _words(tape.output, found))


def _named(tape: Tape) -> tuple[list[str], list[str]]:
    """Return the names of the values and of the calls."""
    found, calls = [""] * len(tape.made), []
    for at, reference in enumerate(references(tape.inputs)):
        if isinstance(reference, Value):
            found[reference.index] = f"argument {at}"
    for entry in tape.entries:
        call = _digest(_name(entry), _words((entry.args, entry.kwargs), found))
        calls.append(call)
        for value in entry.writes:
            found[value] = _digest(found[value], call)
        for at, result in enumerate(entry.results):
            if result is not None:
                found[result] = _digest(call, str(at))
    return found, calls


def _name(entry: Entry) -> str:
    if entry.module is not None:
        return f"module {entry.module}"
    return str(getattr(entry.function, "__qualname__", type(entry.function).__name__))


def _words(value: Any, found: list[str]) -> str:
    return repr(
        [*zip(leaf_names(value), (_word(leaf, found) for leaf in leaves(value)), strict=True)]
    )


def _word(leaf: Any, found: list[str]) -> str:
    if isinstance(leaf, Value):
        return found[leaf.index]
    if isinstance(leaf, Held):
        return leaf.name
    if isinstance(leaf, Slice):
        return _words(leaf.parts, found)
    if isinstance(leaf, Outside):
        return f"outside {Meta.of(leaf.tensor)}"
    if isinstance(leaf, str) and _DEVICE.fullmatch(leaf):
        return "device"  # each process may have its own
    if isinstance(leaf, _IN_WORDS):
        return str(leaf)
    return str(getattr(leaf, "__qualname__", type(leaf).__name__))


def _digest(*words: str) -> str:
    return hashlib.sha256(repr(words).encode()).hexdigest()[:16]
