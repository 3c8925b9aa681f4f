"""What follows from a recording's run: which calls are sealed, and where unread parameters live.

A call is sealed if it stayed on one hop and got every foreign tensor through its arguments. A
module may be called several times, and its door stands there each time: what counts is every call.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from .._torch.modules import is_compiled
from .._torch.tensors import version_of
from ..errors import CrossingError
from .recorder import Recorder
from .recording import Call, Recording


def conclude(model: nn.Module, recorder: Recorder, versions: dict[int, tuple[Tensor, int]]) -> None:
    """What follows from the whole run: what is sealed, where unread parameters live."""
    result = recorder.result
    for key, (buffer, version) in versions.items():
        held = recorder.held.get(key)
        if held is not None:
            held.written |= version_of(buffer) != version
    good: dict[str, set[int]] = {}
    bad: dict[str, set[int]] = {}
    everywhere: set[str] = set()
    needs_sealed_forward: set[str] = set()
    with_parameters: dict[str, bool] = {}
    every_hop = set(range(len(result.hops)))
    functions = {call.path for call in result.calls if call.is_function}
    for call in result.calls:
        if any(_around(call.path, path) for path in recorder.keepers) and not call.is_function:
            why = "it leaves a tensor with a gradient path on itself, which the next call may read"
            for around in (call, *_outer(call)):
                around.open(why)
    for call in result.calls:
        visited = {h for h in (call.hop, call.last_hop) if h is not None}
        if call.sealed:
            good.setdefault(call.path, set()).update(visited)
            if id(call) not in recorder.reads:
                everywhere.add(call.path)
            else:
                with_parameters[call.path] = True
        else:
            first = call.hop if call.hop is not None else 0
            last = call.last_hop if call.last_hop is not None else first
            bad.setdefault(call.path, set()).update(range(first, last + 1))
        # A call that does nothing makes no hop: a door would take it to one.
        if call.hop is not None and (call.parent is None or not call.parent.sealed):
            needs_sealed_forward.add(call.path)
    for path in needs_sealed_forward:
        hops = set(good.get(path, set()))
        if path in everywhere and path not in with_parameters:
            hops = set(every_hop)
        hops -= bad.get(path, set())
        if hops:
            of_functions = path in functions
            (result.sealed_functions if of_functions else result.sealed)[path] = frozenset(hops)
    result.recomputable = recorder.activations.conclude(result.hops, _sealed_forwards(result))
    recorder.activations.by_call()
    result.saved = recorder.activations.by_segments()
    result.shared_generators = [d for d in recorder.generators.values() if len(d.hops) > 1]
    _place_unread(model, recorder)
    sealed_calls = {id(c) for c in result.calls if _in_sealed(c)}
    result.recomputes = any(
        c is None or id(c) not in sealed_calls for c in recorder.checkpointed_in
    )
    result.custom_functions = sorted(
        {name for name, c in recorder.custom_in if c is None or id(c) not in sealed_calls}
    )
    for error, untracked_in in recorder.untracked:
        if not _in_sealed(untracked_in):
            raise error
    _say_what_is_whole(model, result)
    for path, module in model.named_modules():
        if is_compiled(module) and path in bad:
            raise CrossingError(
                f"compiled module {path or '(the model)'!r} spans stages "
                f"{sorted({result.hops[h].stage for h in bad[path]})}, but a compiled call runs as "
                "a whole; leave torch.compile out and call pipe.compile(), which compiles its parts"
            )


def _say_what_is_whole(model: nn.Module, result: Recording) -> None:
    """Which hops' backwards do not come in two parts, besides those that were seen to."""
    compiled = {path for path, module in model.named_modules() if is_compiled(module)}
    for call in result.calls:
        if call.path in compiled and call.hop is not None:
            result.hops[call.hop].whole = f"compiled module {call.path or '(the model)'}"


def _around(path: str, inner: str) -> bool:
    return path in ("", inner) or inner.startswith(f"{path}.")


def _outer(call: Call | None) -> Iterator[Call]:
    """The calls around a call, inside out."""
    while call is not None and call.parent is not None:
        call = call.parent
        yield call


def _in_sealed(call: Call | None) -> bool:
    return call is not None and (call.sealed or any(outer.sealed for outer in _outer(call)))


def _sealed_forwards(result: Recording) -> dict[int, Call]:
    """From the id of each call to the sealed call that it is, or is inside of."""
    found = {}
    for call in result.calls:
        around = [c for c in (call, *_outer(call)) if c.sealed]
        if around:
            sealed_call = around[-1]
            hops = (result.sealed_functions if sealed_call.is_function else result.sealed).get(
                sealed_call.path
            )
            if hops is not None and sealed_call.hop in hops:
                found[id(call)] = sealed_call
    return found


def _place_unread(model: nn.Module, recorder: Recorder) -> None:
    """A parameter that no call reads lives where its module runs, or the nearest one around it."""
    calls = [call for call in recorder.result.calls if not call.is_function]
    stage_of = {call.path: call.stage for call in reversed(calls)}
    for held in recorder.held.values():
        if held.hop is not None:
            continue
        path = held.name
        while path and path not in stage_of:
            path = path.rpartition(".")[0]
        held.stage = stage_of.get(path, 0)
