"""The plan: which module call is on which stage, as data.

A plan is printable, editable and saved as JSON, and fits the same model built again. It is made
from a recording (:attr:`Recording.plan`), so that marks and edits end in one form.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

from .errors import PlanError


@dataclass
class Assignment:
    """One module call: its path, which of the module's calls it is (from 0), and its stage."""

    path: str
    call: int
    stage: int


@dataclass
class StagePlan:
    """Assignments in execution order.

    Example:
        >>> plan = StagePlan([Assignment("a", 0, 0), Assignment("b", 0, 0)])
        >>> plan.assign("b", 1)
        >>> plan.num_stages, StagePlan.from_json(plan.to_json()) == plan
        (2, True)
    """

    assignments: list[Assignment] = field(default_factory=list)

    @property
    def num_stages(self) -> int:
        """One more than the highest stage; 0 for an empty plan."""
        return max((a.stage for a in self.assignments), default=-1) + 1

    def stages(self) -> dict[tuple[str, int], int]:
        """From (path, call) to the stage."""
        return {(a.path, a.call): a.stage for a in self.assignments}

    def assign(self, pattern: str, stage: int) -> None:
        """Put every call of the modules that a path pattern names, and all inside, on a stage.

        Raises:
            PlanError: a wrong stage, or no module of that path (with near misses).
        """
        _check_stage(stage, pattern)
        wanted = pattern.split(".")

        def named(path: str) -> bool:
            have = path.split(".")
            return len(have) >= len(wanted) and all(
                fnmatchcase(h, w) for h, w in zip(have, wanted, strict=False)
            )

        found = [a for a in self.assignments if named(a.path)]
        if not found:
            paths = sorted({a.path for a in self.assignments})
            near = get_close_matches(pattern, paths, n=3, cutoff=0.4)
            raise PlanError(
                f"the plan has no module {pattern!r}; "
                + (f"did you mean {', '.join(map(repr, near))}?" if near else f"it has {paths[:8]}")
            )
        for assignment in found:
            assignment.stage = stage

    def check(self, devices: int | None = None) -> None:
        """Raise one :class:`PlanError` with everything that is wrong.

        Args:
            devices: how many devices there are, if known.
        """
        problems = [
            f"{a.path!r} call {a.call}: a stage is a whole number from 0 on, not {a.stage!r}"
            for a in self.assignments
            if not isinstance(a.stage, int) or isinstance(a.stage, bool) or a.stage < 0
        ]
        if not problems:
            used = {a.stage for a in self.assignments}
            problems += gaps(used)
            if devices is not None and self.num_stages > devices:
                problems.append(too_few_devices(self.num_stages, devices))
        doubles = {(a.path, a.call) for a in self.assignments}
        if len(doubles) != len(self.assignments):
            problems.append("a module call is assigned twice")
        if problems:
            raise PlanError("; ".join(problems))

    def to_json(self) -> str:
        """The plan as JSON text."""
        entries = [asdict(a) for a in self.assignments]
        return json.dumps({"version": 1, "assignments": entries}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "StagePlan":
        """A plan from JSON text.

        Raises:
            PlanError: the text is no plan; the message says which entry is off.
        """
        try:
            entries = json.loads(text)["assignments"]
            plan = cls([Assignment(str(e["path"]), int(e["call"]), e["stage"]) for e in entries])
        except (ValueError, KeyError, TypeError) as error:
            raise PlanError(
                'a plan is {"version": 1, "assignments": [{"path", "call", "stage"}, …]}, but '
                f"this came: {text[:80]!r} ({error})"
            ) from error
        plan.check()
        return plan

    def __str__(self) -> str:
        width = max((len(a.path) for a in self.assignments), default=0)
        return "\n".join(
            f"{a.path:<{width}}  call {a.call}  stage {a.stage}" for a in self.assignments
        )


def gaps(used: Iterable[int]) -> list[str]:
    """What to say of stage numbers that leave gaps."""
    have = sorted(set(used))
    missing = sorted(set(range(have[-1] + 1)) - set(have)) if have else []
    if not missing:
        return []
    return [
        f"stages are numbered 0, 1, … without gaps, but {have} are used and {missing} are not; "
        "renumber the marks, or mark something with the missing number"
    ]


def too_few_devices(stages: int, devices: int) -> str:
    """What to say when there are more stages than devices."""
    have = (
        "is 1 device (stage 0)"
        if devices == 1
        else f"are {devices} devices (stages 0..{devices - 1})"
    )
    return (
        f"the model has {stages} stages (0..{stages - 1}), but there {have}; pass {stages} "
        "devices (a device may be named several times), or mark fewer stages"
    )


def _check_stage(stage: object, what: str) -> None:
    if not isinstance(stage, int) or isinstance(stage, bool) or stage < 0:
        raise PlanError(f"{what!r}: a stage is a whole number from 0 on, not {stage!r}")
