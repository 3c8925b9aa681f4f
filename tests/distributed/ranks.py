"""Cases that run in several processes at once: one launch runs many, for a start costs seconds."""

import datetime
import importlib
import os
import tempfile
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing


def run_cases(
    module: str, names: list[str], ranks: int, seconds: int = 240, patience: int = 60
) -> dict[str, Any]:
    """Call functions of a module, each in all of some processes together.

    Args:
        module: its path.
        names: of the functions, which are called with the rank and the number of ranks.
        ranks: how many processes there are.
        seconds: after which all are ended.
        patience: how long one waits for another, in seconds.

    Returns:
        By function, the tracebacks of those processes in which it failed, by rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.start_processes(
            _run,
            (folder, module, names, ranks, patience),
            nprocs=ranks,
            join=False,
            start_method="spawn",
        )
        for process in context.processes:  # join(…) of all would end those that outlive one
            process.join(seconds)
        for process in context.processes:
            process.kill()
        found: dict[str, Any] = {name: {} for name in names}
        for rank in range(ranks):
            for name in names:
                path = Path(folder, f"{name}.{rank}")
                text = path.read_text() if path.exists() else "it did not end"
                if text:
                    found[name][rank] = text
        return found


def _run(rank: int, folder: str, module: str, names: list[str], ranks: int, patience: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
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
