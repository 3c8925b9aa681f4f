"""What a module returns to code between modules, which has all of it but the tensors' values as
constants."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import RouteError
from ..taping.tape import REMEDY


def check_shapes(expected: list[tuple[int, ...]], found: list[Tensor], whose: str) -> None:
    """Raise :class:`RouteError` for results of other shapes than the recorded ones."""
    got = [tuple(tensor.shape) for tensor in found]
    if got != expected:
        raise RouteError(
            f"expected results of shapes {expected} from {whose}, as when it was recorded, got "
            f"{got}; sizes that depend on data must not leave the module"
        )


def check_plain(expected: list[Any], got: list[Any], whose: str) -> None:
    """Raise :class:`RouteError` for other numbers or texts than the recorded ones."""
    if repr(got) != repr(expected):  # a nan is the same one
        raise RouteError(
            f"expected {expected} beside the tensors from {whose}, as when it was recorded, got "
            f"{got}: code between modules has them as constants; return what changes in a tensor, "
            f"or, with what reads it, {REMEDY}"
        )
