"""What all tests share, and the run on the simulated accelerator.

With ``--simulated`` the whole run is on that accelerator, for a backend that is registered stays:
``stages(4)`` are four of its devices, and modules that ask for none are not run. A test that has no
business there says so with ``@pytest.mark.cpu("why")``; the run's summary counts the reasons.
After each test every stream is waited for, and a race or a failed operation fails the test.

With ``--cuda`` they are CUDA devices, and rounding is forgiven. With ``--mixed`` each second stage is on
the CPU: on a machine with one GPU, ``--cuda --mixed``.
"""

import gc
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import settings

from blockpipe.execution.lanes.thread_pool import close_idle_threads
from blockpipe.preparation import prepared

from . import stage_devices
from .parameter_sets import in_turn
from .pinned import pin
from .simulated_build import CannotBuildError

# How many examples a property has, in percent of what it asks stage_devices.examples() for; no
# deadline, for a machine may be busy. CI takes --hypothesis-profile full.
settings.register_profile("quick", deadline=None, max_examples=6)
settings.register_profile("full", deadline=None, max_examples=200)
settings.load_profile("quick")

SIMULATED = Path(__file__).with_name("simulated")
DELAY = 200  # microseconds at most, before one in five operations: enough for another order
DELAYED = 0.2
PARAMETERS = 12  # of one test, where each operation is queued and most sweeps ran on the CPU

# What torch says of a thread that is new to CUDA, and Lightning of a GPU that it shall not use.
_CUDAS_OWN = (
    "Attempting to run cuBLAS, but there was no current CUDA",
    "GPU available but not used",
)

_MANY_MODULES = 100
_modules = 0  # that were imported when the collector looked at them last
_why_not: dict[str, str] = {}  # the accelerator could not be built
_deselected: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="accept the golden files in tests/golden"
    )
    parser.addoption(
        "--simulated", action="store_true", help="stages are on the simulated accelerator"
    )
    parser.addoption("--cuda", action="store_true", help="stages are on CUDA devices")
    parser.addoption("--mixed", action="store_true", help="with either: each second stage is not")
    parser.addoption(
        "--delay-seed", type=int, default=0, help="of the delays on the simulated accelerator"
    )
    parser.addoption(
        "--parameters",
        type=int,
        help="run so many of a test's parameter sets, chosen by the seed; 0: all",
    )
    parser.addoption("--one-in", type=int, default=1, help="run one test in so many")
    parser.addoption(
        "--turn", type=int, default=0, help="with --one-in: as many turns in a row run every test"
    )


def pytest_configure(config: pytest.Config) -> None:
    stage_devices.on_cuda = config.getoption("--cuda")
    stage_devices.is_mixed = config.getoption("--mixed")
    if config.getoption("--cuda"):
        torch.backends.cudnn.allow_tf32 = False  # beside the CPU, and it is torch's default
        for message in _CUDAS_OWN:
            config.addinivalue_line("filterwarnings", f"ignore:{message}:UserWarning")
    if not config.getoption("--simulated"):
        return
    try:
        from . import simulated  # noqa: F401 - from here on there is an accelerator
    except CannotBuildError as error:
        _why_not["simulated"] = str(error)


def pytest_report_header(config: pytest.Config) -> str | None:
    if not config.getoption("--simulated"):
        return None
    if _why_not:
        return f"simulated accelerator: not here, {_why_not['simulated']}"
    return f"simulated accelerator: delays of seed {config.getoption('--delay-seed')}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Its own tests import it: not in a run without it."""
    is_own = collection_path == SIMULATED
    return True if is_own and (_why_not or not config.getoption("--simulated")) else None


@pytest.hookimpl(trylast=True)  # after -m and -k: one parameter set is one of what they leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _why_not:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=_why_not["simulated"]))
        return
    reasons = dict(_reasons(config, items))
    _deselected.update(reasons.values())
    config.hook.pytest_deselected(items=list(reasons))
    items[:] = [item for item in items if item not in reasons]


