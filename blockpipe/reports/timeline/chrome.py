"""A trace in Chrome's trace event format, which Perfetto opens.

Source: "Trace Event Format", Google, 2016. Timestamps there are microseconds; here they are rounded
to nanoseconds first, so that neighbours touch and do not overlap.
"""

from collections.abc import Iterator
from typing import Any

from ...schedules.schedule import KINDS
from .trace import Event, Trace, in_rows, runs

# chrome://tracing knows colours by these names; Perfetto derives its own from slices' names.
_COLOURS = (
    "thread_state_running",
    "thread_state_runnable",
    "thread_state_iowait",
    "rail_response",
    "rail_animation",
    "rail_idle",
    "rail_load",
    "cq_build_passed",
    "vsync_highlight_color",
    "detailed_memory_dump",
    "generic_work",
    "startup",
)
_ROWS = ("actions", "copies", "waits", "stalls")


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """Return the trace as a value for JSON."""
    return {
        "traceEvents": [*_metadata(trace), *_slices(trace), *_flows(trace)],
        "displayTimeUnit": "ms",
        "otherData": {"title": trace.title},
    }


def _process(trace: Trace, lane: int) -> int:
    """Return the process of a lane: lanes of one device are one process."""
    devices = list(dict.fromkeys(lane.device for lane in trace.lanes))
    return 1 + devices.index(trace.lanes[lane].device)


def _rows(trace: Trace) -> Iterator[tuple[int, int, str, list[Event]]]:
    """Iterate over the process, thread, name and events of each row; its events do not overlap."""
    for lane, about in enumerate(trace.lanes):
        tid = 100 * lane + 1
        for name in _ROWS:
            kinds = KINDS if name == "actions" else ({"copies": "copy"}.get(name, name[:-1]),)
            for row in in_rows(e for e in trace.events if e.lane == lane and e.kind in kinds):
                yield _process(trace, lane), tid, f"{about.name}, {name}", row
                tid += 1


def _metadata(trace: Trace) -> Iterator[dict[str, Any]]:
    for lane, about in enumerate(trace.lanes):
        pid = _process(trace, lane)
        yield _named("process_name", pid, 0, name=about.device or trace.title or "schedule")
        yield _named("process_sort_index", pid, 0, sort_index=pid)
    for pid, tid, name, _ in _rows(trace):
        yield _named("thread_name", pid, tid, name=name)
        yield _named("thread_sort_index", pid, tid, sort_index=tid)


def _named(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)


def _slices(trace: Trace) -> Iterator[dict[str, Any]]:
    for pid, tid, _, row in _rows(trace):
        for event in row:
            start, end = _nanoseconds(event.start), _nanoseconds(event.end)
            args = {
                "hop": event.hop,
                "stage": event.stage,
                "micro-batch": event.microbatch,
                "step": event.step,
            }
            if event.kind == "copy":
                args.update({"from hop": event.source, "bytes": event.bytes})
            yield {
                "ph": "X",
                "name": str(event),
                "cat": event.kind,
                "pid": pid,
                "tid": tid,
                "ts": start / 1000,
                "dur": (end - start) / 1000,
                "cname": _COLOURS[event.microbatch % len(_COLOURS)],
                "args": args,
            }


def _flows(trace: Trace) -> Iterator[dict[str, Any]]:
    """Iterate over arrows from each action of a micro-batch to the next one on another hop."""
    at = {
        id(event): (pid, tid)
        for pid, tid, _, row in _rows(trace)
        for event in row
        if event.kind in KINDS
    }
    for number, (before, after) in enumerate(runs(trace.events)):
        start, end = _nanoseconds(before.start), _nanoseconds(before.end)
        # An arrow belongs to the slice that is under way at its time, so it begins before the end.
        times = max(start, end - 1), _nanoseconds(after.start)
        for ph, event, time in zip("sf", (before, after), times, strict=True):
            pid, tid = at[id(event)]
            flow = {"ph": ph, "id": number, "name": "run", "cat": "run"}
            yield {
                **flow,
                "pid": pid,
                "tid": tid,
                "ts": time / 1000,
                **({"bp": "e"} if ph == "f" else {}),
            }
