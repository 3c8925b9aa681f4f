"""What follows from a recording's run: which calls are sealed, and where unread parameters live.

A call is sealed if it stayed on one hop and got every tensor of another hop through its arguments:
then a step runs it untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from .._common.modules import is_within, paths_around
from .._common.nested import tensors
from .._torch.modules import is_compiled
from .._torch.tensors import version_of
from ..batches.losses import WeightedLoss
from ..crossing.tags import TAG
from ..errors import CrossingError
from ..restoring.model_state import ModelState
from .calls import Call
from .recording import Recording
from .watching.calls import RecordedTag
from .watching.recorder import Recorder

LEAVES = "it leaves a tensor, which the output has, or the loss or the next call may read"
HAS_OTHERS = "a layer in it runs on another stage, and in another forward it may run it as well"
MAY_READ = "another forward may read a tensor on another stage than the one that leaves it"


def conclude(model: nn.Module, recorder: Recorder, versions: dict[int, tuple[Tensor, int]]) -> None:
    """Fill in the facts that only the whole run shows.

    Args:
        model: the recorded model.
        recorder: has watched the run.
        versions: by id, each parameter and buffer with its version before the run.

    Raises:
        CrossingError: the forward does what no pipeline can, outside of sealed calls; a compiled
            module spans stages.
    """
    result, activations = recorder.result, recorder.activations
    for key, (tensor, version) in versions.items():
        held = recorder.held.get(key)
        if held is not None:
            held.written |= version_of(tensor) != version
    for why, calls in recorder.opens.items():
        _open_calls(calls, why)
    _open_calls(_calls_with_others_layers(model, recorder), HAS_OTHERS)
    calls_of = _calls_by_path(result)
    for path, calls in calls_of.items():
        hops = sealed_hops(calls, len(result.hops), recorder.reads)
        if hops:
            of_functions = any(call.is_function for call in calls)
            (result.sealed_functions if of_functions else result.sealed)[path] = hops
    result.recomputable = activations.conclude(result.hops, _sealed_forwards(result))
    _refuse_rare_writers(result)
    activations.by_call()
    result.saved = activations.by_segments()
    result.input_bytes = activations.input_bytes
    result.shared_generators = [d for d in recorder.draws.generators.values() if len(d.hops) > 1]
    sets = {what: line for what, call, line in reversed(recorder.sets) if not _in_sealed(call)}
    result.set_between = [*sets.items()]
    reads = {what: line for what, call, line in reversed(recorder.carries) if not _in_sealed(call)}
    result.read_between = [*reads.items()]
    _place_unread(model, recorder)
    result.recomputes = not all(map(_in_sealed, recorder.checkpointed_in))
    result.custom_functions = sorted(
        {name for name, call in recorder.custom.applied if not _in_sealed(call)}
    )
    for error, untracked_in in recorder.custom.failures:
        if not _in_sealed(untracked_in):
            raise error
    _say_what_is_whole(model, result)
    _check_compiled(model, result, calls_of)


def sealed_hops(
    calls: Sequence[Call], route_length: int, reads_parameters: Container[int]
) -> frozenset[int]:
    """Return the hops on which a module, or a function, runs sealed; none if it never does.

    It may be called several times, and what stands in the place of its forward is there each time,
    so that all of its calls count. With S its sealed calls and O its other ones, on a route of n
    hops::

        runs   = {0, ..., n - 1}  if S is not empty, and no call in S reads a parameter
                 the hops of S    otherwise
        spans  = the hops from the first to the last one of each call in O
        sealed = runs - spans     if a call with operations is not inside of a sealed call
                 {}               otherwise: nothing would stand in its place

    Args:
        calls: all calls of one path.
        route_length: the number of hops.
        reads_parameters: the ids of the calls that read parameters or buffers.
    """
    # A call that does nothing makes no hop: a sealed forward in its place would take it to one.
    if not any(call.hop is not None and not _is_directly_in_sealed(call) for call in calls):
        return frozenset()
    sealed = [call for call in calls if call.sealed]
    if sealed and not any(id(call) in reads_parameters for call in sealed):
        runs = set(range(route_length))
    else:
        runs = {hop for call in sealed for hop in (call.hop, call.last_hop) if hop is not None}
    return frozenset(runs).difference(*(_span(call) for call in calls if not call.sealed))


def _span(call: Call) -> range:
    return call.hops or range(1)  # it did nothing: of the first hop, where a mark in it may be


def _calls_by_path(result: Recording) -> dict[str, list[Call]]:
    found: dict[str, list[Call]] = {}
    for call in result.calls:
        found.setdefault(call.path, []).append(call)
    return found


def calls_that_leave_tensors(
    model: nn.Module, output: Any, recorder: Recorder, loss_fn: Callable[..., Any] | None
) -> Iterator[Call]:
    """Yield the calls in which the forward left a tensor, on a module or in another object, to be
    called before that is put back; and those in which it left one, wherever, that has come into its
    output.

    Args:
        model: the recorded model.
        output: what the forward has returned.
        recorder: has watched the run.
        loss_fn: what computes the loss. It may read tensors of earlier hops without a gradient path
            too, if it leads to them: they say which micro-batch they are of.
    """
    on = [
        path
        for path, module in model.named_modules()
        if any(_leaves(value, recorder) for value in module.__dict__.values())
    ]
    for call in recorder.result.calls:
        if any(is_within(path, call.path) for path in on):
            yield call
    left = [t for members in recorder.outside.members() for t in _left_in(members, recorder)]
    left += () if loss_fn is None else _left_for(loss_fn, recorder)
    for tensor in (*left, *filter(recorder.has_made, tensors(output))):
        tag: RecordedTag = getattr(tensor, TAG)
        yield from tag.calls - tag.returned_by


def _leaves(value: Any, recorder: Recorder) -> bool:
    is_looked_at = isinstance(value, Tensor | list | tuple)
    return is_looked_at and any(True for _ in _left_in(tensors(value), recorder))


def _left_in(values: Iterable[Any], recorder: Recorder) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad and recorder.has_made(value):
            yield value


def _left_for(loss_fn: Callable[..., Any], recorder: Recorder) -> Iterator[Tensor]:
    """Yield the tensors of earlier hops that a loss leads to, however deep. A loss on the last hop
    reads that hop's before the next micro-batch comes."""
    behind = loss_fn.loss_fn if isinstance(loss_fn, WeightedLoss) else loss_fn
    for value in ModelState(values=False, contents=False, others=[behind]).objects():
        if isinstance(value, Tensor) and recorder.has_made(value):
            tag: RecordedTag = getattr(value, TAG)
            if tag.hop != recorder.hop and not tag.is_constant(value):
                yield value


