"""What a plan says of each call of a model, and whether it fits; a plan that is kept on a model.

A plan set by :func:`blockpipe.set_pipeline_stage_assignment` is in the model's ``__dict__``, as
the mark of ``BeginBlock`` is: copies and pickles take it along, and the ``state_dict`` is what it
was. A table from models to plans would lose it there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from .._common.checks import did_you_mean
from .._common.modules import is_within
from ..errors import PlanError
from ..stages.assignment import Assignment
from ..stages.plan import StagePlan
from .calls import Call
from .recording import Recording

_KEPT = "_blockpipe_plan"
Stages = Mapping[str, Mapping[int | None, int]]
"""From a module's path to the stages of its calls; ``None``: of those that are not listed."""


@dataclass(frozen=True)
class AttachedPlan:
    """A plan that was set, and the line that set it."""

    plan: StagePlan
    where: str


def attached_plan(model: nn.Module) -> AttachedPlan | None:
    """Return the plan that was set on a model itself, if one was."""
    found: AttachedPlan | None = model.__dict__.get(_KEPT)
    return found


def attached_plans(model: nn.Module) -> list[tuple[str, AttachedPlan]]:
    """Return the plans that were set on a model and on models inside of it, with the paths of
    these."""
    found = ((path, attached_plan(module)) for path, module in model.named_modules())
    return [(path, kept) for path, kept in found if kept is not None]


def attach_plan(model: nn.Module, kept: AttachedPlan | None) -> None:
    """Set a model's plan, or take it off."""
    if kept is None:
        model.__dict__.pop(_KEPT, None)
    else:
        model.__dict__[_KEPT] = kept


