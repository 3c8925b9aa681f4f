"""Watch the plain values that user code sets between steps and that the forward branches on.

If a training loop sets ``net.step = i`` or ``config.mode = "distill"``, and a forward has ``if
self.step >= self.warm_up``, a later step may take another branch than the recorded one. So the key
of a recording includes all values that have ever changed between steps, wherever the forward may
read them: on modules, in configurations, dictionaries and globals, in the environment.

A number may change in every step, and to record at every change would be to record in every step.
So the recording gives the forward numbers that remember the comparisons made with them, and each
step makes the same comparisons again. A float with such an integer on its right (``0.1 *
self.step``) computes a plain number, because Python does not call the integer's methods there. A
recording that was given the number itself (``f"{self.step}"``) holds for that one value.

A function counts as a value too, and so does the class of a user's object: ``net.activation =
clipped`` and ``net.strategy = Distill()`` choose what runs.
"""

import dis
import enum
import functools
import operator
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .._common.modules import STATE
from .._torch.modules import COMPILED_CALL
from ..restoring.holders import (
    ClassHolder,
    ContentHolder,
    DictHolder,
    FunctionHolder,
    Holder,
    NamesHolder,
    SequenceHolder,
    SetHolder,
    SlotsHolder,
    content_of_cell,
)
from ..restoring.model_state import holders_read, is_users
from .watched_numbers import Asked, Questions, Where, answer, watched

MOST_VALUES = 2_000  # the nearest ones; they are compared before and after each step
_MOST_MEMBERS = 256  # of a dictionary; a larger one is probably a vocabulary
_MOST_IN_ORDER = 32  # of a list, a tuple or a set
_MOST_RETURNS = 8  # distinct values of one place; one with more is a counter or a clock
_STEPS = 2  # the steps that show which values the forward itself sets
_MOST_NEW = 4  # names that may be added to or removed from one object
_TORCHS = frozenset(vars(nn.Module()))  # attributes of every module
_CODE = ("forward", STATE, COMPILED_CALL)  # a module's: Fingerprint compares it, or ours
_MOST_NESTED = 3  # functions in the closure of a function
_UNSET = object()
_SWITCHES = {bool, type(None)}
_PLAIN = frozenset([bool, int, float, str, bytes, type(None), type(_UNSET)])


@dataclass
class _Place:
    """A place whose value has changed at least once."""

    holder: Holder  # keeps its object alive, so that no other one gets its id
    key: Hashable
    labels: set[Hashable] = field(default_factory=set)

    def value(self) -> Any:
        if isinstance(self.holder, SetHolder):
            return _frozen(self.holder)
        space = self.holder.namespace()
        try:
            return dict(self.holder.now())[self.key] if space is None else space[self.key]
        except LookupError:
            return _UNSET