def _open_calls(calls: Iterable[Call], why: str) -> None:
    """Open calls in which a forward leaves a tensor that others read, or may read one. What a
    ``torch.func`` transform computes is followed in a sealed call only."""
    for call in calls:
        for around in () if call.is_function else (call, *call.ancestors()):
            if not around.transforms:
                around.open(why)


def _calls_with_others_layers(model: nn.Module, recorder: Recorder) -> Iterator[Call]:
    """Yield the calls of modules that have, in a layer or a list, a parameter or buffer which only
    other stages have read, as in a pool of layers out of which data choose."""
    result, modules = recorder.result, dict(model.named_modules())
    if result.num_stages < 2:
        return
    stages = {
        key: frozenset(map(result.stage_of, held.hops))
        for key, held in recorder.held.items()
        if held.hops
    }

    def read_on(values: object) -> set[frozenset[int]]:
        return {stages[id(one)] for one in tensors(values) if id(one) in stages}

    in_module = {module: read_on(vars(module)) for module in modules.values()}
    in_lists = {module: read_on(_lists_of(module)) for module in modules.values()}
    for call in result.calls:
        module = modules.get(call.path)
        if module is None or call.is_function or call.hop is None or is_compiled(module):
            continue
        here = {result.stage_of(hop) for hop in call.hops}
        inside = [in_lists[module], *(in_module[m] for m in module.modules() if m is not module)]
        if any(of.isdisjoint(here) for stages_in in inside for of in stages_in):
            yield call


def _lists_of(module: nn.Module) -> list[object]:
    return [value for value in vars(module).values() if isinstance(value, list | tuple)]


def _check_compiled(model: nn.Module, result: Recording, calls_of: dict[str, list[Call]]) -> None:
    for path, module in model.named_modules():
        open_calls = [call for call in calls_of.get(path, ()) if not call.sealed]
        if is_compiled(module) and open_calls:
            hops = {hop for call in open_calls for hop in _span(call)}
            on = sorted({result.hops[hop].stage for hop in hops})
            why = (
                f"spans stages {on}"
                if len(on) > 1
                else f"has to be looked into: {_why(open_calls)}"
            )
            raise CrossingError(
                f"compiled module {path or '(the model)'!r} {why}, but a compiled call runs as "
                "a whole; leave torch.compile out and call pipe.compile(), which compiles its parts"
            )


def _why(calls: Iterable[Call]) -> str:
    """Return why calls are not sealed."""
    return next((call.opened for call in calls if call.opened), "a stage begins in it")


def _say_what_is_whole(model: nn.Module, result: Recording) -> None:
    """Note which hops' backwards cannot be split because of a compiled module."""
    compiled = {path for path, module in model.named_modules() if is_compiled(module)}
    for call in result.calls:
        if call.path in compiled and call.hop is not None:
            result.hops[call.hop].whole = f"compiled module {call.path or '(the model)'}"


def _refuse_rare_writers(result: Recording) -> None:
    """Keep the activations of modules that may write to their parameters in another forward: when
    they are run again, they would do so once more."""
    for held in result.parameters:
        for name in held.names if held.name in result.may_write else ():
            for path, about in result.recomputable.items():
                if name.startswith(f"{path}." if path else ""):
                    why = f"it may write to parameter {name!r}"
                    about.refuses = about.refuses or why


def _is_directly_in_sealed(call: Call) -> bool:
    return call.parent is not None and call.parent.sealed


def _in_sealed(call: Call | None) -> bool:
    return call is not None and (call.sealed or any(c.sealed for c in call.ancestors()))


def _sealed_forwards(result: Recording) -> dict[int, Call]:
    """Return, by the id of each call, the sealed call that it is, or is inside of."""
    found = {}
    for call in result.calls:
        around = [c for c in (call, *call.ancestors()) if c.sealed]
        if around:
            sealed_call = around[-1]
            hops = (result.sealed_functions if sealed_call.is_function else result.sealed).get(
                sealed_call.path
            )
            if hops is not None and sealed_call.hop in hops:
                found[id(call)] = sealed_call
    return found


def _place_unread(model: nn.Module, recorder: Recorder) -> None:
    """Place a parameter that no call reads where its module runs, or the nearest one around it."""
    calls = [call for call in recorder.result.calls if not call.is_function]
    stage_of = {call.path: call.stage for call in reversed(calls)}
    for held in recorder.held.values():
        if held.hop is not None:
            continue
        found = (stage_of[path] for path in paths_around(held.name) if path in stage_of)
        held.stage = next(found, 0)
