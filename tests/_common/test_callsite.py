"""Lines of the user's: in errors and warnings, whoever called us."""

import inspect
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import blockpipe
from blockpipe._common import callsite
from blockpipe._common.callsite import failing_line, remembers_caller, users_line, warn

PATHS = sysconfig.get_paths()
OURS = str(Path(blockpipe.__file__).with_name("any.py"))


def here(offset: int = 0) -> str:
    """The file and line of the call, or so many lines below it."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"{__file__}:{frame.f_back.f_lineno + offset}"


def in_file(path: str, call: Callable[[], Any]) -> Any:
    """Call a function from line 3 of another file."""
    names: dict[str, Any] = {"call": call}
    exec(compile("\n\nfound = call()", path, "exec"), names)
    return names["found"]


CALLS_FILES = f"{__file__}:{inspect.getsourcelines(in_file)[1] + 3}"  # the line of exec


def in_a_thread(call: Callable[[], Any]) -> Any:
    """Where no frame is the user's, with this context's variables."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(copy_context().run, call).result()


def test_users_line_is_the_innermost_of_the_users() -> None:
    def inner() -> tuple[str, str]:
        return users_line(), here()

    found, line = inner()
    assert found == line


@pytest.mark.parametrize("path", [OURS, torch.__file__, f"{PATHS['stdlib']}/any.py", "<string>"])
def test_users_line_passes_over_files_that_are_not_the_users(path: str) -> None:
    """The package's own, torch's, Python's, and code without a file."""
    assert in_file(path, users_line) == CALLS_FILES


def test_users_line_may_be_in_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model library's file is where the user's model is written, also below Python's own."""
    packages = f"{PATHS['stdlib']}/site-packages/"
    monkeypatch.setattr(callsite, "_PACKAGES", packages)
    path = f"{packages}a_library/modeling.py"
    assert in_file(path, users_line) == f"{path}:3"


def test_users_line_of_a_thread_is_that_of_the_call_that_led_there() -> None:
    """While the call lasts; afterwards nothing is known."""
    method = remembers_caller(partial(in_a_thread, users_line))
    found, line = method(), here()
    assert found == line
    assert in_a_thread(users_line) == "<unknown>"


def test_warn_is_at_the_users_line() -> None:
    with pytest.warns(UserWarning, match="^careful$") as caught:
        in_file(OURS, partial(warn, "careful"))
    assert f"{caught[0].filename}:{caught[0].lineno}" == CALLS_FILES


def test_failing_line_is_where_the_users_code_called_torch() -> None:
    def fails() -> str:
        nn.Linear(4, 4)(torch.ones(2, 3))
        return ""

    line = here(-3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        fails()
    assert failing_line(caught.value.__traceback__) == line
