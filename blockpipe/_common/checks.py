"""One wording for arguments that are not what was expected."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TypeGuard

from .callsite import users_line

_MOST_SHOWN = 8
_SLIP = 0.85  # how alike two words are of which one is a slip: a guess
_LONGEST = 200  # characters of a value
_PLAIN = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, type(None))


def expected(
    what: str, got: object, *, for_: str = "", fix: str = "", where: str | None = None
) -> str:
    """Return the text of an error: what was expected, what was given, where, and how to fix it.

    Args:
        what: the contract, with its article (``"a positive integer"``).
        got: the user's value. Plain values are shown, and the type of all others.
        for_: the argument's name.
        fix: a remedy, in the imperative.
        where: the user's file and line; ``None``: that of the user's innermost frame.

    Example:
        >>> expected("a positive integer", 0, for_="chunks", fix="pass chunks=4", where="a.py:7")
        'expected a positive integer for chunks, got 0 (a.py:7); pass chunks=4'
    """
    remedy = f"; {fix}" if fix else ""
    return f"{mismatch(what, got, for_=for_)} ({where or users_line()}){remedy}"


def mismatch(what: str, got: object, *, for_: str = "") -> str:
    """Return the part of :func:`expected` that has no place and no remedy: one of a list of
    problems that an error collects.

    Args:
        what: the contract, with its article.
        got: the user's value.
        for_: the argument's name.

    Example:
        >>> mismatch("a positive integer", 0, for_="chunks")
        'expected a positive integer for chunks, got 0'
    """
    argument = f" for {for_}" if for_ else ""
    contract = f"{what}{argument}".removesuffix(",")  # that of a clause at the end
    return f"expected {contract}, got {_shown(got)}"


def _shown(value: object) -> str:
    if not isinstance(value, _PLAIN):  # a module's or a tensor's text may have thousands of lines
        return type(value).__name__
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return type(value).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def is_integer(value: object, least: int | None = None) -> TypeGuard[int]:
    """Return whether a value is an ``int``, not a ``bool``, and at least ``least`` if given."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return least is None or value >= least


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is an ``int`` or a ``float``, and not a ``bool``."""
    return isinstance(value, float) or is_integer(value)


def near_miss(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that a word is a slip of; ``None``: of none, it means something else.

    Args:
        word: as the user wrote it.
        known: the words that there are.
    """
    words = [name for name in known if not name.startswith("_")]
    return next(iter(get_close_matches(word, words, n=1, cutoff=_SLIP)), None)


def did_you_mean(word: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """Return a question that names the nearest of the known words.

    Args:
        word: as the user wrote it.
        known: the words that would have been right.
        otherwise: the answer where none is near; ``None`` lists the first known words.
    """
    known = list(known)
    inside = [name for name in known if name.endswith(f".{word}")]  # a path from further inside
    near = inside[:3] or get_close_matches(word, known, n=3, cutoff=0.4)
    if near:
        return f"did you mean {', '.join(map(repr, near))}?"
    if otherwise is not None:
        return otherwise
    shown = ", ".join(map(repr, known[:_MOST_SHOWN]))
    return f"known: {shown}{', …' if len(known) > _MOST_SHOWN else ''}"
