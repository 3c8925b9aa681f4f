"""The stand-ins for the forwards of modules that are sealed, or that a plan names, during a step.

A sealed module's inside stays on one stage. So its stand-in looks only at its arguments and
results, and operations inside of it are not intercepted. Stand-ins are instance attributes, set for
a step and taken off after it: the user's hooks run outside of them, and between steps the model is
exactly the user's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from .._common.modules import MISSING, StandIn, stand_ins_of_copies
from .._common.threads.process_changes import ProcessChange
from .._torch.modules import (
    COMPILED_CALL,
    buffers_of,
    children_of,
    forward_hooks_of,
    forward_pre_hooks_of,
    is_compiled,
    parameters_of,
)
from ..crossing.carried_values import Part, written
from ..crossing.interception import active_mode
from ..crossing.recompute import RecomputeSpec
from ..crossing.step_context import Seal
from ..recording.calls import Call
from ..recording.plan_resolution import Stages, planned_stage
from ..recording.recording import Recording
from ..stages.cursor import active_cursor


class SealedForward(StandIn):
    """Stands in for a module's ``forward`` during a step.

    Args:
        forward: the module's own forward.
        seal: how it is called on the hops on which the module is sealed.
        stages: from the number of the module's call to the stage that a plan gives it, overriding
            the marks; ``None``: the plan does not name the module.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        seal: Seal,
        stages: Mapping[int | None, int] | None = None,
    ) -> None:
        self.forward = forward
        self.seal = seal
        self.stages = stages

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode = active_mode()
        if mode is None:
            return self.forward(*args, **kwargs)
        run = mode.run
        if mode.inside:
            if self.stages is not None:
                run.cursor.count_call(self)  # a later one may be outside of what is sealed
            return self.forward(*args, **kwargs)
        if self.stages is not None:
            call = run.cursor.count_call(self)
            run.cursor.move(planned_stage(self.stages, call, run.cursor.stage), None)
        if self.seal.hops and run.is_sealed(self.seal.hops):
            return mode.call_sealed(self.forward, args, kwargs, self.seal)
        return self.forward(*args, **kwargs)


class PlannedForward(StandIn):
    """Stands in for a module's ``forward`` in the plain loop, where only the cursor follows a plan.

    Args:
        stages: from the number of the module's call to the stage that the plan gives it.
    """

    def __init__(self, stages: Mapping[int | None, int]) -> None:
        self.stages = stages

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cursor = active_cursor()
        if cursor is not None:
            call = cursor.count_call(self)
            cursor.move(planned_stage(self.stages, call, cursor.stage), None)
        return self.forward(*args, **kwargs)


class _StandIns(ProcessChange):
    """Stand-ins for the forwards of modules, as instance attributes."""

    def __init__(self) -> None:
        self._places: list[tuple[dict[str, Any], str, StandIn]] = []

    def _add(self, module: nn.Module, name: str, stand_in: StandIn) -> None:
        # Put on first and taken off last: whoever copies the module meanwhile asks for it.
        beside = [(vars(module), *place) for place in stand_ins_of_copies(module)]
        self._places[:0] = beside
        self._places.append((module.__dict__, name, stand_in))

    def put_on(self) -> None:
        """Put every stand-in in its place."""
        for names, name, stand_in in self._places:
            stand_in.own = names.get(name, MISSING)
            names[name] = stand_in

    def take_off(self) -> None:
        """Put back what was in their places."""
        for names, name, stand_in in reversed(self._places):
            if names.get(name) is not stand_in:
                continue  # the user's code has set its own meanwhile
            if stand_in.own is MISSING:
                del names[name]
            else:
                names[name] = stand_in.own


class PlannedForwards(_StandIns):
    """The stand-ins by which the plain loop's cursor follows a plan. They may be put on over other
    stand-ins, which they call.

    Args:
        model: the model whose modules they stand in for.
        planned: from a module's path and call to the stage that the plan gives it.
    """

    def __init__(self, model: nn.Module, planned: Stages) -> None:
        super().__init__()
        modules = dict(model.named_modules())
        self._planned: list[tuple[nn.Module, str, PlannedForward]] = []
        for path, stages in planned.items():
            module, stand_in = modules[path], PlannedForward(stages)
            self._planned.append((module, _called(module), stand_in))
            self._add(module, _called(module), stand_in)

    def put_on(self) -> None:
        for module, name, stand_in in self._planned:
            stand_in.forward = getattr(module, name)
        super().put_on()


