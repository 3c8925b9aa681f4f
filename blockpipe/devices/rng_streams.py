"""Random numbers that do not depend on timing: a stream for each micro-batch.

Generators are the process's, and micro-batches that are under way at once would draw from them in
the order in which threads happen to run. So each micro-batch has a stream of its own: the generator
is set to it where the forward begins to draw, and saved where it leaves. Two never draw at the same
time. A lock for each draw was no alternative: it would leave the order to chance.

The first micro-batch continues from the generator's state, and the generator continues from the
first micro-batch's; the others begin at states derived from it. So a step of one micro-batch draws
the numbers of the plain loop.
"""

from __future__ import annotations

import hashlib
import random
import sys
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch

from .._common.callsite import users_line
from .._common.threads.standstill import PATIENCE, Gate, Standstill
from .._common.threads.thread_state import waiting_for_device
from .._torch.modes import stash, stashed
from ..errors import UsageError
from .devices import is_asynchronous
from .ownership import copying

# A source of random numbers: a device's generator, Python's ``random``, numpy's global one.
Source = torch.device | str
States = dict[Source, Any]

_CPU = torch.device("cpu")
_TURN = "blockpipe_turn"  # a key of the state that autograd's device threads get from callers


class _Turn:
    """The right to draw, which one thread has at a time.

    Its owner may take it again, and so may autograd's device threads that work for the owner: a
    recomputation in a backward draws there, while the owner waits for them. A lock that knows only
    threads would wait forever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gate = Gate()
        self._owner: object = None  # one assignment: an interrupt comes before it or after
        self._count = 0

    def acquire(self, *, blocking: bool = True) -> bool:
        """Take it, once more if it is ours; returns whether it was taken.

        Args:
            blocking: whether to wait until it is free.

        Raises:
            UsageError: its owner has stopped.
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
                    "forwards that draw random numbers take turns, and this one deadlocks with "
                    f"another: it has waited for it, and nothing has run for {PATIENCE:.0f} "
                    f"seconds ({users_line()}); in a forward or a loss, do not wait for a thread "
                    "that calls a pipeline (a teacher's): call it before the step, and pass its "
                    "result as a part of the target"
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
        """Give it back, regardless of how often it was taken."""
        self._owner = None
        self._gate.open()

    def is_ours(self) -> bool:
        """Return whether this thread has it, or the thread for which this one works."""
        owner = self._owner
        return owner is not None and stashed(_TURN) is owner


_turn = _Turn()


def sources_of(kinds: Collection[str], device: torch.device) -> list[Source]:
    """Return the sources from which a stage on a device draws.

    Args:
        kinds: the kinds that the recording has seen: "torch", "random", "numpy".
        device: the stage's device.
    """
    found: list[Source] = []
    for kind in kinds:
        if kind != "torch":
            found.append(kind)
    # Code that draws from one may draw from torch's on a path that was not recorded.
    return [*found, *torchs_of(device)] if kinds else []


def torchs_of(device: torch.device) -> list[Source]:
    """Return torch's generators from which a stage on a device can draw."""
    return [_CPU, device] if is_asynchronous(device) else [_CPU]


def host_sources() -> list[str]:
    """Return the sources of Python code, without torch's."""
    return ["random", "numpy"] if "numpy" in sys.modules else ["random"]


def every_source() -> list[Source]:
    """Return all sources of this process: of the host, and of every accelerator.

    An accelerator that is not initialized has drawn nothing, and asking it would initialize it.
    """
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


def derived(source: Source, state: Any, what: str) -> Any:
    """Return a state that is derived from another, and shares no numbers with it.

    Args:
        source: whose state it is.
        state: the other one.
        what: draws; of the same state, another text makes other numbers.
    """
    text = f"{what} of {_bytes_of(state)!r}"
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    if source == "random":
        return random.Random(seed).getstate()
    if source == "numpy":
        return sys.modules["numpy"].random.RandomState(seed % 2**32).get_state()
    assert isinstance(source, torch.device)
    return torch.Generator(source).manual_seed(seed).get_state()


def _bytes_of(state: Any) -> bytes:
    if not isinstance(state, torch.Tensor):  # numpy's has an array, whose repr is slow
        return b"".join(p.tobytes() if hasattr(p, "tobytes") else repr(p).encode() for p in state)
    with copying():  # it belongs to no stage
        # By numpy it is much faster, but torch works without numpy.
        return state.numpy().tobytes() if "numpy" in sys.modules else bytes(state.tolist())


def current(sources: Iterable[Source]) -> States:
    """Return the states of generators, for :func:`replayed`."""
    return {source: _get(source) for source in sources}


def is_same_state(state: Any, other: Any) -> bool:
    """Return whether two states of one generator are the same."""
    if isinstance(state, tuple) and isinstance(state[1], tuple):  # of Python's random
        return bool(state == other)
    return _bytes_of(state) == _bytes_of(other)


def moved(states: States) -> list[Source]:
    """Return the generators that are in another state now."""
    return [source for source, then in states.items() if not is_same_state(_get(source), then)]


def restore(states: States) -> None:
    """Put generators into these states."""
    for source, state in states.items():
        _set(source, state)


