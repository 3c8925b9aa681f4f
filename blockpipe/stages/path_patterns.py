"""Path patterns: modules named by their paths, with the wildcards of a shell.

A pattern is matched segment by segment (``blocks.[6-9]``, ``*.attn``): a ``*`` stops at a dot, so
that a pattern names modules of one depth.
"""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from .._common.checks import did_you_mean, expected
from ..errors import MarkError


def matches(pattern: str, path: str) -> bool:
    """Return whether a path pattern names a module, segment by segment."""
    wanted, have = pattern.split("."), path.split(".")
    return len(have) == len(wanted) and all(map(fnmatchcase, have, wanted))


def matching_paths(pattern: str, paths: Sequence[str]) -> list[str]:
    """Return the module paths that a pattern names.

    Raises:
        MarkError: it is not text, or names none; the message has near misses.
    """
    if not isinstance(pattern, str):
        raise MarkError(expected("text such as 'layer3'", pattern, for_="a path pattern"))
    found = [path for path in paths if matches(pattern, path)]
    if not found:
        raise MarkError(unknown_path(pattern, paths))
    return found


def unknown_path(pattern: str, paths: Sequence[str]) -> str:
    """Return the text of an error for a pattern that names no module."""
    plain = re.sub(r"[\[\]*?!]", "", pattern)
    fix = did_you_mean(plain, paths)
    return expected("the path of a module, or a pattern of paths", pattern, fix=fix)
