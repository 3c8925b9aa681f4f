"""Where the stages of a test's pipeline are: on the CPU, or on the simulated accelerator.

A test that asks here for its devices runs on both. ``python -m pytest`` runs it on the CPU, ``python -m
pytest --simulated`` on the accelerator; ``conftest.py`` says what else that run does.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import settings
from torch import Tensor

from blockpipe._common.nested import map_tensors

SIMULATED = "simulated"
on_cuda = False  # conftest.py: --cuda
is_mixed = False  # --mixed


def is_simulated() -> bool:
    """Whether stages are on an accelerator: the simulated one, or CUDA's with ``--cuda``."""
    accelerator = torch.accelerator.current_accelerator()
    return on_cuda or (accelerator is not None and accelerator.type == SIMULATED)


def stages(count: int) -> list[str]:
    """A device for each of so many stages; more stages than devices share them."""
    if not is_simulated():
        return ["cpu"] * count
    each = [f"{device_type()}:{n}" for n in range(torch.accelerator.device_count())]
    if is_mixed:
        each = [place for accelerator in each for place in (accelerator, "cpu")]
    return [each[stage % len(each)] for stage in range(count)]


def device_type() -> str:
    """What autocast and device contexts are told."""
    return "cuda" if on_cuda else SIMULATED if is_simulated() else "cpu"


def examples(count: int) -> int:
    """So many examples of a property, times what the profile says (``conftest.py``): a sixteenth
    under ``quick``, twice as many under ``full``; a tenth of them where each operation is queued."""
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
    """``torch.equal``, wherever the two are; to rounding where CUDA's kernels are beside others."""
    one, other = host((one, other))
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6) if on_cuda else torch.equal(one, other)


def assert_close(one: Any, other: Any, **options: Any) -> None:
    """``torch.testing.assert_close``, wherever the tensors are."""
    torch.testing.assert_close(host(one), host(other), **options)


@contextmanager
def no_synchronization() -> Iterator[None]:
    """An error where the host waits for the accelerator, CUDA or the simulated one."""
    if is_simulated() and not on_cuda:
        from . import simulated

        with simulated.flags(raise_syncs=True):
            yield
        return
    try:
        with warnings.catch_warnings():  # that it is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