class SettingGenerators:
    """A stretch in which this thread may set the process's generators, or looks whether others do.

    Args:
        sets: whether it may set them.
    """

    _lock = threading.Lock()
    _began = _under_way = 0  # of all threads' stretches that set them

    def __init__(self, *, sets: bool) -> None:
        self._sets = sets

    def __enter__(self) -> Self:
        kind = SettingGenerators
        with kind._lock:
            kind._began += self._sets
            self._others, self._before = kind._under_way, kind._began
            kind._under_way += self._sets
        return self

    def __exit__(self, *failure: object) -> None:
        kind = SettingGenerators
        with kind._lock:
            kind._under_way -= self._sets

    def is_alone(self) -> bool:
        """Return whether no other thread's stretch has set them since this one began."""
        with self._lock:
            return not self._others and SettingGenerators._began == self._before


class preserve_rng:  # noqa: N801 - a context manager that reads as a participle
    """While entered, draws are temporary: at the end generators are in their earlier states. Other
    threads may draw meanwhile.

    It is a class: after an interrupt, a generator function would end only when it is collected.
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
            _set(source, derived(source, state, self._what))

    def __exit__(self, *failure: Any) -> None:
        restore(self._before)


@contextmanager
def replayed(states: States) -> Iterator[None]:
    """Enter to draw again the numbers from these states on; restores the earlier states."""
    with own_turn(), preserve_rng(states):
        restore(states)
        yield


class own_turn:  # noqa: N801 - reads as a noun
    """While entered, no other thread of a pipeline draws. It is a class for the same reason."""

    def __enter__(self) -> None:
        _take_turn()

    def __exit__(self, *failure: Any) -> None:
        _turn.release()


def is_own_turn() -> bool:
    """Return whether this thread may draw now."""
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


@contextmanager
def _while_nobody_draws() -> Iterator[None]:
    """Wait until no other thread draws, another pipeline's either, and let none begin meanwhile."""
    _take_turn()
    try:
        yield
    finally:
        _turn.release()


class RngStreams:
    """The streams of one step's micro-batches.

    Args:
        sources: the sources of all stages.
        microbatches: the number of micro-batches.

    Attributes:
        others: the sources from which somebody has drawn between the stretches that draw, such as
            a hop that had never drawn before. Within one nobody can tell.
    """

    def __init__(self, sources: Iterable[Source], microbatches: int) -> None:
        with _while_nobody_draws():
            self._begin = current(dict.fromkeys(sources))
        self._left = dict(self._begin)  # where the last stretch has left them
        self.others: set[Source] = set()
        self._states: list[States] = [{} for _ in range(microbatches)]
        self._drew, self._first_drew = set[Source](), set[Source]()  # the first micro-batch
        self._drawing: dict[int, list[Source]] = {}

    def enter(self, microbatch: int, sources: list[Source]) -> None:
        """Begin to draw for a micro-batch; waits for others that draw."""
        if not sources:
            return
        _take_turn()
        self._drawing[microbatch] = sources  # from here on leave() ends the turn
        states = self._states[microbatch]
        self._look(sources)
        for source in sources:
            if source not in states:
                begin = self._begin[source]
                states[source] = (
                    derived(source, begin, f"micro-batch {microbatch}") if microbatch else begin
                )
            _set(source, states[source])

    def leave(self, microbatch: int, *, tell: bool = False) -> list[Source]:
        """Stop drawing for a micro-batch: it goes on to another hop, or is done.

        Args:
            microbatch: the index of the micro-batch.
            tell: whether to return all sources that it has drawn from since it entered, and not
                only those from which no micro-batch had drawn before.

        Returns:
            The sources that it has drawn from.
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
                continue  # the forward failed before
            state = _get(source)
            new = tell or source not in self._drew
            is_asked = new or (microbatch == 0 and source not in self._first_drew)
            if is_asked and _bytes_of(state) != _bytes_of(states[source]):
                drew += [source] if new else []
                self._first_drew.update([] if microbatch else [source])
            states[source] = self._left[source] = state
        self._drew.update(drew)
        return drew

    def _look(self, sources: Iterable[Source]) -> None:
        """Note the generators that have gone on since a stretch that draws has ended."""
        self.others.update(s for s in sources if not is_same_state(_get(s), self._left[s]))

    def abandon(self) -> None:
        """Restore the generators: the step has failed, and counts as if it had not drawn."""
        for source, begin in self._begin.items():
            _set(source, begin)

    def finish(self) -> None:
        """Set the generators to the states in which the first micro-batch left them."""
        with _while_nobody_draws():
            self._finish()

    def _finish(self) -> None:
        self._look(self._begin)
        for source, begin in self._begin.items():
            state = self._states[0].get(source, begin)
            is_where_it_was = source in self._drew and is_same_state(state, begin)
            if (is_where_it_was and not self._is_set_back(source)) or source in self.others:
                # Only others have drawn: the next step must not draw the same numbers. Nor may its
                # numbers follow from timing, as those do that nobody's stream gave.
                state = derived(source, begin, "the next step")
            _set(source, state)

    def _is_set_back(self, source: Source) -> bool:
        """Return whether forwards have set a generator to where it was: the first one has drawn as
        well, or another one, which began elsewhere, has left it there too."""
        first, *others = (states.get(source) for states in self._states)
        ends = (state for state in others if state is not None and first is not None)
        return source in self._first_drew or any(is_same_state(state, first) for state in ends)
