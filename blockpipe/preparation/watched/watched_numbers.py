"""Numbers that remember what a forward asks them, for later steps to ask again."""

import ast
import itertools
import math
import numbers
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Hashable
from typing import Any

from ..._common.callsite import users_line, warn
from ..._common.libraries import is_users
from ...recording.plain_values.evaluation.expressions import Frame
from ...recording.plain_values.syntax.accesses import container_at, goes_to

_ASKS = ("lt", "le", "eq", "ne", "gt", "ge")
_COMPUTES = ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "divmod")
_OF_INTS = ("and", "or", "xor", "lshift", "rshift")
_ALONE = ("neg", "pos", "abs", "floor", "ceil", "trunc")
_MOST_MEMBERS = 256  # of a set in which a number is looked for
_NO_OPERATORS = (bool, int, repr, round, divmod, math.floor, math.ceil, math.trunc)
_FUNCTIONS: dict[str, Callable[..., Any]] = {f.__name__: f for f in _NO_OPERATORS}
_UNARY = {*_ALONE, "bool", "int", "repr", "invert"}
# What Python asks of every object, and what is asked of a class.
_LEFT = (
    *("__new__", "__getattribute__", "__getnewargs__", "__sizeof__"),
    *("__getformat__", "from_bytes", "fromhex"),
)

# What was done to a number, one after the other: an operator's name, the other operand, and whether
# that one came first.
Steps = tuple[tuple[str, Any, bool], ...]
Where = tuple[int, Hashable]  # an object by its id, and a name in it
# A place, and what was done to the number there; the last of that answers yes or no, or is GIVEN.
Question = tuple[Where, Steps]
Asked = tuple[tuple[Question, Hashable], ...]  # with the answers
Ask = Callable[[Where, Steps], None]

GIVEN = ("repr", None, False)
"""The last step of a question for the number itself, which code was given as a text, as a key, or
by another way on which nothing can be remembered."""

_MOST_GIVEN, _STEPS = 8, 64  # so many recordings in so many steps are too many: guesses
_ONE_BY_ONE = (
    "the forward uses a number that is another one in each step as an index, a text, a key or a "
    "float, at {}: the next number may lead it another way, so such steps run their micro-batches "
    "one by one, in one thread; compare the number instead (step >= 1000), or set what the forward "
    "makes of it in an attribute between steps ({})"
)


def done(value: Any, step: tuple[str, Any, bool]) -> Any:
    """Return the result of one step."""
    name, other, is_first = step
    function = _FUNCTIONS.get(name) or getattr(operator, f"__{name}__")
    if name in _UNARY:
        return function(value)
    return function(other, value) if is_first else function(value, other)


class _Watched:
    """A number that remembers what it was asked, and of which number it was computed."""

    _steps: Steps
    _told: tuple[Ask, Where]

    def __bool__(self) -> bool:
        self._tell(("bool", None, False))
        return bool(plain(self))

    def __int__(self) -> int:
        step = "int", None, False
        self._tell(step, GIVEN)
        return int(done(plain(self), step))

    def __hash__(self) -> int:
        members = _members_around(sys._getframe(1))
        self._tell(GIVEN if members is None else ("contains", members, True))
        return hash(plain(self))

    def __reduce__(self) -> Any:  # pickled, they are plain numbers
        self._tell(GIVEN)
        return type(plain(self)), (plain(self),)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: object) -> Any:
        return self

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(plain(self))

    def _tell(self, *steps: tuple[str, Any, bool]) -> None:
        ask, where = self._told
        ask(where, (*self._steps, *steps))

    def _computed(self, step: tuple[str, Any, bool]) -> Any:
        return watched(done(plain(self), step), (*self._steps, step), *self._told)


class _WatchedInt(_Watched, int):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a plain number, as ``type(n)(…)`` of the user's code has it."""
        return int(*args, **kwargs)


class _WatchedFloat(_Watched, float):
    def __new__(cls, *args: Any) -> Any:
        """As for an integer."""
        return float(*args)


def watched(value: Any, steps: Steps, *told: Any) -> Any:
    if type(value) is tuple:
        at = ((*steps, ("getitem", index, False)) for index in itertools.count())
        members = tuple(watched(member, of, *told) for member, of in zip(value, at, strict=False))
        return value if all(map(operator.is_, members, value)) else members
    base: Any = type(value)
    kind = {int: _WatchedInt, float: _WatchedFloat}.get(base)
    if kind is None:
        return value
    found = base.__new__(kind, value)
    found._steps, found._told = steps, told
    return found


def plain(value: Any) -> Any:
    kind = type(value)  # isinstance() believes __class__
    if kind is _WatchedInt:
        return int.__int__(value)
    return float.__float__(value) if kind is _WatchedFloat else value


def _asks(name: str) -> Any:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, numbers.Number):
            return NotImplemented
        other = plain(other)
        self._tell((name, other, False))
        return getattr(operator, name)(plain(self), other)

    return method


def _computes(name: str, *, is_first: bool) -> Any:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        return self._computed((name, plain(other), is_first))

    return method


def _powers(self: Any, other: Any, modulus: Any = None) -> Any:
    if modulus is None:
        return _power(self, other)
    self._tell(GIVEN)
    return pow(plain(self), plain(other), plain(modulus))


_power = _computes("pow", is_first=False)


def _rounds(self: Any, digits: int | None = None) -> Any:
    return self._computed(("round", plain(digits), False))


def _computes_alone(name: str) -> Any:
    return lambda self: self._computed((name, None, False))


