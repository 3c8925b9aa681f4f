"""What all tests share."""

import gc
from collections.abc import Iterator

import pytest
import torch

from blockpipe import prepared
from blockpipe.lanes import close_idle_threads

from .pinned import pin


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="accept the golden files in tests/golden"
    )
    parser.addoption(
        "--simulated", action="store_true", help="stages are on the simulated accelerator"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--simulated"):
        from . import simulated  # noqa: F401 - from here on there is an accelerator


@pytest.fixture(autouse=True)
def _one_thread_and_one_seed() -> Iterator[None]:
    """Equality to the bit is promised at equal intra-operation threads: one, here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _lanes_for_small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test models are so small that the engine would choose one thread: here it is the lanes that
    are tested. What it chooses has tests of its own."""
    monkeypatch.setattr(prepared, "SMALL_OPERATION", 0.0)
    monkeypatch.setattr(prepared, "SMALL_HOP", 0.0)


@pytest.fixture(autouse=True)
def _rates_of_round_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is predicted must not depend on the machine: measuring has tests of its own."""
    pin(monkeypatch.setattr)


@pytest.fixture(scope="session", autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    close_idle_threads()
    gc.collect()
