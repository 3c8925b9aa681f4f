"""Find the names that code between modules mentions: what it does not mention it does not read."""

from __future__ import annotations

import dis
import os
import types
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from ..._common.callsite import users_line
from ..._common.profilers import calls_seen_by
from ...recording.reads import mentioned, reads_by_computed_names

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_TORCHS = os.path.dirname(torch.__file__) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep
_LAYERS = os.path.dirname(nn.__file__) + os.sep  # the containers among them are glue


class CodeSeen:
    """The functions that are called while entered, in this thread.

    Args:
        is_apart: returns whether what is called now is inside of a sealed call.
    """

    def __init__(self, is_apart: Callable[[], bool]) -> None:
        self._is_apart = is_apart
        self._codes: set[types.CodeType] = set()
        self._apart: set[types.CodeType] = set()  # of the sealed call that began last
        self._all: set[types.CodeType] = set()  # inside of any sealed call, too
        self._looks = calls_seen_by(self._called)
        self._is_blind = False  # a profiler is on that cannot pause

    def __enter__(self) -> Self:
        self._is_blind = not self._looks.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self._looks.__exit__(None, None, None)

    def sealed_begins(self) -> None:
        """Note that a sealed call begins."""
        self._apart = set()

    def count_sealed(self) -> None:
        """Count the code inside of the last sealed call: what it returned is a constant."""
        self._codes |= self._apart

    def _called(self, frame: types.FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not _counts(code.co_filename):
            return
        self._all.add(code)
        codes = self._apart if self._is_apart() else self._codes
        # The standard library's is called by torch and by us, too.
        before = frame.f_back
        if not _is_standard(code.co_filename) or (before and before.f_code in codes):
            codes.add(code)

    def line_that_sets(self, name: str) -> str:
        """Return ``file.py:41`` where code sets such an attribute; else where it was called."""
        for code in sorted(self._all, key=lambda c: (c not in self._codes, c.co_firstlineno)):
            for found in dis.get_instructions(code):
                if found.opname == "STORE_ATTR" and found.argval == name and found.positions:
                    return f"{code.co_filename}:{found.positions.lineno}"
        return users_line()

    def names(self) -> frozenset[str] | None:
        """Return the names; ``None``: it may read any, for it computes names, or was not seen."""
        users = [code for code in self._codes if not code.co_filename.startswith(_TORCHS)]
        if self._is_blind or any(map(reads_by_computed_names, users)):
            return None
        return frozenset[str]().union(*map(mentioned, self._codes))


def _is_standard(path: str) -> bool:
    """Whether it is a file of the standard library, or code without a file."""
    return path.startswith(("<", _STANDARD)) and "-packages" not in path


def _counts(path: str) -> bool:
    return not path.startswith((_OURS, _TORCHS)) or path.startswith(_LAYERS)
