"""Compile the simulated accelerator: once for each torch, Python and version of its source."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("accelerator.cpp")
OLDEST = (2, 15)  # torch's headers that it is written against


class CannotBuild(Exception):
    """There is no accelerator to simulate with, and why."""


def extension() -> Path:
    """The compiled module; compiles it if need be, some 45 s.

    Raises:
        CannotBuild: torch is too old, or there is no compiler, or it fails.
    """
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST:
        raise CannotBuild(f"torch {torch.__version__} is too old: it needs {OLDEST[0]}.{OLDEST[1]}")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise CannotBuild("there is no C++ compiler: install g++, or name one in CXX")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    about = f"{torch.__version__} {suffix} {compiler} {SOURCE.read_text()}"
    name = hashlib.sha256(about.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "blockpipe-tests" / name
    target = folder / f"_accelerator{suffix}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the process ends, however it ends
        if not target.exists():
            _compile(compiler, target)
    return target


def _compile(compiler: str, target: Path) -> None:
    part = target.with_suffix(".part")
    home = Path(torch.__file__).parent
    includes = [home / "include", home / "include/torch/csrc/api/include"]
    command = [
        *(compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-pthread"),
        "-DTORCH_EXTENSION_NAME=_accelerator",
        *(f"-I{path}" for path in (*includes, sysconfig.get_paths()["include"])),
        *(str(SOURCE), "-o", str(part)),
        *(f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}"),
        *("-lc10", "-ltorch_cpu", "-ltorch_python", "-ltorch"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CannotBuild(f"{compiler} failed:\n{done.stderr[-4000:]}")
    part.replace(target)