class WatchedValues:
    """The plain values that a model's forwards may read, and the comparisons made with them.

    Args:
        model: the user's model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: set[int] = set()  # by id
        self._holders: list[Holder] = []
        self._members: list[dict[Hashable, Any]] = []  # each holder's plain members
        self._reads: list[Callable[[Any], tuple[Any, ...]]] = []  # of members, by holder
        self._spaces: list[Any] = []
        self._sized: list[Any] = []  # the spaces of holders that may get other names
        self._values = self._now()
        self._own: set[Where] = set()  # the places that the forward itself sets
        self._steps = 0  # since the last look_around()
        self._places: dict[Where, _Place] = {}  # the places whose values have changed
        self._questions = Questions()
        self._came: Counter[int] = Counter()  # by object, the names that were added or removed
        self._has_turned = False

    def look_around(self) -> None:
        """Find the values that a forward may read; called before a recording."""
        modules = list(self._model.modules())
        self._modules = {id(module) for module in modules}
        torchs = {id(v) for module in modules for k, v in vars(module).items() if k in _TORCHS}
        self._holders, self._members, count, seen = [], [], 0, set[Any]()
        self._own, self._steps = set(), 0
        for holder in holders_read(self._model):
            if id(holder.owner) in torchs or not _is_read(holder):
                continue
            members = {
                key: value
                for key, value in self._members_of(holder).items()
                if (holder.space_id(), key) not in seen
            }
            if not members and not _may_fill(holder):
                continue
            seen.update((holder.space_id(), key) for key in members)
            count += sum(type(value) is not _Code for value in members.values())
            if count > MOST_VALUES:
                break
            self._holders.append(holder)
            self._members.append(members)
        spaces = [holder.namespace() for holder in self._holders]
        self._spaces = [() if space is None else space for space in spaces]
        self._sized = [
            s if _has_names(h) else () for h, s in zip(self._holders, spaces, strict=True)
        ]
        self._reads = [*map(_reader, self._holders, self._members)]
        self._values = self._now()

    def _members_of(self, holder: Holder) -> dict[Hashable, Any]:
        found, owner = _plain_members(holder), holder.owner
        if owner is os.environ:
            return {key: value for key, value in found.items() if not is_torchs_variable(key)}
        if id(owner) not in self._modules:
            return found
        return {k: value for k, value in found.items() if not _is_known(owner, k, value)}

    def _now(self) -> tuple[list[int], list[Any]]:
        # Most steps do no more than this: a few loops that Python runs in C.
        return [*map(len, self._sized)], [*map(operator.call, self._reads, self._spaces)]

    def has_turned(self) -> bool:
        """Return whether, since the last call, a value has changed for the first time. The keys of
        the recordings made so far do not include that value."""
        self._look(by_forward=False)
        has_turned, self._has_turned = self._has_turned, False
        return has_turned

    def step_is_over(self) -> None:
        """Note the values that the forward itself has set, which have changed since
        :meth:`has_turned`.

        Such a value is a counter, or keeps the last of something, and does not count. A boolean
        does count: it leads the next forward another way. The first steps show all such values, and
        later steps do not spend time on this.
        """
        if self._steps < _STEPS:
            self._steps += 1
            self._look(by_forward=True)

    def _look(self, *, by_forward: bool) -> None:
        now = None
        try:
            now = self._now()
            if now == self._values:
                return
            pairs = zip(now, self._values, strict=True)
            same = [*map(operator.and_, *(map(operator.eq, *pair) for pair in pairs))]
        except Exception:  # a name was removed, or a new value cannot be compared
            same = [False] * len(self._holders)
        for index, holder in enumerate(self._holders):
            if not same[index]:
                self._compare(index, holder, by_forward=by_forward)
        self._values = self._now() if now is None else now

    def _compare(self, index: int, holder: Holder, *, by_forward: bool) -> None:
        before, members = self._members[index], self._members_of(holder)
        names = before.keys() | members.keys() if _has_names(holder) else before.keys()
        for key in names:
            then, value = before.get(key, _UNSET), members.get(key, _UNSET)
            if _is_same(then, value):
                continue
            if by_forward and not {type(then), type(value)} <= _SWITCHES:
                self._own.add((holder.space_id(), key))
            else:
                self._turn(holder, key, is_new=then is _UNSET or value is _UNSET)
        members = {key: members[key] for key in members if key in names}
        if members.keys() != before.keys() or _has_code(members) != _has_code(before):
            self._reads[index] = _reader(holder, members)
        self._members[index] = members

    def _turn(self, holder: Holder, key: Hashable, *, is_new: bool) -> None:
        where = holder.space_id(), key
        if where in self._places or where in self._own:
            return
        if is_new:  # or removed; an object with many such names is a history
            self._came[where[0]] += 1
            if not _has_names(holder) or self._came[where[0]] > _MOST_NEW:
                return
        self._places[where] = _Place(holder, key)
        self._has_turned = True

    def known_by(self) -> tuple[Hashable, ...]:
        """Return the key of a recording: the values that have ever changed."""
        self._questions.step_begins()
        labels = []
        for place in self._places.values():
            if len(place.labels) <= _MOST_RETURNS:
                label = _label(_seen(place.value()))
                place.labels.add(label)
                labels.append(label)
        return tuple(labels)

    def turned(self) -> list[tuple[Holder, Hashable, Hashable]]:
        """Return where values have ever changed, and what is there now: a number with its value."""
        return [
            (place.holder, place.key, (type(value), value))
            for place in self._places.values()
            for value in (_seen(place.value()),)
        ]

    def holds(self, asked: Asked) -> bool:
        """Return whether a recording's questions about numbers have the same answers now."""
        return all(answer(question, self._value_at) == before for question, before in asked)

    def is_recorded(self, unread: Collection[str]) -> str:
        """End a recording, and return the line at which it has used a number that changes too often
        for a recording of each value; empty: it has used none.

        Args:
            unread: the attributes that no code reads, by path and name.
        """
        self._questions.end(unread)
        return self._questions.given_at

    def answered(self) -> Asked:
        """Return the questions of the latest recording, with the answers of now."""
        return self._questions.answered(self._value_at)

    def _value_at(self, where: Where) -> Any:
        return self._places[where].value()

    @contextmanager
    def asked(self) -> Iterator[Callable[[Any, str], None] | None]:
        """Replace those numbers, during a recording, by ones that remember comparisons.

        Yields:
            What has to be told of each index that the forward uses, with the line; ``None``: there
            are no such numbers.
        """
        before = []
        self._questions.begin()
        try:
            for where, place in self._places.items():
                value = place.value()
                given = watched(value, (), self._questions.ask, where)
                if given is not value:
                    before.append((place, value))
                    place.holder.put(place.key, given)
            yield self._questions.used if before else None
        finally:
            for place, value in before:
                place.holder.put(place.key, value)