def _reasons(config: pytest.Config, items: list[pytest.Item]) -> Iterator[tuple[pytest.Item, str]]:
    """What does not run, on the simulated accelerator or because fewer tests shall, and why."""
    seed, most = config.getoption("--delay-seed"), config.getoption("--parameters")
    is_simulated = config.getoption("--simulated") or config.getoption("--cuda")
    is_beside_others = hasattr(config, "workerinput")  # in a process of pytest-xdist
    has_all_own = most is None
    if most is None:
        most = PARAMETERS if is_simulated else 0
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("cpu") if is_simulated else None
        if mark is not None:
            yield item, mark.args[0]
        elif is_beside_others and item.get_closest_marker("timed"):
            yield item, "timed: needs a run without -n"
        elif is_simulated and not _is_own(item) and not _asks_for_devices(item):
            yield item, "its module asks for no devices (tests/stage_devices.py)"
        elif not (item.get_closest_marker("every") or (_is_own(item) and has_all_own)):
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    sampled: list[pytest.Item] = []
    for family in families.values():
        family.sort(key=lambda item: zlib.crc32(f"{seed} {item.nodeid}".encode()))
        kept = family[:most] if most else family
        for item in family[len(kept) :]:
            yield item, "another parameter set of the same test: --parameters"
        sampled += kept
    one_in, turn = config.getoption("--one-in"), config.getoption("--turn")
    chosen = in_turn([item.nodeid for item in sampled], one_in, turn)
    for item in sampled:
        if item.nodeid not in chosen:
            yield item, f"one test in {one_in}: --one-in"


def _is_own(item: pytest.Item) -> bool:
    """Whether it tests the simulated accelerator itself."""
    return item.path.parent == SIMULATED


def _asks_for_devices(item: pytest.Item) -> bool:
    """Whether its module does, or one in a folder of tests that it shares with others."""
    module = item.getparent(pytest.Module)
    assert module is not None
    homes = _homes(module.obj)
    shared = {h for h in homes if re.match(r"tests\.(\w+\.)+(?!test_)\w+$", h)}
    return any(
        stage_devices.__name__ in _homes(sys.modules[h]) for h in {module.obj.__name__} | shared
    )


def _homes(module: ModuleType) -> set[str]:
    """The modules that define what a module has."""
    values = [value for value in vars(module).values() if value is not stage_devices.examples]
    return {str(getattr(value, "__module__", "")) for value in values}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With ``-n``: each process has selected, and one reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["deselected"] = dict(_deselected)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for reason, count in getattr(node, "workeroutput", {}).get("deselected", {}).items():
        _deselected[reason] = count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason, count in _deselected.most_common():
        terminalreporter.write_line(f"NOT RUN [{count}] {reason}")


@pytest.fixture(autouse=True)
def _one_thread_and_one_seed() -> Iterator[None]:
    """Equality to the bit is promised at equal intra-operation threads: one, here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _in_order(request: pytest.FixtureRequest) -> Iterator[None]:
    """On the simulated accelerator: delays of the test's own, and afterwards no race, no failure."""
    if not request.config.getoption("--simulated") or _why_not:
        yield
        return
    from . import simulated

    name = request.node.nodeid.encode()
    seed = request.config.getoption("--delay-seed") + (zlib.crc32(name) << 32)
    simulated.reset()
    simulated.set_delay(0, DELAY, DELAYED, seed)
    yield
    simulated.settle()
    found = [*simulated.races(), *filter(None, [simulated.error()])]
    simulated.reset()
    simulated.set_flags()
    assert not found, "\n".join([f"{len(found)} races or failed operations:", *found[:10]])


@pytest.fixture(autouse=True)
def _lanes_for_small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test models are so small that the engine would choose one thread: here it is the lanes that
    are tested. What it chooses has tests of its own."""
    monkeypatch.setattr(prepared, "SMALL_OPERATION", 0.0)
    monkeypatch.setattr(prepared, "SMALL_HOP", 0.0)


@pytest.hookimpl(tryfirst=True)  # before the test's fixtures make anything
def pytest_runtest_setup() -> None:
    """What is imported by now stays: the collector need not look at it again and again."""
    global _modules
    if len(sys.modules) > _modules + _MANY_MODULES:
        _modules = len(sys.modules)
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _rates_of_round_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is predicted must not depend on the machine: measuring has tests of its own."""
    pin(monkeypatch.setattr)


@pytest.fixture(scope="session", autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    close_idle_threads()
    gc.collect()
