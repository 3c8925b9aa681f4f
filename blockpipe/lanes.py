"""Turns: who runs when, in which thread, and what happens when one fails.

Every lane runs its actions in the schedule's order. A journey holds a thread while its forward is
under way and waits at each border for its turn; each lane has one thread for backwards. The
alternative, a worker for each stage and a barrier at every clock tick (torchgpipe), lets the
slowest stage's Python gate all, and cannot run a forward that is one piece of Python.

The first failure wins: everybody else stops at the next border, and the caller gets it once all
threads have come home.
"""

import itertools
import os
import queue
import threading
from collections.abc import Callable
from functools import partial

import torch

from .ambient import Ambient
from .schedule import Action, Actions, Kind, Schedule

_CAN_PIN = hasattr(os, "sched_setaffinity")  # for one thread: Linux


class Abandoned(BaseException):
    """Ends a journey whose step has failed elsewhere; never reaches the caller.

    No ``Exception``: a user's ``except Exception`` must not keep a failed step going.
    """


class _Pool:
    """Threads that wait between steps, for the whole process; made when needed, reused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []

    def submit(
        self, job: Callable[[], None], done: Callable[[], None], cores: frozenset[int]
    ) -> None:
        """Run a job in a thread that is on these cores already when it is woken; then ``done``,
        when the thread is back in the pool."""
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            worker = _Worker(self)
            worker.start()
        if cores != worker.cores:
            worker.cores = cores
            os.sched_setaffinity(worker.native_id or 0, cores)
        worker.jobs.put((job, done))

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

    def run(self) -> None:
        while (work := self.jobs.get()) is not None:
            job, done = work
            job()
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


class Turns:
    """The state of one step's schedule: what each lane is at, what is done, what failed.

    Args:
        schedule: the order on every lane.
        forward: runs one micro-batch's forward; calls :meth:`cross` at its borders.
        backward: runs one backward action.
        ambient: the caller's thread state.
        baton: at most one journey runs Python forward code at a time (asynchronous devices).
        threads: intra-operation threads for each of ours.
        only: run the forward or the backward actions alone.
    """

    def __init__(
        self,
        schedule: Schedule,
        forward: Callable[[int], None],
        backward: Callable[[Action], None],
        ambient: Ambient,
        *,
        baton: bool,
        threads: int,
        only: Kind | None = None,
    ) -> None:
        self._schedule = schedule
        self._actions = [lane.unpacked() for lane in schedule.lanes if isinstance(lane, Actions)]
        self._forward = forward
        self._backward = backward
        self._ambient = ambient
        self._baton = threading.Lock() if baton else None
        self._threads = threads
        self._only = only
        lanes = len(schedule.lanes)
        self._cores = [_all_cores()] * lanes if baton else _shares_of_cores(lanes)
        self._lock = threading.Lock()
        self._moved = [threading.Condition(self._lock) for _ in schedule.lanes]
        self._over = threading.Condition(self._lock)
        self._position = [0] * len(schedule.lanes)
        self._skipped: set[Action] = set()
        self._started: set[int] = set()
        self._finished: set[int] = set()
        self._done: set[Action] = set()
        self._running = 0
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Run the whole step; returns when every thread is done, or raises the first failure."""
        caller_threads = torch.get_num_threads()
        try:
            try:
                self._begin()
                self._wait_until_over()
            except KeyboardInterrupt as interrupt:  # wherever it struck
                self.fail(interrupt)
                self._join()  # asked twice, it raises: the user's code may never end
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
                self._finished.update(range(self._schedule.microbatches))
            if self._only != "F":
                for lane in range(len(self._schedule.lanes)):
                    self._submit(partial(self._run_lane, lane), lane, backward=True)
            for lane in range(len(self._schedule.lanes)):
                self._settle(lane)

    def _wait_until_over(self) -> None:
        self._join()

    def _join(self) -> None:
        with self._lock:
            while self._running:
                self._over.wait()

    def _submit(self, job: Callable[[], None], lane: int, *, backward: bool) -> None:
        """Run a job in a thread of the pool. The lock is held."""
        self._running += 1

        def work() -> None:
            try:
                worker = threading.current_thread()
                if isinstance(worker, _Worker) and worker.threads != self._threads:
                    torch.set_num_threads(self._threads)  # a new thread does not inherit it
                    worker.threads = self._threads
                self._ambient.run(job, backward=backward)
            except Abandoned:
                pass
            except BaseException as error:
                self.fail(error)

        _pool.submit(work, self._one_less, self._cores[lane])

    def _one_less(self) -> None:
        with self._lock:
            self._running -= 1
            self._over.notify_all()

    def fail(self, error: BaseException) -> None:
        """The first failure wins; everybody else is woken to stop."""
        with self._lock:
            if self._failure is None:
                self._failure = error
            for condition in self._moved:
                condition.notify_all()

    # --- forward

    def _run_journey(self, microbatch: int) -> None:
        try:
            self._forward(microbatch)
        finally:
            self._release_baton()

    def cross(self, microbatch: int, before: int, after: int) -> None:
        """A journey leaves one hop and waits for its turn on the next, ``-1`` being neither side.

        Raises:
            Abandoned: the step has failed meanwhile.
        """
        lanes = self._schedule.lane_of_hop
        last = after if after >= 0 else len(lanes)
        self._release_baton()
        if after >= 0:
            _move_to(self._cores[lanes[after]])  # before the wait: see _shares_of_cores
        with self._lock:
            if before >= 0:
                self._advance(lanes[before])
            for hop in range(before + 1, last):
                self._skipped.add(Action("F", hop, microbatch))
                self._settle(lanes[hop])
            if after < 0:
                self._finished.add(microbatch)
                self._moved[lanes[-1]].notify_all()
                self._settle(lanes[0])  # the next one may have waited for a thread
                return
            lane = lanes[after]
            turn = Action("F", after, microbatch)
            while self._failure is None and self._head(lane) != turn:
                self._moved[lane].wait()
            if self._failure is not None:
                raise Abandoned
        if self._baton is not None:
            self._baton.acquire()
            _holding.baton = self._baton

    def _release_baton(self) -> None:
        held, _holding.baton = _holding.baton, None
        if held is not None:
            held.release()

    def _head(self, lane: int) -> Action | None:
        actions = self._actions[lane]
        position = self._position[lane]
        return actions[position] if position < len(actions) else None

    def _advance(self, lane: int) -> None:
        """The lane's action is done. The lock is held."""
        self._position[lane] += 1
        self._settle(lane)

    def _settle(self, lane: int) -> None:
        """Pass over what need not run, start the journey whose turn has come, wake the rest."""
        while (head := self._head(lane)) is not None and (
            head in self._skipped or self._only not in (None, head.kind)
        ):
            self._position[lane] += 1
        if head is not None and head.kind == "F" and head.hop == 0:
            self._start(head.microbatch)
        self._moved[lane].notify_all()

    def _start(self, microbatch: int) -> None:
        # A thread is held while a forward is under way: no more of them than can be of use.
        under_way = len(self._started) - len(self._finished)
        if self._only == "F" and under_way > len(self._schedule.lane_of_hop):
            return
        if microbatch not in self._started and self._failure is None:
            self._started.add(microbatch)
            lane = self._schedule.lane_of_hop[0]
            self._submit(partial(self._run_journey, microbatch), lane, backward=False)

    # --- backward

    def _run_lane(self, lane: int) -> None:
        hops = len(self._schedule.lane_of_hop)
        for action in self._actions[lane]:
            if action.kind == "F" or (action.kind == "W" and self._only is not None):
                continue
            later = Action("B", action.hop + 1, action.microbatch)
            last = action.hop + 1 == hops
            with self._lock:
                while self._failure is None and not (
                    self._head(lane) == action
                    and (
                        action.kind == "W"
                        or (action.microbatch in self._finished if last else later in self._done)
                    )
                ):
                    self._moved[lane].wait()
                if self._failure is not None:
                    raise Abandoned
            self._backward(action)
            with self._lock:
                self._done.add(action)
                self._advance(lane)
                if action.hop:
                    self._moved[self._schedule.lane_of_hop[action.hop - 1]].notify_all()


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
    if isinstance(worker, _Worker) and worker.cores != cores:
        worker.cores = cores
        os.sched_setaffinity(0, cores)


class _Holding(threading.local):
    baton: "threading.Lock | None" = None


_holding = _Holding()