def _is_read(holder: Holder) -> bool:
    """Whether a forward may read the user's plain values there. Objects of libraries hold none."""
    owner = holder.owner
    if isinstance(holder, ContentHolder):
        return False
    if isinstance(holder, SlotsHolder):
        return is_users(type(owner).__module__)
    return not isinstance(owner, types.FunctionType) or is_users(owner.__module__)


def _is_known(module: nn.Module, key: Hashable, value: Any) -> bool:
    """Whether a module's attribute is torch's, or compared elsewhere (:class:`Fingerprint`). On
    torch's own layers, users set only numbers."""
    is_layers = type(module).__module__.startswith("torch.nn.")
    is_torchs = key in _TORCHS or (is_layers and type(value) not in (int, float, _Code))
    is_ours = str(key).startswith("_blockpipe_") or key in _CODE
    return type(value) in (bool, str) or is_torchs or is_ours


def _has_names(holder: Holder) -> bool:
    """Whether other names may be added to the object between steps."""
    return isinstance(holder, DictHolder | ClassHolder)


def _may_fill(holder: Holder) -> bool:
    """Whether an object without plain values may get some between steps: a module, a dictionary, an
    object. There are thousands of functions and parameters, which hardly do."""
    return _has_names(holder) and not isinstance(holder.owner, types.FunctionType | Tensor)


def _plain_members(holder: Holder) -> dict[Hashable, Any]:
    if isinstance(holder, SetHolder):
        found = _frozen(holder)
        return {} if found is None else {None: found}
    if isinstance(holder, DictHolder | SequenceHolder):
        most = _MOST_MEMBERS if isinstance(holder, DictHolder) else _MOST_IN_ORDER
        if len(holder.namespace()) > most:
            return {}
    members = dict(holder.now())
    names = set(members)
    if isinstance(holder, FunctionHolder):
        names -= {"__defaults__", "__kwdefaults__"}
    if isinstance(holder, NamesHolder) and holder.namespace() is holder.owner.__globals__:
        names &= globals_in(holder.owner.__code__)
    seen = ((key, _seen(value)) for key, value in members.items() if key in names)
    return {key: value for key, value in seen if value is not _UNSET}


