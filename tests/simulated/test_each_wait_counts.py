"""Each wait, each protection of memory, each event, the forward lock, and each
release: without it some test fails."""

import inspect
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from blockpipe.crossing.host_stores import HostLinks

from .. import simulated as accelerator
from ..crossing import test_host_stores
from ..devices import test_copies
from .mutants import EVENTS, FORWARD_LOCK, RELEASES, WAITS, Mutant, mutants, without
from .without_a_release import LOCKING

ENGINE = [
    "devices.devices",
    "devices.copies",
    "devices.copy_lifetimes",
    "crossing.tags",
    "crossing.microbatch_run",
    "crossing.tensors.gradients",
    "crossing.tensors.hop_copies",
    "execution.step",
    "execution.step_state",
    "execution.microbatch.arguments",
    "execution.microbatch.forward",
    "execution.microbatch.backward",
    "execution.plain_loop",
    "execution.autograd_bridge",
]


def calls(module: ModuleType) -> Iterator[Callable[[], Any]]:
    """A module's tests with each of their parameters, where no fixture but ``links`` is needed."""
    for name, function in vars(module).items():
        if not name.startswith("test_"):
            continue
        axes = []
        for mark in getattr(function, "pytestmark", ()):
            if mark.name == "parametrize":
                given = mark.args[0]
                names = given.replace(",", " ").split() if isinstance(given, str) else given
                axes.append([(names, v if len(names) > 1 else (v,)) for v in mark.args[1]])
        for choice in itertools.product(*axes):
            given = {n: v for names, values in choice for n, v in zip(names, values, strict=True)}
            missing = inspect.signature(function).parameters.keys() - given.keys()
            if missing <= {"links"}:
                yield partial(called, function, given, is_linked=bool(missing))


def called(function: Callable[..., Any], given: dict[str, Any], *, is_linked: bool) -> None:
    links = HostLinks() if is_linked else None
    try:
        function(**given, **({"links": links} if links is not None else {}))
    finally:
        if links is not None:
            links.close()


def is_found(scenarios: Iterator[Callable[[], Any]]) -> bool:
    """Whether one of these tests fails, by what it asserts or by a race."""
    for scenario in scenarios:
        torch.manual_seed(0)
        try:
            scenario()
            accelerator.settle()
        except Exception:
            return True
        if accelerator.races() or accelerator.error():
            return True
    return False


def check(mutant: Mutant, module: ModuleType) -> None:
    with without(mutant):
        try:
            found = is_found(calls(module))
        finally:
            accelerator.settle()
            accelerator.reset()
            accelerator.set_flags()
    assert found, f"no test fails without {mutant}"


@pytest.mark.slow
@pytest.mark.parametrize("module", [test_copies, test_host_stores])
def test_as_it_is_no_test_fails(module):
    """Else the tests below would show nothing."""
    assert not is_found(calls(module))


@pytest.mark.parametrize("mutant", mutants(ENGINE, WAITS | EVENTS), ids=str)
def test_a_step_needs_it(mutant):
    """Taken out of the engine, it is missed by a test of copies."""
    check(mutant, test_copies)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant",
    mutants(["execution.lanes.lane_threads", "_common.threads.thread_state"], FORWARD_LOCK),
    ids=str,
)
def test_forward_code_needs_the_baton(mutant):
    """Not taken, two threads run the user's code at a time."""
    check(mutant, test_copies)


@pytest.mark.parametrize("mutant", mutants(["crossing.host_stores"], WAITS | EVENTS), ids=str)
def test_offloading_needs_it(mutant):
    """Taken out of what goes to host memory and back, it is missed by a test of that."""
    accelerator.set_delay(0, 0, 1.0, 0, 20_000, 20_000)
    check(mutant, test_host_stores)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_next_step_needs_each_release():
    """Taken out, a step hangs or fails. Each in a process of its own, for what hangs stays."""
    found = mutants(LOCKING, RELEASES)
    assert len(found) >= 8
    program = [sys.executable, "-m", "tests.simulated.without_a_release"]
    processes = [
        subprocess.Popen([*program, str(number)], stderr=subprocess.DEVNULL)
        for number in range(len(found))
    ]
    try:
        ends = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert 2 not in ends, "the steps hang or fail as they are"
    assert [mutant for mutant, end in zip(found, ends, strict=True) if end == 0] == []
