"""The types of options: each reads a word, or raises the error that argparse prints."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..errors import PlanError
from ..reports.summary.columns import COLUMNS
from ..stages.plan import StagePlan
from .model_arguments import MOST_DIGITS, whole_number


def picture(text: str) -> Path:
    """Read the path of a picture to write."""
    if Path(text).suffix not in (".html", ".json"):
        raise argparse.ArgumentTypeError(f"expected a .html or .json file, got {text!r}")
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder {str(Path(text).parent)!r} does not exist")
    return Path(text)


def count(text: str) -> int:
    """Read a positive integer."""
    number = whole_number(text)
    if not number:
        raise argparse.ArgumentTypeError(
            f"expected a positive integer of at most {MOST_DIGITS} digits, got {text[:100]!r}"
        )
    return number


def words(text: str) -> list[str]:
    """Return the words that commas separate."""
    return [word.strip() for word in text.split(",") if word.strip()]


def columns(text: str) -> list[str]:
    """Read the names of a summary's columns."""
    names = words(text)
    known = [name for name in COLUMNS if name != "device"]  # a summary of a recording has none
    if not names or not set(names) <= set(known):
        raise argparse.ArgumentTypeError(f"expected names out of {', '.join(known)}, got {text!r}")
    return names


def layout(text: str) -> StagePlan:
    """Read a plan's layout."""
    try:
        return StagePlan.from_layout(text)
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def integers(text: str) -> list[int]:
    """Read integers that are separated by commas."""
    found = [whole_number(word) for word in words(text)]
    if not found or None in found:
        raise argparse.ArgumentTypeError(f"expected integers such as 0,1,1,0, got {text[:100]!r}")
    return [number for number in found if number is not None]


def times(text: str) -> float | Sequence[float]:
    """Read a time for all hops, or one for each."""
    try:
        found = [float(word) for word in words(text)]
    except ValueError:
        found = []
    if not found:
        raise argparse.ArgumentTypeError(
            f"expected a number, or one for each hop (1,1,2), got {text!r}"
        )
    return found[0] if len(found) == 1 else found


_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def byte_count(text: str) -> int:
    """Read a size in bytes, with or without a unit."""
    number = text.rstrip("BiKMGTbkmgt")
    unit = text[len(number) :].upper().removesuffix("B").removesuffix("I")
    try:
        size = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        size = -1
    if size < 0:
        raise argparse.ArgumentTypeError(f"expected a size such as 16GiB or 800M, got {text!r}")
    return size