class _Code(tuple[Any, ...]):
    """The code of a function, or of a user's object. It keeps no object alive."""

    __slots__ = ()


def _has_code(members: dict[Hashable, Any]) -> bool:
    return any(type(value) is _Code for value in members.values())


def _seen(value: Any, depth: int = 0) -> Any:
    """Return the part of a value that is compared: a plain value itself, the code of a function
    and of those in its closure, or the class of a user's object; otherwise ``_UNSET``."""
    if _is_plain(value):
        return value
    kind = type(value)
    if kind in (staticmethod, classmethod):
        value, kind = value.__func__, type(value.__func__)
    if kind is property:
        return _seen(value.fget, depth)
    if kind is types.MethodType:
        return _Code((_seen(value.__func__, depth), type(value.__self__)))
    if kind is functools.partial:
        return _Code((kind, _seen(value.func, depth)))
    if kind is types.FunctionType:
        inner: Iterator[Any] = iter(())
        if value.__closure__ and depth < _MOST_NESTED:
            inner = (_seen(content_of_cell(cell), depth + 1) for cell in value.__closure__)
        return _Code((value.__code__, *(code for code in inner if type(code) is _Code)))
    if kind is types.BuiltinFunctionType or isinstance(value, type):
        return _Code((value,))
    is_object = not issubclass(kind, nn.Module | Tensor) and _is_users_module(kind.__module__)
    return _Code((kind,)) if is_object else _UNSET


_is_users_module = functools.lru_cache(1_000)(is_users)


def _frozen(holder: Holder) -> frozenset[Any] | None:
    """Return the members of a small set of plain values; ``None`` for any other set."""
    members = [member for _, member in holder.now()]
    few = len(members) <= _MOST_IN_ORDER
    return frozenset(members) if few and all(map(_is_plain, members)) else None


def _is_plain(value: Any) -> bool:
    if type(value) in _PLAIN or isinstance(value, enum.Enum) or _is_numpys(value):
        return True
    return type(value) is tuple and len(value) <= _MOST_IN_ORDER and all(map(_is_plain, value))


def _is_numpys(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


@functools.lru_cache(1_000)
def globals_in(code: types.CodeType) -> frozenset[str]:
    """Return the globals that a function reads; its other names are attributes."""
    found: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found.add(instruction.argval)
        elif isinstance(instruction.argval, types.CodeType):
            found |= globals_in(instruction.argval)
    return frozenset(found)


def _reader(holder: Holder, members: dict[Hashable, Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads the values of these names from the holder's namespace."""
    keys = tuple(members)
    if isinstance(holder, SetHolder):
        return lambda _: (_frozen(holder),)
    if not keys:
        return lambda _: ()
    if holder.namespace() is None:
        if not _has_code(members):
            return lambda _: tuple(map(dict(holder.now()).__getitem__, keys))
        return lambda _: tuple(map(_seen, map(dict(holder.now()).__getitem__, keys)))
    read = operator.itemgetter(*keys, keys[0])  # one key twice, for a tuple even of one
    return (lambda space: (*map(_seen, read(space)),)) if _has_code(members) else read


def is_torchs_variable(variable: Hashable) -> bool:
    """Return whether torch itself sets an environment variable, when a part of it is first used."""
    return isinstance(variable, bytes) and variable.startswith((b"TORCH", b"PYTORCH"))


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))


def _label(value: Any) -> Hashable:
    """Return a value's part of the key. For a number that is its type; comparisons do the rest."""
    kind = type(value)
    if kind is tuple:
        return tuple(map(_label, value))
    is_known = kind in (frozenset, _Code) or (kind not in (int, float) and _is_plain(value))
    return (kind, value) if is_known else (kind,)
