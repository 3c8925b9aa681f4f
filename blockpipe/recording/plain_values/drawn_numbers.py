"""Random numbers that the code autograd calls draws, and seeds of the user's own generators, by the
source: no operation shows them.

A micro-batch's forward draws from a stream of its own. A backward draws from the process's
generators as they are, so that its numbers would depend on who else draws meanwhile.
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution
from torch.nn import functional

from ..._common.libraries import is_users
from ..._torch.tensors import generator_id
from ...restoring.contents import behind_generator, is_generator, is_seeds
from ...restoring.holders import Holder
from ..calls import Call
from ..entries import GeneratorUse, SharedChange
from .evaluation.expressions import Frame
from .evaluation.members import UNKNOWN
from .evaluation.still_frames import StillFrame
from .remedies import OF_GENERATOR
from .syntax.accesses import Access, calls_of
from .syntax.uses import Use
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
_INITS = frozenset(
    [
        *("uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "sparse_"),
        *("kaiming_uniform_", "kaiming_normal_", "orthogonal_"),
    ]
)
_SAMPLES = frozenset(["sample", "rsample"])
_SETTERS = frozenset(["set_rng_state", "set_rng_state_all", "fork_rng", "set_state"])
_SEEDS = frozenset(["manual_seed", "seed", "set_state", "set_offset", "graphsafe_set_state"])
_ASKS_STATE = frozenset(["get_state", "get_offset", "graphsafe_get_state", "clone_state"])
_MAY_DRAW = "draws"  # code that has not run
_TOLD = _SEEDS | _ASKS_STATE | {"initial_seed"}
_OF_USER = "give each stage, and each backward, a generator of its own"
_OF_PROCESS = f"{_OF_USER}, or draw in the forward, and keep the numbers for the backward"


class DrawnNumbers:
    """The random generators that code draws from in the backwards of hops, and the user's own.

    Args:
        holders: the holders of all objects that were there before the forward.

    Attributes:
        lasting: the ids of Python's and numpy's generators of the user's own in them.
    """

    def __init__(self, holders: Iterable[Holder]) -> None:
        values = [value for holder in holders for _, value in holder.before]
        self.lasting = {id(value) for value in values if is_generator(value) or is_seeds(value)}
        self._torchs = {id(value) for value in values if isinstance(value, torch.Generator)}
        self._told: list[tuple[int, str, int, str]] = []  # a generator, the method, hop and line
        self._known: dict[object, SharedValue] = {}  # by a kind, or a generator's number
        self._draws_freely = False  # whether any code does not set torch's generator itself

    def used(self, access: Access, frame: Frame, *, all_last: bool) -> Iterable[Any]:
        """Return the generators that code uses if it calls a method of one, or hands it to a
        function: the object, and what is behind it; none if it is no generator that lasts.

        Args:
            access: the access of the object.
            frame: the frame that it is in.
            all_last: whether all generators outlive the forward.
        """
        if access.use is Use.NONE or not (self.lasting or all_last):
            return ()
        drawn = frame.evaluated(access.node)
        lasts = id(drawn) in self.lasting or (all_last and is_generator(drawn))
        behind = behind_generator(drawn, access.method) if lasts else None
        return () if behind is None else {id(drawn): drawn, id(behind): behind}.values()

    def told(self, access: Access, frame: Frame, hop: int, *, runs: bool) -> None:
        """Note that code in a forward seeds a generator of torch's that outlives it, or asks for
        its state, neither of which an operation does; or names it, where it has not run."""
        node = access.node
        if not runs and hop >= 0 and id(named := frame.evaluated(node)) in self._torchs:
            self._told.append((generator_id(named), _MAY_DRAW, hop, frame.line))
        if hop < 0 or not isinstance(node, ast.Attribute) or node.attr not in _TOLD:
            return
        generator = frame.evaluated(node.value)
        if id(generator) in self._torchs:
            self._told.append((generator_id(generator), node.attr, hop, frame.line))

    def note(self, frames: Iterable[StillFrame], hop: int) -> None:
        """Note what a function draws, if a backward calls it; of the loss, what it draws from a
        generator of the user's: a forward and its loss have streams of the process's.

        Args:
            frames: the function, and what it calls.
            hop: the hop that it is on, or the number of that hop's backward.
        """
        frames = [*frames]
        sets_state = any(not _SETTERS.isdisjoint(still.f_code.co_names) for still in frames)
        for still in frames:
            frame = Frame(still, {}, None)  # type: ignore[arg-type]
            for call in calls_of(still.f_code):
                source = _source_of(call, frame)
                is_users = isinstance(source, torch.Generator)
                if is_users or (source is not None and hop < 0):
                    key = generator_id(source) if is_users else source
                    known = self._known.setdefault(key, SharedValue(source, None))
                    line = f"{still.f_code.co_filename}:{call.lineno}"
                    known.is_set(hop, line)
                    known.is_read(hop, line)
                    known.is_constant = False
                    self._draws_freely |= key == "torch" and not sets_state

    def shared(
        self, generators: dict[int, GeneratorUse], *, one_each: bool
    ) -> Iterator[SharedChange]:
        """Yield the generators that a backward shares with other code. The process's are shared
        with all that draw.

        Args:
            generators: by its number, the uses of each generator of the user's in the forward. The
                places that seed one are added.
            one_each: whether stages have a generator of torch's each, as accelerators do. Then a
                backward may set its state, as functions do that run a forward again.
        """
        self._add_told(generators)
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

    def _add_told(self, generators: dict[int, GeneratorUse]) -> None:
        seeded = {key for key, method, _, _ in self._told if method in _SEEDS}
        changes = seeded | generators.keys()
        for key, method, hop, line in self._told:
            # What nothing changes is the same in each forward: the seed, and the state if unused.
            is_used = key in (changes if method in _ASKS_STATE else seeded)
            if is_used or method == _MAY_DRAW:
                use = generators.setdefault(key, GeneratorUse([], line))
                use.hops = sorted({*use.hops, hop})
                use.how = "drawn from, seeded or asked for its state"


def _source_of(call: ast.Call, frame: Frame) -> Any:
    """Return the generator that a call draws from, or its kind; ``None``: it draws nothing."""
    for keyword in call.keywords:
        if keyword.arg == "generator":
            given = frame.evaluated(keyword.value)
            if given is not None:
                return given if isinstance(given, torch.Generator) else None
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    function = frame.evaluated(call.func)
    of = frame.evaluated(call.func.value) if isinstance(call.func, ast.Attribute) else None
    if _drops_at_random(of if name == "forward" else function):
        return "torch"
    if isinstance(of, Distribution) and name in _SAMPLES:
        return "torch"
    if function is UNKNOWN:
        is_method = isinstance(call.func, ast.Attribute) and name in _METHODS | _SAMPLES
        return "torch" if is_method else None
    if name in _FUNCTIONS and function in (
        getattr(torch, name, None),
        getattr(functional, name, None),
    ):
        return "torch"
    if name in _INITS and function is getattr(nn.init, name):
        return "torch"
    owner = getattr(function, "__self__", None)
    if owner is not None and owner is getattr(random.random, "__self__", None):
        return "random"
    numpy = sys.modules.get("numpy")
    is_numpys = numpy is not None and owner is getattr(numpy.random.rand, "__self__", numpy)
    return "numpy" if is_numpys else None


def _drops_at_random(module: Any) -> bool:
    """Return whether something is a library's module that drops; the user's own is looked at by its
    source."""
    is_module = isinstance(module, nn.Module) and not is_users(type(module).__module__)
    return is_module and any(map(_drops, module.modules()))


def _drops(module: nn.Module) -> bool:
    """Return whether a module's name, or its rate, tells that it drops at random."""
    kind = type(module).__name__.lower()
    if not module.training:
        return False
    if "drop" in kind:
        return bool(getattr(module, "p", 1))
    rate = getattr(module, "dropout", 0)  # of an LSTM, or of attention
    return kind in ("rrelu", "fractionalmaxpool2d", "fractionalmaxpool3d") or (
        isinstance(rate, float | int) and rate > 0
    )


def draws_from(known: SharedValue, hop: int, line: str, calls: Iterable[Call | None]) -> None:
    """Note that code on a hop calls a random generator, or hands it to a function.

    Args:
        known: the generator.
        hop: the hop.
        line: the line.
        calls: the forward's call that it is in; an operation draws from one of torch's.
    """
    known.is_set(hop, line, () if isinstance(known.owner, torch.Generator) else calls)
    known.is_read(hop, line)
    known.is_constant, known.remedy = False, OF_GENERATOR
