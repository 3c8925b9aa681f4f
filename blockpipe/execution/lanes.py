"""Turns: who runs when, in which thread, and what happens when one fails.

Every lane runs its actions in the schedule's order. A run holds a thread while its forward is
under way and waits at each border for its turn; backwards are run by whoever is free. The
alternative, a worker for each stage and a barrier at every clock tick (torchgpipe), lets the
slowest stage's Python gate all, and cannot run a forward that is one piece of Python.

The first failure wins: everybody else stops at the next border, and the caller gets it once all
threads have come home.
"""

import contextlib
import itertools
import os
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch

from .._common.callsite import line_of_thread
from .._common.standstill import PATIENCE, POLL, Standstill
from .._common.thread_state import CallerState, give_forward_lock, take_forward_lock
from ..errors import StateError
from ..schedules.schedule import Action, Actions, Schedule

_CAN_PIN = hasattr(os, "sched_setaffinity")  # for one thread: Linux


class Abandoned(BaseException):
    """Ends a run whose step has failed elsewhere; never reaches the caller.

    No ``Exception``: a user's ``except Exception`` must not keep a failed step going.
    """


class _Pool:
    """Threads that wait between steps, for the whole process; made when needed, reused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []

    def take(self, cores: frozenset[int]) -> "_Worker":
        """A thread that is on these cores already when it is woken."""
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            worker = _Worker(self)
            worker.start()
        try:
            worker.keep_to(cores)
        except BaseException:
            self.put_back(worker)
            raise
        return worker

    def put_back(self, worker: "_Worker") -> None:
        with self._lock:
            self._idle.append(worker)

    def close(self) -> None:
        """End the idle threads and wait for them."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.jobs.put(None)
        for worker in idle:
            worker.join()

    def forget(self) -> None:
        """In a forked child the threads are not there."""
        self._lock = threading.Lock()
        self._idle = []


