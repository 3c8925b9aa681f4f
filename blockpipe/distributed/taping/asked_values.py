"""Tensors of the user's that no module registered, and whose values code between modules asks for.

``self.scale.item()`` is a number on the tape. What is computed with such a tensor has no need of
this: a replay reads the tensor itself.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from ..._torch.tensors import version_of
from .tape import Entry, Outside, Tape, Value, references

_MOST_ELEMENTS = 8_192  # of one that is compared by its values; a larger one by its writes


def asked_outside(tape: Tape) -> list[Tensor]:
    """Return the tensors of which a tape has values as constants, also by way of others."""
    sources: dict[int, dict[int, Tensor]] = {}  # by value
    found: dict[int, Tensor] = {}
    for entry in tape.entries:
        given: dict[int, Tensor] = {}
        for reference in references((entry.args, entry.kwargs)):
            if isinstance(reference, Outside):
                given[id(reference.tensor)] = reference.tensor
            elif isinstance(reference, Value):
                given.update(sources.get(reference.index, {}))
        if _may_have_told(entry):
            found.update(given)
        for value in (*entry.results, *entry.writes):
            if value is not None and given:
                sources[value] = {**sources.get(value, {}), **given}
    return [*found.values()]


def _may_have_told(entry: Entry) -> bool:
    """Whether it has returned no tensor, and so perhaps a value, that no run asks for again."""
    is_glue = entry.module is None and entry.answer is None
    return is_glue and not entry.results and entry.function is not Tensor.__setitem__


def value_of(tensor: Tensor) -> Hashable:
    """Return what changes when a tensor is written to."""
    is_plain = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta)
    if not is_plain or tensor.numel() > _MOST_ELEMENTS:
        return version_of(tensor)
    return repr(tensor.detach().tolist())  # in which a value that is no number is as another
