"""Random numbers that the code autograd calls draws, by its source.

A micro-batch's forward draws from a stream of its own. A backward draws from the process's
generators as they are, so that its numbers would depend on who else draws meanwhile.
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional

from ..._torch.tensors import generator_id
from ..entries import GeneratorUse, SharedChange
from .expressions import UNKNOWN, Frame
from .still_code import StillFrame
from .syntax.accesses import calls_of
from .values import SharedValue, shared_change

_NAMES = {
    "torch": "torch's random generator",
    "random": "Python's random generator",
    "numpy": "numpy's random generator",
}
_FUNCTIONS = frozenset(
    [
        *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm"),
        *("bernoulli", "multinomial", "normal", "poisson", "dropout", "gumbel_softmax", "rrelu"),
        *("alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"),
    ]
)
_METHODS = frozenset(
    [
        *("bernoulli", "bernoulli_", "multinomial", "normal_", "uniform_", "exponential_"),
        *("random_", "cauchy_", "geometric_", "log_normal_"),
    ]
)
_SETTERS = frozenset(["set_rng_state", "set_rng_state_all", "fork_rng", "set_state"])
_OF_USER = "give each stage, and each backward, a generator of its own"
_OF_PROCESS = f"{_OF_USER}, or draw in the forward, and keep the numbers for the backward"


class DrawnNumbers:
    """The random generators that code draws from in the backwards of hops."""

    def __init__(self) -> None:
        self._known: dict[object, SharedValue] = {}  # by a kind, or a generator's number
        self._draws_freely = False  # whether any code does not set torch's generator itself

    def note(self, frames: Iterable[StillFrame], hop: int) -> None:
        """Note what a function draws, if a backward calls it.

        Args:
            frames: the function, and what it calls.
            hop: the hop that it is on, or the number of that hop's backward.
        """
        frames = [*frames] if hop < 0 else []  # a forward has its own streams
        sets_state = any(not _SETTERS.isdisjoint(still.f_code.co_names) for still in frames)
        for still in frames:
            frame = Frame(still, {}, None)  # type: ignore[arg-type]
            for call in calls_of(still.f_code):
                source = _source_of(call, frame)
                if source is not None:
                    is_users = isinstance(source, torch.Generator)
                    key = generator_id(source) if is_users else source
                    known = self._known.setdefault(key, SharedValue(source, None))
                    line = f"{still.f_code.co_filename}:{call.lineno}"
                    known.is_set(hop, line)
                    known.is_read(hop, line)
                    known.is_constant = False
                    self._draws_freely |= key == "torch" and not sets_state

    def shared(
        self, generators: Mapping[int, GeneratorUse], *, one_each: bool
    ) -> Iterator[SharedChange]:
        """Yield the generators that a backward shares with other code. The process's are shared
        with all that draw.

        Args:
            generators: by its number, the uses of each generator of the user's in the forward.
            one_each: whether stages have a generator of torch's each, as accelerators do. Then a
                backward may set its state, as functions do that run a forward again.
        """
        for key, known in self._known.items():
            drawn_on = set(known.set_on)
            use = generators.get(key) if isinstance(key, int) else None
            if use is not None:
                known.set_on.update(use.hops)
            if isinstance(key, int):
                is_shared = len(known.set_on) > 1
            else:
                is_shared = key != "torch" or self._draws_freely or not one_each
            if is_shared:
                name = _NAMES.get(known.owner, "a torch.Generator")
                remedy = _OF_USER if isinstance(key, int) else _OF_PROCESS
                yield shared_change(known, name, drawn_on, known.first_read, remedy)


def _source_of(call: ast.Call, frame: Frame) -> Any:
    """Return the generator that a call draws from, or its kind; ``None``: it draws nothing."""
    for keyword in call.keywords:
        if keyword.arg == "generator":
            given = frame.evaluated(keyword.value)
            if given is not None:
                return given if isinstance(given, torch.Generator) else None
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    function = frame.evaluated(call.func)
    if function is UNKNOWN:
        return "torch" if isinstance(call.func, ast.Attribute) and name in _METHODS else None
    if name in _FUNCTIONS and function in (
        getattr(torch, name, None),
        getattr(functional, name, None),
    ):
        return "torch"
    owner = getattr(function, "__self__", None)
    if owner is not None and owner is getattr(random.random, "__self__", None):
        return "random"
    numpy = sys.modules.get("numpy")
    is_numpys = numpy is not None and owner is getattr(numpy.random.rand, "__self__", numpy)
    return "numpy" if is_numpys else None
