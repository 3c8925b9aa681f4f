"""The threads that run steps: they wait between steps, and belong to the process.

Starting a thread takes as long as a small action, so threads are kept and reused. They never end by
themselves: in a thread that ends while the interpreter does, torch gives back thread-local Python
objects, and the process aborts.
``concurrent.futures`` cannot move a thread to other cores before it wakes, nor end all of them and
make new ones later.
"""

import contextlib
import itertools
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import torch

T = TypeVar("T")

_CAN_PIN = hasattr(os, "sched_setaffinity")  # for one thread: Linux


class Worker(threading.Thread):
    """A thread of a pool: does one job after the other, and goes back to the pool after each."""

    def __init__(self, pool: "ThreadPool") -> None:
        super().__init__(name="blockpipe", daemon=True)
        self._pool = pool
        # A job, and what to call after it, back in the pool; None: the thread ends.
        self.jobs: queue.SimpleQueue[tuple[Callable[[], None], Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._cores = all_cores()
        self._intra_operation_threads = 0

    def keep_to(self, cores: frozenset[int]) -> None:
        """Run on these cores from now on.

        They may be gone meanwhile (a container's share can shrink): then the thread stays where it
        is.
        """
        if cores != self._cores:
            self._cores = cores
            with contextlib.suppress(OSError):
                os.sched_setaffinity(self.native_id or 0, cores)

    def use_threads(self, count: int) -> None:
        """Give each operation on the CPU that this thread calls so many threads."""
        if count != self._intra_operation_threads:
            torch.set_num_threads(count)  # a new thread does not inherit it
            # A thread that has never asked takes the process's number at its first operation,
            # and that may be the caller's again by then.
            torch.get_num_threads()
            self._intra_operation_threads = count

    def run(self) -> None:
        """Do jobs until the pool is closed."""
        while (work := self.jobs.get()) is not None:
            job, done = work
            try:
                job()
            finally:
                self._pool.put_back(self)
                done()
            del work, job, done  # before waiting: they hold their step


class ThreadPool:
    """Threads that wait for the next step; made when needed, and reused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.idle: list[Worker] = []

    def take(self, cores: frozenset[int]) -> Worker:
        """Return a thread that is on these cores already when it is woken."""
        with self._lock:
            worker = self.idle.pop() if self.idle else None
        if worker is None:
            worker = Worker(self)
            worker.start()
        try:
            worker.keep_to(cores)
        except BaseException:
            self.put_back(worker)
            raise
        return worker

    def put_back(self, worker: Worker) -> None:
        """Keep a thread for the next one who takes one."""
        with self._lock:
            self.idle.append(worker)

    def close(self) -> None:
        """End the idle threads and wait for them."""
        with self._lock:
            idle, self.idle = self.idle, []
        for worker in idle:
            worker.jobs.put(None)
        for worker in idle:
            worker.join()

    def forget(self) -> None:
        """Start over in a forked child, which has none of its parent's threads."""
        self._lock = threading.Lock()
        self.idle = []


pool = ThreadPool()
os.register_at_fork(after_in_child=pool.forget)


def submit(call: Callable[[], T]) -> Future[T]:
    """Call a function in a thread of the pool, on any core."""
    future: Future[T] = Future()
    ends: list[Callable[[], None]] = []  # as soon as the thread is back in the pool

    def job() -> None:
        try:
            ends.append(partial(future.set_result, call()))
        except BaseException as error:
            ends.append(partial(future.set_exception, error))

    pool.take(all_cores()).jobs.put((job, lambda: ends.pop()()))
    return future


def close_idle_threads() -> None:
    """End the threads that wait for the next step."""
    pool.close()


def idle_threads() -> int:
    """Return how many threads wait for the next step."""
    return len(pool.idle)


def keep_to(cores: frozenset[int]) -> None:
    """Run this thread, if it is one of the pool's, on these cores from now on."""
    worker = threading.current_thread()
    if isinstance(worker, Worker):
        worker.keep_to(cores)


def use_threads(count: int) -> None:
    """Give operations so many threads, if this thread is one of the pool's."""
    worker = threading.current_thread()
    if isinstance(worker, Worker):
        worker.use_threads(count)


def all_cores() -> frozenset[int]:
    """Return the cores that the process may use; none where the system cannot say."""
    return frozenset(os.sched_getaffinity(os.getpid())) if _CAN_PIN else frozenset()


def shares_of_cores(lanes: int) -> list[frozenset[int]]:
    """Return each CPU lane's share of the cores; all of them for each if there are too few.

    A thread that is woken often lands on its waker's core, and waits there for the waker's time
    slice (3 ms on Linux) while another core idles: with two stages and actions of 5 ms, that took
    a quarter of the step. So a thread of ours keeps to the cores of the lane that it waits for.
    """
    cores = sorted(all_cores())
    if len(cores) < lanes:
        return [frozenset(cores)] * lanes
    bounds = [i * len(cores) // lanes for i in range(lanes + 1)]
    return [frozenset(cores[a:b]) for a, b in itertools.pairwise(bounds)]


def threads_of_a_lane(lanes: int, *, is_asynchronous: bool) -> int:
    """Return how many threads an operation on the CPU has when all lanes run at once.

    Args:
        lanes: how many there are; on the CPU they share its threads.
        is_asynchronous: whether any stage is on an accelerator.
    """
    threads = torch.get_num_threads()
    return threads if is_asynchronous else max(1, threads // lanes)
