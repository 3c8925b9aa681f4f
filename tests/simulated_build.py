"""Compiles the simulated accelerator: once for each torch, Python, compiler and version of its source.

What is compiled stays in ``~/.cache/blockpipe-tests`` (``XDG_CACHE_HOME`` moves it). The folder's
name is a hash of all that went in, so nothing in it is ever stale, and it may be deleted. This is not
in the package ``simulated``, for whoever imports that has registered the accelerator.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "simulated" / "source"
OLDEST = (2, 15)  # torch's headers that it is written against
MINUTES = 10  # the longest that a compiler may take, on a slow machine that does other work too


class CannotBuildError(Exception):
    """Nothing on this machine could compile it, and why: tests that need it skip."""


def extension() -> Path:
    """The compiled module; compiles it if need be, in about a minute.

    Processes that start at once wait for the one that compiles. It writes to another name first,
    so that a module is there whole or not at all.

    Raises:
        CannotBuildError: torch is too old, or there is no compiler.
        RuntimeError: the compiler has failed. That is a defect, and no reason to skip.
    """
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise CannotBuildError(f"expected torch {oldest} or later, got {torch.__version__}")
    wanted = os.environ.get("CXX", "g++")
    compiler = shutil.which(wanted)
    if compiler is None:
        raise CannotBuildError(
            f"there is no C++ compiler {wanted!r}: install g++, or name one in CXX"
        )
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = cache / "blockpipe-tests" / _name(compiler, suffix) / f"_accelerator{suffix}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_name("lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the process ends, however it ends
            if not target.exists():
                _compile(compiler, target)
    except OSError as error:
        raise CannotBuildError(f"cannot write to {target.parent}: {error}") from error
    return target


def _name(compiler: str, suffix: str) -> str:
    about = hashlib.sha256(f"{torch.__version__} {suffix} {compiler}".encode())
    for path in (Path(__file__), *sorted(SOURCES.iterdir())):
        about.update(path.name.encode() + path.read_bytes())
    return about.hexdigest()[:16]


def _compile(compiler: str, target: Path) -> None:
    part = target.with_suffix(".part")
    home = Path(torch.__file__).parent
    includes = [home / "include", home / "include/torch/csrc/api/include"]
    command = [
        *(compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-pthread"),
        "-DTORCH_EXTENSION_NAME=_accelerator",
        *(f"-isystem{path}" for path in (*includes, sysconfig.get_paths()["include"])),
        *(str(SOURCES / "accelerator.cpp"), "-o", str(part)),
        *(f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}"),
        *("-lc10", "-ltorch_cpu", "-ltorch_python", "-ltorch"),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 * MINUTES)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{compiler} has not ended after {MINUTES} minutes") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise RuntimeError("\n".join([f"{compiler} has failed:", *errors[:20]]))
    part.replace(target)
