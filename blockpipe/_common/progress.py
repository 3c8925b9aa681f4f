"""The progress of a long task, on one line of a terminal.

Nothing is shown for a task of less than two seconds, nor in a log file or a test. A bar of tqdm's
would be a dependency, and would write its line into CI logs too.
"""

import sys
import time
from types import TracebackType
from typing import Any, Self

from .log import is_silent

_AFTER = 2.0  # seconds
_EVERY = 0.1
_WIDTH = 79


class Progress:
    """Counts the steps of a task; entered around it.

    Args:
        what: the task, such as ``"recording ResNet"``.
        total: the number of steps; ``None``: it is unknown.
        unit: the noun for steps.

    Example:
        >>> with Progress("measuring", total=3, unit="pieces") as progress:
        ...     for piece in ("stem", "body", "head"):
        ...         progress.step(piece)
    """

    def __init__(self, what: str, total: int | None = None, unit: str = "steps") -> None:
        self.what = what
        self.total = total
        self.unit = unit
        self.done = 0
        self._began = self._told = time.monotonic()
        self._shown = 0  # characters on the line
        self._kind = None if is_silent() else _place()

    def step(self, what: str = "", count: int = 1) -> None:
        """Count steps that are done or begin.

        Args:
            what: a text beside the numbers.
            count: the number of steps.
        """
        self.done += count
        if self._kind is None:
            return
        now = time.monotonic()
        if now - self._began >= _AFTER and now - self._told >= _EVERY:
            self._told = now
            self._show(now - self._began, what)

    def _show(self, seconds: float, what: str) -> None:
        of = "" if self.total is None else f" of {self.total}"
        text = f"blockpipe: {self.what}: {self.done}{of} {self.unit}, {seconds:.0f} s"
        text = f"{text}, {what}"[:_WIDTH] if what else text[:_WIDTH]
        if self._kind == "notebook":
            # Once: a cell keeps every line that is written to it.
            sys.stderr.write(f"{text} …\n")
            self._kind = None
        else:
            sys.stderr.write(f"\r{text:<{self._shown}}")
            self._shown = len(text)
        sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._shown:
            sys.stderr.write(f"\r{'':<{self._shown}}\r")
            sys.stderr.flush()
            self._shown = 0


def _place() -> str | None:
    """Return where progress is shown: in a terminal, a notebook, or nowhere."""
    try:
        if sys.stderr.isatty():
            return "terminal"
    except (AttributeError, ValueError):  # None, without a console; a file of the user's; closed
        return None
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return "notebook" if type(shell).__name__ == "ZMQInteractiveShell" else None
