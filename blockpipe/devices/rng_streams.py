"""Random numbers that do not depend on timing: a stream for each micro-batch.

Generators are the process's, and micro-batches that are under way at once would draw from them in
the order in which threads happen to come. So each micro-batch has a stream of its own, which goes
along on its run: set where its forward runs, kept where it leaves. Two never draw at the same
time. A lock for each draw was no alternative: it would leave the order to chance.

The first micro-batch goes on from where the generator is, and the generator goes on from where the
first micro-batch ends; the others begin at states derived from it. So a step of one micro-batch
draws what the plain loop draws.
"""

from __future__ import annotations

import hashlib
import random
import sys
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .._common.callsite import users_line
from .._common.standstill import PATIENCE, Gate, Standstill
from .._common.thread_state import stash, stashed, waiting_for_device
from ..errors import UsageError
from .devices import is_asynchronous
from .ownership import copying

# What is drawn from: a device's generator, Python's ``random``, numpy's global one.
Source = torch.device | str
States = dict[Source, Any]

_CPU = torch.device("cpu")
_TURN = "blockpipe_turn"  # in the state that autograd's device threads get from who called them


class _Turn:
    """Who may draw now. Its owner may take it again, and so may autograd's device threads that work
    for the owner: what recomputes in a backward draws there, while the owner waits for them. A
    lock that knows threads alone would wait for ever."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gate = Gate()
        self._owner: object = None  # one assignment: an interrupt comes before it or after
        self._count = 0

    def acquire(self, *, blocking: bool = True) -> bool:
        """Take it, once more if it is ours; without ``blocking``: only if it is free.

        Raises:
            UsageError: who has it stands still.
        """
        if self.is_ours():
            with self._lock:
                self._count += 1
            return True
        standstill: Standstill | None = None
        while not self._taken():
            if not blocking:
                return False
            standstill = standstill or Standstill()
            self._gate.wait()
            if self._owner is not None and standstill.is_reached():
                raise UsageError(
                    "forwards that draw random numbers take turns, but this one waits for "
                    f"another, and for {PATIENCE:.0f} seconds nothing has run: that one seems to "
                    f"wait for this one ({users_line()}); in a forward or a loss, do not wait for "
                    "a thread that calls a pipeline (a teacher's): call it before the step, and "
                    "pass what it gives as a part of the target"
                )
        return True

    def _taken(self) -> bool:
        """Take it if it is free."""
        owner = object()
        with self._lock:
            if self._owner is not None:
                return False
            stash(_TURN, owner)
            self._count = 1
            self._owner = owner
            return True

    def release(self) -> None:
        """Give it back, if that was the last time."""
        with self._lock:
            self._count -= 1
            is_over = self._count <= 0
        if is_over:
            self.end()

    def end(self) -> None:
        """Give it back, however often it was taken."""
        self._owner = None
        self._gate.open()

    def is_ours(self) -> bool:
        """Whether this thread has it, or who this thread works for."""
        owner = self._owner
        return owner is not None and stashed(_TURN) is owner


_turn = _Turn()


def sources_of(kinds: Collection[str], device: torch.device) -> list[Source]:
    """What a stage on a device draws from.

    Args:
        kinds: "torch", "random", "numpy": as the recording has them.
        device: the stage's.
    """
    found: list[Source] = []
    for kind in kinds:
        if kind != "torch":
            found.append(kind)
    # Who draws from one may draw from torch's where the recording did not come.
    return [*found, *torchs_of(device)] if kinds else []


def torchs_of(device: torch.device) -> list[Source]:
    """torch's generators that a stage on a device can draw from."""
    return [_CPU, device] if is_asynchronous(device) else [_CPU]


def host_sources() -> list[str]:
    """What Python code can draw from besides torch."""
    return ["random", "numpy"] if "numpy" in sys.modules else ["random"]


def every_source() -> list[Source]:
    """All that anything in this process can draw from: of the host, and of every accelerator.
    Nothing has been drawn on one that is not initialized; asking it would do that."""
    found: list[Source] = [*host_sources(), _CPU]
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return found
    if not getattr(torch.get_device_module(kind), "is_initialized", lambda: True)():
        return found
    return [*found, *(torch.device(kind.type, i) for i in range(torch.accelerator.device_count()))]


def _get(source: Source) -> Any:
    if source == "random":
        return random.getstate()
    if source == "numpy":
        return sys.modules["numpy"].random.get_state()
    if source == _CPU:
        return torch.default_generator.get_state()
    assert isinstance(source, torch.device)
    return torch.get_device_module(source).get_rng_state(source)


def _set(source: Source, state: Any) -> None:
    if source == "random":
        random.setstate(state)
    elif source == "numpy":
        sys.modules["numpy"].random.set_state(state)
    elif source == _CPU:
        torch.default_generator.set_state(state)
    else:
        assert isinstance(source, torch.device)
        torch.get_device_module(source).set_rng_state(state, source)


def _derived(source: Source, state: Any, what: str) -> Any:
    """A state that follows from another, and shares no numbers with it."""
    text = f"{what} of {_bytes_of(state)!r}"
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    if source == "random":
        return random.Random(seed).getstate()
    if source == "numpy":
        return sys.modules["numpy"].random.RandomState(seed % 2**32).get_state()
    assert isinstance(source, torch.device)
    return torch.Generator(source).manual_seed(seed).get_state()


