"""The threads of one step: each lane runs its actions in the schedule's order.

A run holds a thread while its forward is under way, and waits at each border for its turn;
backwards are run by any thread that is free. The alternative, a worker for each stage and a barrier
at every clock tick (torchgpipe), lets the slowest stage's Python hold up all the others, and cannot
run a forward that is one piece of Python.

Which action may begin is for :class:`~blockpipe.execution.lanes.lane_state.LaneState` to say. Here
are the lock around it, the threads, and what happens when one of them fails: the first failure
wins, all others stop at their next border, and the caller gets it when every thread is done.
"""

import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

import torch

from ..._common.callsite import line_of_thread
from ..._common.threads.standstill import PATIENCE, POLL, Standstill, names_lock_of
from ..._common.threads.thread_state import CallerState, give_forward_lock, take_forward_lock
from ...errors import StateError
from ...schedules.schedule import Action, Schedule
from .lane_state import LaneState
from .thread_pool import all_cores, keep_to, pool, shares_of_cores, use_threads

Cross = Callable[[int, int, int], None]
"""Called by the run of a micro-batch that goes from one hop (``-1``: none) to another; returns when
it may go on there."""


class Abandoned(BaseException):
    """Ends a run whose step has failed elsewhere; never reaches the caller.

    No ``Exception``: a user's ``except Exception`` must not keep a failed step going.
    """


