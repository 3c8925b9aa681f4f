"""Numbers that the user's code uses as an index, a slice's bound or a loop's length.

A number that changes between steps is watched by a subclass of ``int``, which remembers the
comparisons made with it. Code in C reads an index without a call of any method, so the instruction
itself has to be looked at.
"""

import ast
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..syntax.accesses import Access
from ..syntax.effects import name_called
from .expressions import Frame

_COUNTS = ("range", "islice")  # functions whose results have as many members as a number says


class IndexUses:
    """The indices of a traced forward.

    Args:
        note: is given each of them, with the line; ``None``: nobody asks.
    """

    def __init__(self, note: Callable[[Any, str], None] | None) -> None:
        self._note = note

    def look_at(self, access: Access, frame: Frame) -> None:
        """Look at what an instruction uses. A part of a tensor leads a forward nowhere else."""
        if self._note is None:
            return
        node, found = access.node, list[ast.expr | None]()
        if isinstance(node, ast.Subscript) and not isinstance(frame.evaluated(node.value), Tensor):
            key = node.slice
            found = [key.lower, key.upper, key.step] if isinstance(key, ast.Slice) else [key]
        elif isinstance(node, ast.Call):
            found = [*node.args] if name_called(node) in _COUNTS else []
        for part in filter(None, found):
            self._note(frame.evaluated(part), frame.line)
