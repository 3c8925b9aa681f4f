"""Cases that run in several processes at once: one launch runs many, for a start costs seconds."""

import datetime
import importlib
import inspect
import os
import socket
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.pipelining import ScheduleGPipe

NEEDS_SCHEDULES = pytest.mark.skipif(
    "arg_mbs" not in inspect.signature(ScheduleGPipe.step).parameters,
    reason="this torch's schedules take no micro-batches",
)

_LINGER = 90  # seconds that the others have once a process has failed

ENDED_BY_ITSELF = 1
"""The exit code of a process that Blockpipe has ended."""


def run_cases(
    module: str,
    names: list[str],
    ranks: int,
    seconds: int = 240,
    patience: int = 60,
    exit_codes: dict[int, int] | None = None,
    *,
    has_store: bool = False,
) -> dict[str, Any]:
    """Call functions of a module, each in all of some processes together.

    Args:
        module: its path.
        names: of the functions, which are called with the rank and the number of ranks.
        ranks: how many processes there are.
        seconds: after which all are ended.
        patience: how long one waits for another, in seconds.
        exit_codes: gets the exit code of each process, by rank.
        has_store: whether torch's store is in the first process; else it is a file.

    Returns:
        By function, the tracebacks of those processes in which it failed, by rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.start_processes(
            _run,
            (folder, _free_address() if has_store else "", module, names, ranks, patience),
            nprocs=ranks,
            join=False,
            start_method="spawn",
        )
        _wait(context.processes, seconds)  # join(…) of all would end those that outlive one
        for rank, process in enumerate(context.processes):
            process.kill()
            process.join()
            if exit_codes is not None:
                exit_codes[rank] = process.exitcode
        found: dict[str, Any] = {name: {} for name in names}
        for rank in range(ranks):
            for name in names:
                path = Path(folder, f"{name}.{rank}")
                text = path.read_text() if path.exists() else "it did not end"
                if text:
                    found[name][rank] = text
        return found


def _wait(processes: list[Any], seconds: float) -> None:
    """Wait until all have ended, or time is up."""
    ends, is_whole = time.monotonic() + seconds, True
    while any(process.is_alive() for process in processes) and time.monotonic() < ends:
        if is_whole and any(process.exitcode for process in processes):
            is_whole = False
            ends = min(ends, time.monotonic() + _LINGER)
        time.sleep(0.1)


def _free_address() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


def _run(
    rank: int, folder: str, store: str, module: str, names: list[str], ranks: int, patience: int
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=store or f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=patience),
    )
    cases = importlib.import_module(module)
    for name in names:
        text = ""
        try:
            getattr(cases, name)(rank, ranks)
        except BaseException:
            text = traceback.format_exc()
        Path(folder, f"{name}.{rank}").write_text(text)
    dist.destroy_process_group()


def check(found: dict[str, Any]) -> None:
    """Fail with what the processes report."""
    reports = [
        f"{name}, rank {rank}: {text}"
        for name, by_rank in found.items()
        for rank, text in by_rank.items()
    ]
    if reports:
        pytest.fail("\n".join(reports))
