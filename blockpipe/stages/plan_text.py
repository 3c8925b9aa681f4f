"""A plan as one line of text, for configurations and bug reports: ``layer3=1, layer4=2``.

Each item is a module call at which the stage changes, in execution order: from that call on the
forward is on that stage, until the next item. JSON has every call and is read by programs; this
text is typed, and pasted into a message, a line of Python, or a shell. So a path is written without
the characters that could end a literal there and go on as code.
"""

import json
import re
from collections.abc import Iterable

from .._common.checks import expected
from ..errors import PlanError

Item = tuple[str, int | None, int]
"""A module's path, the index of its call (``None``: every call), and the stage."""

_ITEM = re.compile(
    r"""\s*(?:(?P<quoted>"(?:[^"\\]|\\.)*")|(?P<path>[^\s,=\#"]+))  # layer3
    \s*(?:\#\s*(?P<call>\d{1,9})\s*)?                                    # \#1: its second call
    =\s*(?P<stage>\d{1,9})\s*(?P<end>,|$)""",
    re.VERBOSE | re.ASCII,
)
_PLAIN = re.compile(r"[\w.*?!\[\]<>:/+@-]+")
_NOT_TO_PASTE = re.compile(r"[^\w .,=#:/-]")


def write_layout(items: Iterable[Item]) -> str:
    """Return the text of some items.

    Example:
        >>> write_layout([("layer3", None, 1), ("act", 1, 2), ("a, b", None, 3)])
        'layer3=1, act#1=2, "a, b"=3'
    """

    def shown(path: str) -> str:
        return path if _PLAIN.fullmatch(path) else f'"{_NOT_TO_PASTE.sub(_escaped, path)}"'

    return ", ".join(
        f"{shown(path)}={stage}" if call is None else f"{shown(path)}#{call}={stage}"
        for path, call, stage in items
    )


def _escaped(sign: re.Match[str]) -> str:
    """Escape a character as JSON escapes those that ASCII does not have."""
    units = sign[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


def read_layout(text: str) -> list[Item]:
    """Return the items of a text.

    Raises:
        PlanError: the text cannot be read; the message has the position.

    Example:
        >>> read_layout("layer3=1, act#1=2")
        [('layer3', None, 1), ('act', 1, 2)]
    """
    if not isinstance(text, str):
        raise PlanError(expected("text such as 'layer3=1, layer4=2'", text, for_="a layout"))
    items: list[Item] = []
    at, more = 0, bool(text.strip())
    while more:
        found = _ITEM.match(text, at)
        if found is None:
            raise _unreadable(text, at)
        try:
            path = found["path"] or json.loads(found["quoted"])
        except ValueError:
            raise _unreadable(text, at) from None
        call = None if found["call"] is None else int(found["call"])
        items.append((path, call, int(found["stage"])))
        at, more = found.end(), found["end"] == ","
    return items


def _unreadable(text: str, at: int) -> PlanError:
    at += len(text[at:]) - len(text[at:].lstrip())
    contract = "'path=stage' or 'path#call=stage', separated by commas,"
    place = f"position {at} of the layout {text[:200]!r}"
    fix = "write 'layer3=1, act#1=2', where '#1' is the second call of 'act'"
    return PlanError(expected(contract, text[at : at + 30], for_=place, fix=fix))