def _gives(member: Any) -> Any:
    """Return a method, or a property, that gives the number away."""

    def given(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._tell(GIVEN)
        return getattr(plain(self), member.__name__)(*map(plain, args), **kwargs)

    def part(self: Any) -> Any:
        self._tell(GIVEN)
        return getattr(plain(self), member.__name__)

    return property(part) if isinstance(member, types.GetSetDescriptorType) else given


_Watched.__round__ = _rounds  # type: ignore[attr-defined]
for _name in _ASKS:
    setattr(_Watched, f"__{_name}__", _asks(_name))
for _name in _ALONE:
    setattr(_Watched, f"__{_name}__", _computes_alone(_name))
_WatchedInt.__invert__ = _computes_alone("invert")  # type: ignore[method-assign]
for _kind, _names in ((_Watched, _COMPUTES), (_WatchedInt, _OF_INTS)):
    for _name in _names:
        _own = _powers if _name == "pow" else _computes(_name, is_first=False)
        setattr(_kind, f"__{_name}__", _own)
        setattr(_kind, f"__r{_name}__", _computes(_name, is_first=True))
for _kind, _base in ((_WatchedInt, int), (_WatchedFloat, float)):
    for _name, _member in vars(_base).items():
        if hasattr(_member, "__get__") and _name not in (*_LEFT, *vars(_Watched), *vars(_kind)):
            setattr(_kind, _name, _gives(_member))


class Questions:
    """What forwards ask about the numbers that change between steps.

    Attributes:
        given_at: the line at which the latest recording has used a number that changes too often
            for a recording of each value; empty: it has used none.
    """

    def __init__(self) -> None:
        self.given_at = ""
        self._asked: dict[Question, None] = {}
        self._given: dict[Question, tuple[str, str]] = {}  # those for numbers themselves
        self._recorded: dict[Where, deque[int]] = {}  # in which steps that was so
        self._open: set[Where] = set()  # the numbers that are given too often
        self._step, self._has_warned = 0, False

    def step_begins(self) -> None:
        """Note that a step looks for its recording."""
        self._step += 1

    def begin(self) -> None:
        """Begin a recording."""
        self._asked, self._given, self.given_at = {}, {}, ""

    def ask(self, where: Where, steps: Steps) -> None:
        """Note what a forward asks; called by the number."""
        if steps[-1] is not GIVEN:
            self._asked[where, steps] = None
        elif (name := _goes_to()) != "":
            self._given[where, steps] = name or "", users_line()

    def used(self, value: Any, line: str) -> None:
        """Note that a value is an index, if it is a number that remembers.

        Args:
            value: the index, or any other value.
            line: the user's line.
        """
        if type(value) in (_WatchedInt, _WatchedFloat):
            self._given[value._told[1], (*value._steps, GIVEN)] = "", line

    def end(self, unread: Collection[str]) -> None:
        """End a recording, and count the numbers that it was given.

        Args:
            unread: the attributes that no code reads, by path and name.
        """
        unread = {name.rpartition(".")[2] for name in unread}
        for question, (name, line) in self._given.items():
            if name in unread:
                continue
            if question[0] in self._open:
                self.given_at = self.given_at or line
                continue
            self._asked[question] = None
            steps = self._recorded.setdefault(question[0], deque(maxlen=_MOST_GIVEN))
            if self._step not in steps:
                steps.append(self._step)
            if len(steps) == _MOST_GIVEN and steps[-1] - steps[0] < _STEPS:
                self._open.add(question[0])
        if self.given_at and not self._has_warned:
            self._has_warned = True
            warn(_ONE_BY_ONE.format(self.given_at, users_line()))

    def answered(self, value_at: Callable[[Where], Any]) -> Asked:
        """Return the questions of the latest recording with the answers of now."""
        return tuple((question, answer(question, value_at)) for question in self._asked)


def answer(question: Question, value_at: Callable[[Where], Any]) -> Hashable:
    """Return what a number answers now.

    Args:
        question: the question.
        value_at: returns the value at a place.
    """
    where, steps = question
    try:
        value = value_at(where)
        for step in steps:
            value = done(value, step)
        return value if steps[-1] is GIVEN else bool(value)
    except Exception:  # it is no number any more
        return False


def _members_around(frame: types.FrameType) -> frozenset[Any] | None:
    """Return the set, or the keys of the dictionary, in which a frame looks for a number."""
    container = container_at(frame.f_code, frame.f_lasti)
    if container is None:
        return None
    if isinstance(container, ast.Set):
        members = [getattr(node, "value", None) for node in container.elts]
    else:
        found = Frame(frame, {}, None).evaluated(container)
        members = [*found] if isinstance(found, set | frozenset | dict) else [None]
    is_plain = len(members) <= _MOST_MEMBERS and all(type(m) in (int, float) for m in members)
    return frozenset(members) if is_plain else None


def _goes_to() -> str | None:
    """Return the attribute to which a number that is given goes alone; an empty text if it goes to
    nobody, because it is printed, logged, or given to Blockpipe's own code."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals is globals():
        frame = frame.f_back
    if frame is None or _is_ours(frame):
        return ""
    while frame is not None and not _is_ours(frame):  # a library's handler may make the text
        found = goes_to(frame.f_code, frame.f_lasti)
        if found == "" or is_users(frame.f_globals.get("__name__")):
            return found
        frame = frame.f_back
    return None


def _is_ours(frame: types.FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.startswith(f"{_PACKAGE}.")


_PACKAGE = __name__.partition(".")[0]
