"""The plan: the stage of each module call, as data.

A plan is printable, editable and saved as JSON, and fits the same model built again. It is made
from a recording (:attr:`Recording.plan`), so that marks and edits end in one form.

An entry means the same as a mark: from this call on the forward is on this stage, until the next
call that the plan lists. So a plan may be partial, and a module that contains others has an entry
too: its stage is that of its own code before the first call inside.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from .._common.checks import expected, mismatch
from .._common.files.bounded_json import parse_json, read_text
from .._common.files.replaced_files import part_of, remove_abandoned
from .._common.text import one_line
from ..errors import PlanError
from .assignment import STAGE_RANGE, Assignment, check_stage, entry_of, is_stage
from .path_patterns import matches, unknown_path
from .plan_text import read_layout, write_layout


class HasPlan(Protocol):
    """A recording, or another object that has a plan."""

    @property
    def plan(self) -> "StagePlan": ...


@dataclass
class StagePlan:
    """Assignments in execution order.

    Attributes:
        assignments: one entry for each module call, those inside of others too. A plan that is
            made from nested entries has them all in a row: the same objects.
        partial: whether it lists only the calls at which a stage begins, and not every call.

    Example:
        >>> plan = StagePlan([Assignment("a", 0, 0), Assignment("b", 0, 0)])
        >>> plan.assign("b", 1)
        >>> plan.num_stages, StagePlan.from_json(plan.to_json()) == plan
        (2, True)
        >>> plan.layout
        'b=1'
    """

    assignments: list[Assignment] = field(default_factory=list)
    partial: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if not all(isinstance(entry, Assignment) for entry in self.assignments):
            raise PlanError(
                expected("a list of Assignment entries", self.assignments, for_="assignments")
            )
        inner = {id(e) for a in self.assignments for e in a.with_inside() if e is not a}
        if not any(id(entry) in inner for entry in self.assignments):  # nested ones
            self.assignments = [e for a in self.assignments for e in a.with_inside()]

    @property
    def nested(self) -> list[Assignment]:
        """The outermost entries: the same objects."""
        inner = {id(e) for entry in self.assignments for e in entry.inside}
        return [entry for entry in self.assignments if id(entry) not in inner]

    @property
    def num_stages(self) -> int:
        """One more than the highest stage; 0 for an empty plan."""
        return max((a.stage for a in self.assignments), default=-1) + 1

    def stages(self) -> dict[tuple[str, int | None], int]:
        """Return a mapping from (path, call) to the stage."""
        return {(a.path, a.call): a.stage for a in self.assignments}

    def assign(self, pattern: str, stage: int) -> None:
        """Put every call of the modules that a path pattern names, and all inside, on a stage.

        Raises:
            PlanError: the stage is not a non-negative integer, or the plan has no module of that
                path (the message has near misses).
        """
        if not isinstance(pattern, str):
            raise PlanError(expected("text such as 'layer3'", pattern, for_="a path pattern"))
        check_stage(stage, repr(pattern))
        depth = pattern.count(".") + 1
        found = [
            a for a in self.assignments if matches(pattern, ".".join(a.path.split(".")[:depth]))
        ]
        if not found:
            raise PlanError(unknown_path(pattern, sorted({a.path for a in self.assignments})))
        for assignment in found:
            assignment.stage = stage

    def check(self, devices: int | None = None) -> None:
        """Check the stages.

        Args:
            devices: the number of devices, if known.

        Raises:
            PlanError: there is a problem; one error names all of them.
        """
        problems = self.problems(devices)
        if problems:
            raise PlanError("; ".join(problems))

    def problems(self, devices: int | None = None) -> list[str]:
        """Return the problems for which :meth:`check` raises an error, one text each.

        Args:
            devices: the number of devices; ``None``: it is unknown.
        """
        problems = [
            mismatch(STAGE_RANGE, a.stage, for_=f"the stage of {a.name}")
            for a in self.assignments
            if not is_stage(a.stage)
        ]
        if not problems:
            # Code before the first call that a partial plan lists is on stage 0.
            used = {a.stage for a in self.assignments} | ({0} if self.is_partial else set())
            problems += gaps(used)
            if devices is not None and self.num_stages > devices:
                problems.append(too_few_devices(self.num_stages, devices))
        counts = Counter((a.path, a.call) for a in self.assignments)
        twice = {(a.path, a.call): a for a in self.assignments if counts[a.path, a.call] > 1}
        problems += [f"{a.name} is assigned twice" for a in twice.values()]
        return problems

    @property
    def is_partial(self) -> bool:
        """Whether calls that are not listed stay on the stage that the forward is on, as with
        marks. An empty plan is partial."""
        return self.partial or not self.assignments or any(a.call is None for a in self.assignments)

    def differences(
        self, other: "StagePlan | HasPlan", *, here: str = "this plan", there: str = "the other"
    ) -> list[str]:
        """Compare its calls with those of another plan or a recording; stages do not count.

        Args:
            other: a plan or a recording. A call that a partial plan does not list is no difference.
            here: the name of this plan in the texts.
            there: the name of the other.

        Returns:
            One text for each difference: a call in one of them only, another class, another order.

        Example:
            >>> a = StagePlan([Assignment("a", 0, 0, "Linear"), Assignment("b", 0, 0)])
            >>> b = StagePlan([Assignment("a", 0, 0, "Conv2d")])
            >>> for difference in a.differences(b):
            ...     print(difference)
            'b' call 0: only in this plan
            'a' call 0: Linear in this plan, Conv2d in the other
        """
        their_plan = other if isinstance(other, StagePlan) else other.plan
        ours = {(a.path, a.call): a for a in self.assignments}
        theirs = {(a.path, a.call): a for a in their_plan.assignments}

        def is_in(entry: Assignment, plan: StagePlan, calls: Mapping[Any, Assignment]) -> bool:
            if (entry.path, entry.call) in calls:
                return True
            return any(
                (a.call is None and a.names(entry.path))
                or (entry.call is None and entry.names(a.path))
                for a in (plan.assignments if plan.is_partial or entry.call is None else ())
            )

        found = [
            f"{a.name}: only in {here}"
            for a in self.assignments
            if not their_plan.is_partial and not is_in(a, their_plan, theirs)
        ]
        found += [
            f"{a.name}: only in {there}"
            for a in their_plan.assignments
            if not self.is_partial and not is_in(a, self, ours)
        ]
        found += [
            f"{a.name}: {a.kind} in {here}, {theirs[key].kind} in {there}"
            for key, a in ours.items()
            if key in theirs and a.kind and theirs[key].kind and a.kind != theirs[key].kind
        ]
        ordered = [a for key, a in ours.items() if key in theirs]
        for mine, key in zip(ordered, (key for key in theirs if key in ours), strict=True):
            if (mine.path, mine.call) != key:
                found.append(
                    f"{mine.name} in {here}, but {theirs[key].name} in {there} at its place"
                )
                break
        return found

    # --- as text

    @property
    def layout(self) -> str:
        """The calls at which the stage changes, as one line of text: ``layer3=1, layer4=2``."""
        calls: dict[str, int] = {}
        for a in self.assignments:
            calls[a.path] = calls.get(a.path, 0) + 1
        items = []
        stage = 0
        for a in self.assignments:
            # An entry that stands for every call of its module leaves none that could be implied.
            if a.stage != stage or self.is_partial:
                call = None if calls[a.path] == 1 and not self.is_partial else a.call
                items.append((a.path, call, a.stage))
            stage = a.stage
        return write_layout(items)

    @classmethod
    def from_layout(cls, text: str) -> "StagePlan":
        """Make a partial plan from a line of text.

        Args:
            text: ``"layer3=1, layer4=2"``: from the call of ``layer3`` on the forward is on
                stage 1. ``act#1=2`` is the second call of a module that is called several times;
                without a number it is every call, and the path may be a pattern
                (``blocks.[6-9]=1``). A path with other characters in it is in double quotes.

        Raises:
            PlanError: the text cannot be read (the message has the position), or the plan cannot
                be carried out.

        Example:
            >>> StagePlan.from_layout("layer3=1, layer4=2").num_stages
            3
        """
        plan = cls([Assignment(*item) for item in read_layout(text)], partial=True)
        plan.check()
        return plan

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        data: dict[str, Any] = {"version": 2}
        if self.partial:
            data["partial"] = True
        data["assignments"] = [asdict(a) for a in self.nested]
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "StagePlan":
        """Make a plan from JSON text.

        Raises:
            PlanError: the text is not that of a plan; the message names the wrong entry.
        """
        try:
            data = parse_json(text)
            if data.get("version", 1) not in (1, 2):
                raise ValueError(
                    f"version {data['version']!r} is unknown; this library reads 1 and 2"
                )
            entries = [entry_of(e, i) for i, e in enumerate(data["assignments"])]
            plan = cls(entries, partial=bool(data.get("partial", False)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            contract = 'a plan {"version": 2, "assignments": [{"path", "call", "stage", …}, …]}'
            got = text[:80] if isinstance(text, str) else text
            raise PlanError(
                expected(contract, got, for_="text", fix=f"reading it fails: {error}")
            ) from error
        plan.check()
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON to ``path``; an earlier file stays whole until it is complete."""
        text, target = self.to_json() + "\n", Path(path).resolve()
        if target.exists() and not target.is_file():  # a pipe
            target.write_text(text, encoding="utf-8")
            return
        remove_abandoned(target.parent, re.escape(target.name))
        part = part_of(target)
        try:
            with part.open("x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "StagePlan":
        """Read a plan from the JSON file at ``path``.

        Raises:
            PlanError: there is no such file, or it does not hold a plan.

        Example:
            >>> import tempfile, pathlib
            >>> plan = StagePlan([Assignment("a", 0, 0), Assignment("b", 0, 1)])
            >>> with tempfile.TemporaryDirectory() as directory:
            ...     plan.save(pathlib.Path(directory) / "plan.json")
            ...     StagePlan.load(pathlib.Path(directory) / "plan.json") == plan
            True
        """
        try:
            return cls.from_json(read_text(path))
        except (OSError, ValueError, TypeError) as error:
            raise PlanError(f"cannot read a plan from {str(path)!r}: {error}") from error

    def __str__(self) -> str:
        paths = [one_line(a.path) for a in self.assignments]
        width = max(map(len, paths), default=0)
        return "\n".join(
            f"{path:<{width}}  call {'any' if a.call is None else a.call}  stage {a.stage}"
            for path, a in zip(paths, self.assignments, strict=True)
        )


def gaps(used: Iterable[int]) -> list[str]:
    """Return the problem with stage numbers that leave gaps, if they do."""
    have = set(used)
    missing = list(islice((s for s in range(max(have, default=0)) if s not in have), 8))
    if not missing:
        return []
    return [
        f"expected stages numbered 0, 1, … without gaps, got {sorted(have)}, where {missing} are "
        "missing; renumber the marks, or mark a module with the missing number"
    ]


def too_few_devices(stages: int, devices: int) -> str:
    """Return the text of an error for more stages than devices."""
    have = (
        "is 1 device (stage 0)"
        if devices == 1
        else f"are {devices} devices (stages 0..{devices - 1})"
    )
    return (
        f"the model has {stages} stages (0..{stages - 1}), but there {have}; pass {stages} "
        "devices (a device may be named several times), or mark fewer stages"
    )