class Planned:
    """A plan, resolved for a model.

    Args:
        model: whose modules it names.
        plan: stages that override the marks.
        where: the line that set it on the model; ``None``: it was passed along.
        every_module: whether every module of the plan must be called; in another mode (eval, say)
            some may be left out.
        inside: the path of the model that it was set on, and names modules of.

    Raises:
        PlanError: it names modules that are not there.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: StagePlan,
        where: str | None = None,
        *,
        every_module: bool = False,
        inside: str = "",
    ) -> None:
        if inside:
            entries = [replace(a, path=f"{inside}.{a.path}", inside=[]) for a in plan.assignments]
            plan = StagePlan(entries, partial=plan.partial)
        self.plan = plan
        self.where = where
        self.every_module = every_module
        self.inside = inside
        self.model = type(model).__name__
        resolved = dict(resolve(model, plan))
        unknown = [a for a in plan.assignments if id(a) not in resolved]
        if unknown:
            paths = [a.path for a in unknown]
            known = [path for path, _ in model.named_modules() if path]
            hint = did_you_mean(paths[0], known, "make the plan anew")
            raise PlanError(
                f"the plan assigns {sorted(set(paths))[:5]}, which {self.model} does not have; "
                f"{hint} (record(model, args).plan is one that fits){self._at()}"
            )
        stages: dict[str, dict[int | None, int]] = {}
        twice = []
        for entry in plan.assignments:
            for path in resolved[id(entry)]:
                earlier = stages.setdefault(path, {}).setdefault(entry.call, entry.stage)
                if earlier != entry.stage:
                    twice.append(
                        f"{path!r} is on stage {earlier}, and by {entry.name} on stage "
                        f"{entry.stage}"
                    )
        if twice:
            raise PlanError(
                f"a plan has one stage for a call, but {'; '.join(twice)}; give each module one "
                f"pattern{self._at()}"
            )
        self.stages: Stages = stages
        self._paths = resolved

    def _at(self) -> str:
        return "" if self.where is None else f" (set at {self.where})"

    def check(self, recording: Recording) -> None:
        """Raise one :class:`PlanError` with all that does not fit what was recorded under it."""
        outside = [line for line, call in recording.marks.items() if not self._has(call)]
        if outside:
            raise PlanError(
                f"a forward has marks or set stages, but stages are set on {self.inside!r} "
                f"({self.where}), and {self.model} has marks outside of it "
                f"({', '.join(outside[:3])}); {_remedy(self.inside)}"
            )
        problems = self._misfits(recording)
        if self.where is not None:
            problems += list(self._unreached(recording))
        if problems:
            more = f" (and {len(problems) - 12} more)" if len(problems) > 12 else ""
            raise PlanError(
                f"a plan fits the calls that the forward of {self.model} makes: "
                f"{'; '.join(problems[:12])}{more}; make it from a recording of this model in this "
                f"mode, or list only where stages begin{self._at()}"
            )

    def _has(self, call: Call | None) -> bool:
        """Return whether a call is inside of the model that the plan was set on."""
        if not self.inside:
            return True
        around = () if call is None else (call, *call.ancestors())
        return any(c.path == self.inside for c in around)

    def _misfits(self, recording: Recording) -> list[str]:
        made = {(call.path, call.call) for call in recording.calls if call.is_module}
        called = {path for path, _ in made}
        listed = []
        for a in self.plan.assignments:
            paths = self._paths[id(a)]
            is_called = not called.isdisjoint(paths)
            if (a.call is not None and is_called) or (self.every_module and not is_called):
                listed.append(Assignment(paths[0], a.call, a.stage, a.kind))
        plan = StagePlan(listed, partial=self.plan.is_partial)
        made_here = StagePlan(
            [
                a
                for a in recording.plan.assignments
                if a.path in self.stages or not self.inside or a.path.startswith(f"{self.inside}.")
            ]
        )
        return plan.differences(made_here, here="the plan", there="the forward")

    def _unreached(self, recording: Recording) -> Iterator[str]:
        """Yield the stages that begin before the one below, or that nothing runs on."""
        yield from recording.begun_too_early()
        reached = {hop.stage for hop in recording.hops}
        for entry in self.plan.assignments:
            if entry.stage not in reached:
                reached.add(entry.stage)
                yield (
                    f"nothing runs on stage {entry.stage}, which {entry.name} begins: it is not "
                    "called, or has no operation of its own before the first call inside; "
                    "entry.assign(stage) moves a call with all inside"
                )


def planned_by(model: nn.Module, plan: StagePlan | None) -> Planned | None:
    """Return the plan that counts for a model: the one passed along, else the one that was set on
    it, else on a model inside of it.

    Raises:
        PlanError: it names modules that are not there; it is set on two models inside.
    """
    if plan is not None:
        return Planned(model, plan)
    kept = attached_plans(model)
    if not kept:
        return None
    path, first = kept[0]
    beside = [(p, k) for p, k in kept if path and not is_within(p, path)]
    if beside:
        other, second = beside[0]
        raise PlanError(
            f"a forward has one numbering of stages, but {type(model).__name__} has stages set on "
            f"{path!r} ({first.where}) and on {other!r} ({second.where}); {_remedy(other)}"
        )
    return Planned(model, first.plan, first.where, inside=path)


def _remedy(path: str) -> str:
    return (
        "set stages on the whole model, or call "
        f"reset_pipeline_stage_assignment(model.get_submodule({path!r}))"
    )


def resolve(model: nn.Module, plan: StagePlan) -> Iterator[tuple[int, list[str]]]:
    """Return for each entry that names modules its ``id``, and their paths.

    A module that is registered under several paths is called by the first of them.
    """
    first = {id(module): path for path, module in model.named_modules()}
    named = model.named_modules(remove_duplicate=False)
    paths = {path: first[id(module)] for path, module in named if path}
    for entry in plan.assignments:
        if entry.path in paths:
            yield id(entry), [paths[entry.path]]
        elif entry.call is None:
            found = [own for path, own in paths.items() if entry.names(path)]
            if found:
                yield id(entry), list(dict.fromkeys(found))


def planned_stage(calls: Mapping[int | None, int], call: int, now: int) -> int:
    """Return the stage of a call; where the plan does not list it, the one that the forward is
    on."""
    return calls.get(call, calls.get(None, now))