def _bytes_of(state: Any) -> bytes:
    if not isinstance(state, torch.Tensor):  # numpy's has an array in it, of which a repr is slow
        return b"".join(p.tobytes() if hasattr(p, "tobytes") else repr(p).encode() for p in state)
    with copying():  # it is no stage's
        # Much the faster way, but torch does without numpy.
        return state.numpy().tobytes() if "numpy" in sys.modules else bytes(state.tolist())


def current(sources: Iterable[Source]) -> States:
    """The states that generators are in, for :func:`replayed`."""
    return {source: _get(source) for source in sources}


def moved(states: States) -> list[Source]:
    """Which of these generators are in another state now."""
    return [source for source, then in states.items() if _bytes_of(_get(source)) != _bytes_of(then)]


def restore(states: States) -> None:
    """Put generators into these states."""
    for source, state in states.items():
        _set(source, state)


class preserve_rng:  # noqa: N801 - a context manager that reads as a participle
    """At the end generators are where they were. Others may draw meanwhile.

    No function that yields: after an interrupt, such a one ends when the collector finds it.
    """

    def __init__(self, sources: Iterable[Source]) -> None:
        self._sources = sources

    def __enter__(self) -> None:
        self._before = current(self._sources)

    def __exit__(self, *failure: Any) -> None:
        restore(self._before)


class diverted:  # noqa: N801 - a context manager that reads as a participle
    """While entered, generators are in states that follow from where they were.

    Args:
        kept: those that are where they were at the end; the others go on from what was drawn.
        sources: those that are drawn from meanwhile.
        what: draws; of the same state, another text makes other numbers.
    """

    def __init__(self, kept: Iterable[Source], sources: Iterable[Source], what: str) -> None:
        self._kept, self._sources, self._what = kept, sources, what

    def __enter__(self) -> None:
        self._before = current(self._kept)
        for source, state in current(self._sources).items():
            _set(source, _derived(source, state, self._what))

    def __exit__(self, *failure: Any) -> None:
        restore(self._before)


@contextmanager
def replayed(states: States) -> Iterator[None]:
    """Draw again what was drawn from these states on; then everything is as it was."""
    with own_turn(), preserve_rng(states):
        restore(states)
        yield


class own_turn:  # noqa: N801 - reads as a noun
    """While entered, no other thread of a pipeline draws. No function that yields, as above."""

    def __enter__(self) -> None:
        _take_turn()

    def __exit__(self, *failure: Any) -> None:
        _turn.release()


def is_own_turn() -> bool:
    """Whether this thread may draw now."""
    return _turn.is_ours()


def end_turn() -> None:
    """Let others draw, if this thread's turn is not over."""
    if _turn.is_ours():
        _turn.end()


def _take_turn() -> None:
    """Wait until no other thread draws. The forward lock is released meanwhile: the
    thread that draws may be waiting for it, so no thread waits for its turn while it holds it."""
    if not _turn.acquire(blocking=False):
        with waiting_for_device():
            _turn.acquire()


class RngStreams:
    """The streams of one step's micro-batches.

    Args:
        sources: all that any stage draws from.
        microbatches: how many there are.
    """

    def __init__(self, sources: Iterable[Source], microbatches: int) -> None:
        self._begin = current(dict.fromkeys(sources))
        self._states: list[States] = [{} for _ in range(microbatches)]
        self._drew: set[Source] = set()
        self._drawing: dict[int, list[Source]] = {}

    def enter(self, microbatch: int, sources: list[Source]) -> None:
        """A micro-batch comes to where it draws; waits for others that draw."""
        if not sources:
            return
        _take_turn()
        self._drawing[microbatch] = sources  # from here on leave() ends the turn
        states = self._states[microbatch]
        for source in sources:
            if source not in states:
                begin = self._begin[source]
                states[source] = (
                    _derived(source, begin, f"micro-batch {microbatch}") if microbatch else begin
                )
            _set(source, states[source])

    def leave(self, microbatch: int, *, tell: bool = False) -> list[Source]:
        """It goes on to elsewhere, or is done.

        Args:
            microbatch: which.
            tell: all that it drew from since it came, not only what nobody drew from before.

        Returns:
            What it drew from.
        """
        sources = self._drawing.pop(microbatch, None)
        if sources is None:
            return []
        try:
            return self._drawn(microbatch, sources, tell)
        finally:
            _turn.release()

    def _drawn(self, microbatch: int, sources: list[Source], tell: bool) -> list[Source]:
        states, drew = self._states[microbatch], []
        for source in sources:
            if source not in states:
                continue  # it failed before it came so far
            state = _get(source)
            new = tell or source not in self._drew
            if new and _bytes_of(state) != _bytes_of(states[source]):
                drew.append(source)
            states[source] = state
        self._drew.update(drew)
        return drew

    def abandon(self) -> None:
        """The step has failed: as if nobody had drawn."""
        for source, begin in self._begin.items():
            _set(source, begin)

    def finish(self) -> None:
        """The generators go on from where the first micro-batch left them."""
        for source, begin in self._begin.items():
            state = self._states[0].get(source, begin)
            if source in self._drew and _bytes_of(state) == _bytes_of(begin):
                # Only others have drawn: in the next step it must not be the same numbers.
                state = _derived(source, begin, "the next step")
            _set(source, state)