class SealedForwards(_StandIns):
    """The stand-ins of one recording; entered for each step, reentrant.

    Args:
        model: the model whose modules they stand in for.
        recording: says which modules are sealed on which hops.
        planned: from a module's path and call to the stage that a plan gives it.
        inner: other stand-ins, which are called by these: from a module's path to a function that
            makes one from the forward.

    Attributes:
        following: the stand-ins that follow the plan, for the plain loop.
    """

    def __init__(
        self,
        model: nn.Module,
        recording: Recording,
        planned: Stages | None = None,
        inner: Mapping[str, Callable[[Callable[..., Any]], StandIn]] | None = None,
    ) -> None:
        super().__init__()
        planned, inner = _outside_of_sealed(recording, planned or {}), inner or {}
        self.following = PlannedForwards(model, planned)
        sealed = recording.sealed
        modules = dict(model.named_modules())
        waiting = {call.path for call in recording.calls if call.waits}
        constants = _constants(recording)

        def sealed_as(what: str, path: str, hops: frozenset[int]) -> Seal:
            spec = recompute_spec(what, path, recording, modules)
            return Seal(path, hops, spec, path in waiting, constants.get(path, frozenset()))

        self._sealed: list[tuple[str, nn.Module, SealedForward, Callable[..., Any]]] = []
        for path in sorted({*sealed, *planned, *inner}):
            module = modules[path]
            name = _called(module)
            forward = getattr(module, name)
            if path in inner:
                forward = stand_in = inner[path](forward)
                if path not in sealed and path not in planned:
                    self._add(module, name, stand_in)
                    continue
            hops = sealed.get(path, frozenset())
            seal = sealed_as(f"module {path or '(the model)'!r}", path, hops)
            sealed_forward = SealedForward(forward, seal, planned.get(path))
            self._add(module, name, sealed_forward)
            if hops and not is_compiled(module):
                self._sealed.append((path, module, sealed_forward, sealed_forward.forward))
        self.functions = {
            key: sealed_as(f"function {key}", key, hops)
            for key, hops in recording.sealed_functions.items()
        }

    def stand_in(
        self,
        wrap: Callable[[str, nn.Module, Callable[..., Any]], Callable[..., Any] | None],
        *,
        recomputes: bool,
    ) -> list[str]:
        """Replace the forwards that the stand-ins of sealed modules call.

        Args:
            wrap: from a module's path, the module and its forward to a replacement, or ``None`` to
                leave it as it is.
            recomputes: whether a replacement can be run again for its activations.

        Returns:
            The paths of the modules whose forwards were replaced.
        """
        found = []
        for path, module, sealed_forward, forward in self._sealed:
            new = wrap(path, module, forward)
            if new is not None:
                sealed_forward.forward = new
                spec = sealed_forward.seal.recompute if recomputes else None
                spec = spec and replace(spec, is_compiled=True)
                sealed_forward.seal = replace(sealed_forward.seal, recompute=spec)
                found.append(path)
        return found


def _called(module: nn.Module) -> str:
    """Return the attribute that a call of a module calls: one that is compiled in place runs its
    compiled call."""
    return "forward" if module.__dict__.get(COMPILED_CALL) is None else COMPILED_CALL


def recompute_spec(
    what: str, path: str, recording: Recording, modules: Mapping[str, nn.Module]
) -> RecomputeSpec | None:
    """Return the way in which the calls of a sealed module, or of a function, are run again.

    Args:
        what: for messages.
        path: the module's, or the function's key.
        recording: knows what it saves and writes.
        modules: of the model, by path.

    Returns:
        ``None`` where it saves nothing to run it again, or cannot be.
    """
    about = recording.recomputable.get(path)
    if about is None or not about.is_recomputed:
        return None
    buffers, unseen = [], []
    for held in recording.buffers:
        outer, _, key = held.name.rpartition(".")
        slot = buffers_of(modules[outer]), key
        if held.name in about.buffers:
            buffers.append((*slot, held.written or held.name in recording.may_write))
        elif not held.hops and f"{held.name}.".startswith(f"{path}." if path else ""):
            unseen.append(slot)
    if not recording.fake:  # what a branch uses that other data take has to be there again, too
        buffers += [(*slot, True) for slot in unseen]
        unseen = []
    for module in modules[path].modules() if path in modules else ():
        # There is no tensor yet; the forward may make one.
        buffers += [
            (buffers_of(module), key, True) for key, b in buffers_of(module).items() if b is None
        ]
    calls = [call for call in recording.calls if call.path == path]
    left_alone = [*_left_alone(path, recording, modules, {h for call in calls for h in call.hops})]
    waits = any(call.waits for call in calls)
    return RecomputeSpec(what, about, buffers, unseen, left_alone, waits)


def _left_alone(
    path: str, recording: Recording, modules: Mapping[str, nn.Module], hops: set[int]
) -> Iterator[tuple[str, Callable[[], Iterable[Part]]]]:
    """Yield what a recomputation of a module must not write to: the parts of its modules, and
    tensors that no module registered; by name."""
    for name, module in modules[path].named_modules() if path in modules else ():
        yield f"the parts of {f'its {name!r}' if name else 'itself'}", partial(_parts_of, module)
    for outside in recording.outside:
        if outside.tensor is not None and not hops.isdisjoint(outside.hops):
            yield f"{outside.name} ({outside.where})", partial(_written_at, outside.tensor)


def _written_at(look: Callable[[], Tensor | None]) -> Iterable[Part]:
    return (written(look()),)


def _parts_of(module: nn.Module) -> Iterator[Part]:
    """Yield a module's parameters and children, and how many hooks it has."""
    yield from map(written, parameters_of(module).values())
    yield from ((child, 0) for child in children_of(module).values())
    yield None, len(forward_hooks_of(module)) + len(forward_pre_hooks_of(module))


def _constants(recording: Recording) -> dict[str, frozenset[int]]:
    """From a call's path to those of its results that are constants, whichever call it is."""
    found: dict[str, frozenset[int]] = {}
    for call in recording.calls:
        found[call.path] = found.get(call.path, frozenset(call.constants)) & call.constants
    return {path: which for path, which in found.items() if which}


def _outside_of_sealed(recording: Recording, planned: Stages) -> Stages:
    """Return a plan without the modules that run only inside of sealed calls. These run untouched
    (and compiled ones would be compiled anew around our stand-ins)."""

    def is_sealed(call: Call) -> bool:
        sealed_forwards = recording.sealed_functions if call.is_function else recording.sealed
        return call.sealed and call.hop in sealed_forwards.get(call.path, ())

    outside: set[str] = set()
    inside: dict[int, bool] = {}  # ids of calls: whether what they call is
    called = set()
    for call in recording.calls:
        is_in = call.parent is not None and inside[id(call.parent)]
        inside[id(call)] = is_in or is_sealed(call)
        called.add(call.path)
        if not is_in:
            outside.add(call.path)
    return {path: s for path, s in planned.items() if path in outside or path not in called}