class LaneThreads:
    """Runs the actions of one step in threads.

    A thread that has run an action runs the lane's next one itself, unless its forward goes on on
    another lane: waking another thread takes as long as a small action.

    Args:
        schedule: the order on every lane.
        forward: runs one micro-batch's forward, and calls the function that it is given at each
            border.
        backward: runs one action that is no forward.
        caller: the caller's thread state.
        queued: for each lane, whether its device is asynchronous. On these at most one run
            runs Python forward code at a time: the one that has the forward lock.
        threads: intra-operation threads for each of ours.
        only: run the forwards alone, or all but them.
    """

    def __init__(
        self,
        schedule: Schedule,
        forward: Callable[[int, Cross], None],
        backward: Callable[[Action], None],
        caller: CallerState,
        *,
        queued: Sequence[bool],
        threads: int,
        only: Literal["F", "B"] | None = None,
    ) -> None:
        self._state = LaneState(schedule, only)
        self._lane_of_hop = schedule.lane_of_hop
        self._forward = forward
        self._backward = backward
        self._caller = caller
        self._queued = queued
        self._threads = threads
        lanes = len(schedule.lanes)
        self._cores = [all_cores()] * lanes if any(queued) else shares_of_cores(lanes)
        self._forward_lock = threading.Lock()
        self._lock = threading.Lock()  # around the state and all that follows
        self._over = threading.Condition(self._lock)
        self._woken: dict[Action, threading.Lock] = {}  # of runs at a border: locked till woken
        self._thread_of: dict[int, int] = {}  # by micro-batch: the identifier of its thread
        self._variables_of: dict[int, dict[ContextVar[Any], Any]] = {}  # that forwards have set
        self._running = 0  # threads
        self._failure: BaseException | None = None

    # --- the caller's thread

    def run(self) -> None:
        """Run the whole step; return when every thread is done, or raise the first failure."""
        caller_threads = torch.get_num_threads()
        try:
            try:
                self._begin()
                self._join()
            except BaseException as error:  # an interrupt, a signal handler's, no more threads
                self.fail(error)
                self._join()  # interrupted twice, it raises: the user's code may never end
        finally:
            if self._threads != caller_threads:
                torch.set_num_threads(caller_threads)
        for _, variables in sorted(self._variables_of.items()):  # the plain loop's order
            for variable, value in variables.items():
                variable.set(value)
        failure, self._failure = self._failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # the traceback holds this frame

    def _begin(self) -> None:
        with self._lock:
            for lane in self._state.begin():
                self._go_on(lane)

    def _join(self) -> None:
        """Wait until no thread works for this step; a step that stands still fails."""
        standstill = Standstill()
        while not self._is_over():
            if self._failure is not None or not standstill.is_reached():
                continue
            if self._woken:
                self.fail(self._stands_still())
            elif (waits := self._waits_for_caller()) is not None:
                self.fail(waits)
                return  # its thread goes on, and stops, when the caller has let go of the lock

    def _is_over(self) -> bool:
        with self._lock:
            if self._running:
                # Not for ever: a signal that comes just before the wait begins does not end it.
                self._over.wait(timeout=POLL)
            return not self._running

    def _stands_still(self) -> StateError:
        """Say which runs wait, and where those stand whose turn it is: perhaps these wait for one
        that waits for its own."""
        with self._lock:
            waiting = sorted(self._state.waiting.items())
            moving = sorted(self._state.moving & self._thread_of.keys())
            threads = [(m, self._thread_of[m]) for m in moving]
        stand = "; ".join(
            f"micro-batch {m} stands at {line_of_thread(thread)}" for m, thread in threads
        )
        wait = ", ".join(f"micro-batch {m} for hop {hop}" for m, hop in waiting)
        return StateError(
            f"nothing has run in this step for {PATIENCE:.0f} seconds: "
            f"{stand or 'a hook does not return'}, while others wait for their turn ({wait}). "
            "Several micro-batches are under way at once, so none may wait for a lock that another "
            "one holds across stages, nor for a thread that waits for this step; release the lock "
            "before the stage ends, or use schedule='sequential'"
        )

    def _waits_for_caller(self) -> StateError | None:
        """Say which run stands where it takes a lock that the caller's thread has."""
        with self._lock:
            threads = [(m, self._thread_of[m]) for m in sorted(self._thread_of)]
        for m, thread in threads:
            if names_lock_of(thread, threading.get_ident()):
                return StateError(
                    f"nothing has run in this step for {PATIENCE:.0f} seconds: micro-batch {m} "
                    f"stands at {line_of_thread(thread)}, and the thread that has called the step "
                    "holds a reentrant lock that is named there. Stages run in threads of their "
                    "own, for which it is not free; release it before the step, or use "
                    "schedule='sequential'"
                )
        return None

    def fail(self, error: BaseException) -> None:
        """Keep the first failure, and wake all runs that wait: they stop."""
        with self._lock:
            if self._failure is None:
                self._failure = error
            self._state.stop()
            for woken in self._woken.values():
                woken.release()
            self._woken.clear()

    # --- what begins next (the lock is held)

    def _go_on(self, lane: int) -> None:
        """Something changed for a lane: have a thread of the pool do what can be done now."""
        action = self._next_on(lane)
        if action is None:
            return
        worker = pool.take(self._cores[lane])
        work = partial(self._work, action), self._one_less
        # Nothing can come between these two: an interrupt would leave a count without a thread.
        self._running += 1
        worker.jobs.put(work)

    def _next_on(self, lane: int) -> Action | None:
        """The action that a free thread begins on a lane. A run whose turn it is has a thread, and
        is woken."""
        action = self._state.next_on(lane)
        woken = None if action is None else self._woken.pop(action, None)
        if woken is None:
            return action
        woken.release()
        return None

    # --- the pool's threads

    def _work(self, first: Action) -> None:
        """Run an action, and those that follow from it for this thread."""
        try:
            use_threads(self._threads)
            action: Action | None = first
            while action is not None:
                is_forward = action.kind == "F"
                run = partial(self._run_forward if is_forward else self._run_backwards, action)
                action = self._caller.run(run, backward=not is_forward)
        except Abandoned:
            pass
        except BaseException as error:
            self.fail(error)

    def _one_less(self) -> None:
        with self._lock:
            self._running -= 1
            if not self._running:
                self._over.notify_all()

    def _run_forward(self, action: Action) -> Action | None:
        """Run a micro-batch's forward; return the action that this thread goes on with."""
        microbatch = action.microbatch
        self._thread_of[microbatch] = threading.get_ident()
        try:
            self._forward(microbatch, self._cross)
        finally:
            give_forward_lock()
        self._variables_of[microbatch] = self._caller.variables_set()
        with self._lock:
            lane, others = self._state.finish_forward(microbatch)
            for other in others:
                self._go_on(other)
            return self._next_on(lane)

    def _cross(self, microbatch: int, before: int, after: int) -> None:
        """A run leaves one hop (``-1``: none) and waits for its turn on another.

        Raises:
            Abandoned: the step has failed meanwhile.
        """
        give_forward_lock()
        lane = self._lane_of_hop[after]
        keep_to(self._cores[lane])  # before the wait: see shares_of_cores
        turn = Action("F", after, microbatch)
        woken: threading.Lock | None = None
        with self._lock:
            for other in self._state.cross(microbatch, before, after):
                self._go_on(other)
            if self._state.must_wait(turn):
                woken = self._woken[turn] = threading.Lock()
                woken.acquire()
        if woken is not None:
            woken.acquire()
        if self._failure is not None:
            raise Abandoned
        if self._queued[lane]:
            take_forward_lock(self._forward_lock)

    def _run_backwards(self, action: Action) -> Action | None:
        """Run the backwards that are due on a lane; return the action that this thread goes on
        with."""
        lane = self._lane_of_hop[action.hop]
        while True:
            try:
                if action.kind == "R" and self._queued[lane]:
                    take_forward_lock(self._forward_lock)  # a recomputation is forward code
                self._backward(action)
            finally:
                give_forward_lock()
            with self._lock:
                for other in self._state.finish_backward(action):
                    self._go_on(other)
                following = self._next_on(lane)
            if following is None or following.kind == "F":
                return following
            action = following