class _Worker(threading.Thread):
    def __init__(self, pool: _Pool) -> None:
        super().__init__(name="blockpipe", daemon=True)
        self.pool = pool
        self.jobs: queue.SimpleQueue[tuple[Callable[[], None], Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self.threads = 0
        self.cores = _all_cores()

    def keep_to(self, cores: frozenset[int]) -> None:
        """Run on these cores from now on. They may be gone meanwhile (a container's share can
        shrink): then the thread stays where it is."""
        if cores != self.cores:
            self.cores = cores
            with contextlib.suppress(OSError):
                os.sched_setaffinity(self.native_id or 0, cores)

    def run(self) -> None:
        while (work := self.jobs.get()) is not None:
            job, done = work
            try:
                job()
            finally:
                self.pool.put_back(self)
                done()
            del work, job, done  # before waiting: they hold their step


_pool = _Pool()
os.register_at_fork(after_in_child=_pool.forget)


def close_idle_threads() -> None:
    """End the threads that wait for the next step."""
    _pool.close()


def idle_threads() -> int:
    """How many threads wait for the next step."""
    return len(_pool._idle)


class _Job(NamedTuple):
    """What a thread does next: a forward, or the backwards that are due on a lane. It returns the
    job that follows on that lane, if this thread is free to do it."""

    run: Callable[[], "_Job | None"]
    lane: int
    is_backward: bool


class Turns:
    """The state of one step's schedule: what each lane is at, what is done, what failed.

    A thread that is done with an action does the lane's next one itself, unless its forward goes
    on elsewhere: waking another thread takes as long as a small action.

    Args:
        schedule: the order on every lane.
        forward: runs one micro-batch's forward; calls :meth:`cross` at its borders.
        backward: runs one action that is no forward.
        ambient: the caller's thread state.
        queued: for each lane, whether its device is asynchronous. On these at most one run
            runs Python forward code at a time: the one that has the forward lock.
        threads: intra-operation threads for each of ours.
        only: run the forwards alone, or all but them.
    """

    def __init__(
        self,
        schedule: Schedule,
        forward: Callable[[int], None],
        backward: Callable[[Action], None],
        ambient: CallerState,
        *,
        queued: Sequence[bool],
        threads: int,
        only: Literal["F", "B"] | None = None,
    ) -> None:
        self._lane_of = schedule.lane_of_hop
        self._microbatches = schedule.microbatches
        self._actions = [lane.unpacked() for lane in schedule.lanes if isinstance(lane, Actions)]
        self._forward = forward
        self._backward = backward
        self._ambient = ambient
        self._queued = queued
        self._forward_lock = threading.Lock()
        self._threads = threads
        self._only = only
        lanes = len(self._actions)
        self._cores = [_all_cores()] * lanes if any(queued) else _shares_of_cores(lanes)
        self._lock = threading.Lock()
        self._over = threading.Condition(self._lock)
        self._position = [0] * lanes
        self._backing = [False] * lanes  # whether a thread runs backwards of the lane
        self._waiting: dict[Action, threading.Lock] = {}  # runs at a border; locked till woken
        self._hop: dict[int, int] = {}  # where each run under way is
        self._thread_of: dict[int, int] = {}  # by its identifier
        self._skipped: set[Action] = set()
        self._finished: set[int] = set()
        self._done: set[Action] = set()
        self._started = 0
        self._running = 0
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Run the whole step; returns when every thread is done, or raises the first failure."""
        caller_threads = torch.get_num_threads()
        try:
            try:
                self._begin()
                self._wait_until_over()
            except BaseException as error:  # an interrupt, a signal handler's, no more threads
                self.fail(error)
                self._join()  # interrupted twice, it raises: the user's code may never end
        finally:
            if self._threads != caller_threads:
                torch.set_num_threads(caller_threads)
        failure, self._failure = self._failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # the traceback holds this frame

    def _begin(self) -> None:
        with self._lock:
            if self._only == "B":
                self._finished.update(range(self._microbatches))
            for lane in range(len(self._actions)):
                self._go_on(lane)

    def _wait_until_over(self) -> None:
        self._join()

    def _join(self) -> None:
        standstill = Standstill()
        while not self._is_over():
            if self._failure is None and self._waiting and standstill.is_reached():
                self.fail(self._stands_still())

    def _is_over(self) -> bool:
        with self._lock:
            if self._running:
                # Not for ever: a signal that comes just before the wait begins does not end it.
                self._over.wait(timeout=POLL)
            return not self._running

    def _stands_still(self) -> StateError:
        """Those whose turn it is do not go on; perhaps they wait for one that waits for its own."""
        with self._lock:
            waiting = {turn.microbatch: turn.hop for turn in self._waiting}
            under_way = self._hop.keys() - waiting.keys() - self._finished
            position = {m: self._thread_of[m] for m in under_way if m in self._thread_of}
        are = "; ".join(
            f"micro-batch {m} stands at {line_of_thread(thread)}"
            for m, thread in sorted(position.items())
        )
        wait = ", ".join(f"micro-batch {m} for hop {hop}" for m, hop in sorted(waiting.items()))
        return StateError(
            f"for {PATIENCE:.0f} seconds nothing has run in this step: {are or 'a hook stands'}, "
            f"while others wait for their turn ({wait}); micro-batches are under way at once, and "
            "one must not wait for what another one holds across stages (a lock: let it go before "
            "the stage ends, or use schedule='sequential'), nor for a thread that waits for this "
            "step"
        )

    # --- threads

    def _submit(self, job: _Job) -> None:
        """Have a thread of the pool do a job. The lock is held."""
        work = partial(self._work, job)
        worker = _pool.take(self._cores[job.lane])
        # Nothing can come between these two: an interrupt would leave a count without a thread.
        self._running += 1
        worker.jobs.put((work, self._one_less))

    def _work(self, first: _Job) -> None:
        """A thread's part of the step: a job, and what it can do after it."""
        try:
            worker = threading.current_thread()
            if isinstance(worker, _Worker) and worker.threads != self._threads:
                torch.set_num_threads(self._threads)  # a new thread does not inherit it
                # A thread that has never asked takes the process's number at its first operation,
                # and that may be the caller's again by then.
                torch.get_num_threads()
                worker.threads = self._threads
            job: _Job | None = first
            while job is not None:
                job = self._ambient.run(job.run, backward=job.is_backward)
        except Abandoned:
            pass
        except BaseException as error:
            self.fail(error)

    def _one_less(self) -> None:
        with self._lock:
            self._running -= 1
            if not self._running:
                self._over.notify_all()

    def fail(self, error: BaseException) -> None:
        """The first failure wins; everybody else is woken to stop."""
        with self._lock:
            if self._failure is None:
                self._failure = error
            for woken in self._waiting.values():
                woken.release()
            self._waiting.clear()

    # --- whose turn it is (the lock is held)

    def _next_job(self, lane: int) -> _Job | None:
        """What a free thread can do on a lane now; a run that waits for its turn is woken."""
        actions, position = self._actions[lane], self._position[lane]
        while position < len(actions) and (
            actions[position] in self._skipped
            or (self._only is not None and (actions[position].kind == "F") != (self._only == "F"))
        ):
            position += 1
        self._position[lane] = position
        if position == len(actions) or self._failure is not None:
            return None
        kind, hop, m = head = actions[position]
        if kind != "F":
            if self._backing[lane] or not self._is_ready(head):
                return None
            self._backing[lane] = True
            return _Job(partial(self._run_backwards, lane), lane, True)
        woken = self._waiting.pop(head, None)
        if woken is not None:
            woken.release()
        elif hop == 0 and m not in self._hop and not self._has_too_many():
            self._hop[m] = -1
            self._started += 1
            return _Job(partial(self._run_microbatch, m), lane, False)
        return None

    def _has_too_many(self) -> bool:
        """A thread is held while a forward is under way: no more of them than can be of use."""
        under_way = self._started - len(self._finished)
        return self._only == "F" and under_way > len(self._lane_of)

    def _is_ready(self, action: Action) -> bool:
        """Whether a backward has what it needs from other lanes."""
        kind, hop, m = action
        if kind in ("W", "R"):
            return True  # what it needs is its own lane's, and comes before it there
        if hop + 1 == len(self._lane_of):
            return m in self._finished
        return Action("B", hop + 1, m) in self._done

    def _go_on(self, lane: int) -> None:
        """Something changed for a lane: have a thread do what can be done now."""
        job = self._next_job(lane)
        if job is not None:
            self._submit(job)

    # --- forward

    def _run_microbatch(self, microbatch: int) -> _Job | None:
        self._thread_of[microbatch] = threading.get_ident()
        try:
            self._forward(microbatch)
        finally:
            give_forward_lock()
        with self._lock:
            hop = self._hop[microbatch]
            lane = self._lane_of[max(hop, 0)]
            self._finished.add(microbatch)
            self._leave(microbatch, hop, len(self._lane_of))
            for other in {self._lane_of[0], self._lane_of[-1]} - {lane}:
                self._go_on(other)  # a run waited for a thread, a backward for this forward
            return self._next_job(lane)

    def cross(self, microbatch: int, before: int, after: int) -> None:
        """A run leaves one hop (``-1``: none) and waits for its turn on another.

        Raises:
            Abandoned: the step has failed meanwhile.
        """
        give_forward_lock()
        _move_to(self._cores[self._lane_of[after]])  # before the wait: see _shares_of_cores
        turn = Action("F", after, microbatch)
        woken: threading.Lock | None = None
        with self._lock:
            self._hop[microbatch] = after
            self._leave(microbatch, before, after)
            if before >= 0:
                self._go_on(self._lane_of[before])
            lane = self._lane_of[after]
            self._go_on(lane)  # passes over what is skipped
            if self._failure is None and not self._is_head(lane, turn):
                woken = self._waiting[turn] = threading.Lock()
                woken.acquire()
        if woken is not None:
            woken.acquire()
        if self._failure is not None:
            raise Abandoned
        if self._queued[self._lane_of[after]]:
            take_forward_lock(self._forward_lock)

    def _is_head(self, lane: int, action: Action) -> bool:
        position = self._position[lane]
        return position < len(self._actions[lane]) and self._actions[lane][position] == action

    def _leave(self, microbatch: int, before: int, after: int) -> None:
        """A run is done with a hop, and will not come to those between it and the next."""
        if before >= 0:
            self._position[self._lane_of[before]] += 1
        for hop in range(before + 1, after):
            self._skipped.add(Action("F", hop, microbatch))
        for hop in range(before + 1, after):
            self._go_on(self._lane_of[hop])

    # --- backward

    def _run_backwards(self, lane: int) -> _Job | None:
        """The backwards that are due on a lane, one after the other."""
        while True:
            action = self._actions[lane][self._position[lane]]
            try:
                if action.kind == "R" and self._queued[lane]:
                    take_forward_lock(self._forward_lock)  # a recomputation is forward code
                self._backward(action)
            finally:
                give_forward_lock()
            with self._lock:
                self._done.add(action)
                self._position[lane] += 1
                self._backing[lane] = False
                if action.hop and self._lane_of[action.hop - 1] != lane:
                    self._go_on(self._lane_of[action.hop - 1])
                job = self._next_job(lane)
            if job is None or not job.is_backward:
                return job


def _all_cores() -> frozenset[int]:
    """The cores that the process may use; empty where the system cannot say."""
    return frozenset(os.sched_getaffinity(os.getpid())) if _CAN_PIN else frozenset()


def _shares_of_cores(lanes: int) -> list[frozenset[int]]:
    """Each CPU lane's share of the cores; all of them for each where there is not one a lane.

    A thread that is woken often lands on its waker's core, and waits there for the waker's time
    slice (3 ms on Linux) while another core idles: with two stages and actions of 5 ms, that took
    a quarter of the step. So a thread of ours keeps to the cores of the lane that it waits for.
    """
    cores = sorted(_all_cores())
    if len(cores) < lanes:
        return [frozenset(cores)] * lanes
    bounds = [i * len(cores) // lanes for i in range(lanes + 1)]
    return [frozenset(cores[a:b]) for a, b in itertools.pairwise(bounds)]


def _move_to(cores: frozenset[int]) -> None:
    """This thread, one of the pool's, runs on these cores from now on."""
    worker = threading.current_thread()
    if isinstance(worker, _Worker):
        worker.keep_to(cores)
