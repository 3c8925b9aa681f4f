"""Files that take the place of earlier ones: written whole under another name, then renamed.

A file that is opened for writing is empty at once, so a full disk, or a process that is killed,
loses what was there.
"""

import re
import secrets
import time
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG

ABANDONED = 3600.0  # seconds without a write: longer than any living writer pauses, by far


def part_of(path: Path) -> Path:
    """Return the path at which a file is written before it gets its name.

    Two that write the same file by mistake do not write into one, be they in containers where each
    is process 1; nobody can know the name before and put a link there.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")


def remove_abandoned(directory: Path, names: str) -> None:
    """Remove what processes that were killed have left, as far as that is allowed.

    A writer that was only stopped, and goes on later, fails then: its file has no name any more.

    Args:
        directory: the directory of these files.
        names: a regular expression for the names of the files that were being written.
    """
    part = re.compile(rf"\.({names})\.[0-9a-f]{{16}}\.part")
    with suppress(OSError):  # another one tidies up too; a save does not fail for that
        for path in directory.iterdir():
            if part.fullmatch(path.name) and _is_abandoned(path):
                path.unlink()


def _is_abandoned(path: Path) -> bool:
    found = path.lstat()
    return S_ISREG(found.st_mode) and found.st_mtime < time.time() - ABANDONED
