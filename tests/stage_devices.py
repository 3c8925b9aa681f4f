"""Where the stages of a test's pipeline are: on the CPU, or on the simulated accelerator.

A test that asks here for its devices runs on both. ``python -m pytest`` runs it on the CPU, ``python -m
pytest --simulated`` on the accelerator; ``conftest.py`` says what else that run does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import settings
from torch import Tensor

from blockpipe._common.nested import map_tensors

SIMULATED = "simulated"


def is_simulated() -> bool:
    """Whether stages are on the simulated accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == SIMULATED


def stages(count: int) -> list[str]:
    """A device for each of so many stages; more stages than devices share them."""
    if not is_simulated():
        return ["cpu"] * count
    return [f"{SIMULATED}:{stage % torch.accelerator.device_count()}" for stage in range(count)]


def device_type() -> str:
    """What autocast and device contexts are told."""
    return SIMULATED if is_simulated() else "cpu"


def examples(count: int) -> int:
    """So many examples of a property, times what the profile says (``conftest.py``): an eighth under
    ``quick``, twice as many under ``full``; a tenth of them where each operation is queued."""
    wanted = count * settings.default.max_examples // 100
    return max(wanted // (10 if is_simulated() else 1), 3)


def host(value: Any) -> Any:
    """The same with every tensor on the CPU, where it can be compared."""
    return map_tensors(lambda tensor: tensor.detach().cpu(), value)


def exact() -> set[str]:
    """The verdicts of ``verify`` on equal steps: to the bit on the CPU, to rounding elsewhere, where
    memory is aligned in another way."""
    return {"exact", "within tolerance"} if is_simulated() else {"exact"}


def equal(one: Tensor, other: Tensor) -> bool:
    """``torch.equal``, wherever the two are."""
    one, other = host((one, other))
    return torch.equal(one, other)


def assert_close(one: Any, other: Any, **options: Any) -> None:
    """``torch.testing.assert_close``, wherever the tensors are."""
    torch.testing.assert_close(host(one), host(other), **options)


@contextmanager
def no_synchronization() -> Iterator[None]:
    """An error where the host waits for the accelerator, CUDA or the simulated one."""
    if is_simulated():
        from . import simulated

        with simulated.flags(raise_syncs=True):
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
