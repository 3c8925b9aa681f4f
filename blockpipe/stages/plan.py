"""The plan: which module call is on which stage, as data.

A plan is printable, editable and saved as JSON, and fits the same model built again. It is made
from a recording (:attr:`Recording.plan`), so that marks and edits end in one form.

What an entry says is what a mark would: from this call on the forward is on this stage, until the
next call that the plan lists. So a plan may be partial, and a module that contains others has an
entry too: its stage is that of its own code before the first call inside.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from .._common.bounded_json import parse_json, read_text
from .._common.replaced_files import part_of, remove_abandoned
from .._common.text import one_line
from ..errors import PlanError
from .plan_text import read_layout, write_layout

MOST_STAGES = 1 << 20  # as many as a schedule has numbers for


@dataclass(slots=True)  # so that a field that is none is no silent attribute
class Assignment:
    """One module call and its stage.

    Attributes:
        path: of the module.
        call: which of the module's calls, from 0; ``None``: every one of them, and then ``path``
            may be a pattern (``blocks.[6-9]``).
        stage: from this call on the forward is there, until the next call that is listed. So the
            stage of a module that contains others is that of its own code before the first call
            inside; :meth:`assign` moves it with all inside.
        kind: the module's class, if known.
        inside: the calls within this one, in execution order.
    """

    path: str
    call: int | None
    stage: int
    kind: str = field(default="", compare=False)
    inside: list["Assignment"] = field(default_factory=list, compare=False, repr=False)

    def assign(self, stage: int) -> None:
        """Put this call, and all calls inside, on a stage.

        Raises:
            PlanError: a wrong stage.

        Example:
            >>> block = Assignment("block", 0, 0, inside=[Assignment("block.conv", 0, 0)])
            >>> block.assign(1)
            >>> block.inside
            [Assignment(path='block.conv', call=0, stage=1, kind='')]
        """
        wrong = wrong_stage(stage)
        if wrong:
            raise PlanError(f"{self.name}: {wrong}")
        for entry in self.with_inside():
            entry.stage = stage

    @property
    def pipeline_stage(self) -> int:
        """IPU Keras' name for ``stage``; setting it is :meth:`assign`."""
        return self.stage

    @pipeline_stage.setter
    def pipeline_stage(self, stage: int) -> None:
        self.assign(stage)

    def with_inside(self) -> Iterator["Assignment"]:
        """This entry and all inside, in execution order."""
        yield self
        for entry in self.inside:
            yield from entry.with_inside()

    @property
    def name(self) -> str:
        """How messages name the call."""
        return repr(self.path) if self.call is None else f"{self.path!r} call {self.call}"

    def names(self, path: str) -> bool:
        """Whether its path, or pattern, is that of a module."""
        return path == self.path or (self.call is None and matches(self.path, path))


class HasPlan(Protocol):
    """A recording, or what else has a plan."""

    @property
    def plan(self) -> "StagePlan": ...


@dataclass
class StagePlan:
    """Assignments in execution order.

    Attributes:
        assignments: one entry for each module call, those inside of others too; made from entries
            with others inside, it has them all in a row: the same objects.
        partial: whether it lists only where a stage begins, and not every call.

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
            raise PlanError(f"a plan is made of Assignment entries, but {self.assignments!r} came")
        inner = {id(e) for a in self.assignments for e in a.with_inside() if e is not a}
        if not any(id(entry) in inner for entry in self.assignments):  # they came nested
            self.assignments = [e for a in self.assignments for e in a.with_inside()]

    @property
    def nested(self) -> list[Assignment]:
        """The entries that are inside of no other: the same objects."""
        inner = {id(e) for entry in self.assignments for e in entry.inside}
        return [entry for entry in self.assignments if id(entry) not in inner]

    @property
    def num_stages(self) -> int:
        """One more than the highest stage; 0 for an empty plan."""
        return max((a.stage for a in self.assignments), default=-1) + 1

    def stages(self) -> dict[tuple[str, int | None], int]:
        """From (path, call) to the stage."""
        return {(a.path, a.call): a.stage for a in self.assignments}

    def assign(self, pattern: str, stage: int) -> None:
        """Put every call of the modules that a path pattern names, and all inside, on a stage.

        Raises:
            PlanError: a wrong stage, or no module of that path (with near misses).
        """
        wrong = wrong_stage(stage)
        if wrong or not isinstance(pattern, str):
            raise PlanError(f"{pattern!r}: {wrong or 'a path pattern is text such as layer3'}")
        depth = pattern.count(".") + 1
        found = [
            a for a in self.assignments if matches(pattern, ".".join(a.path.split(".")[:depth]))
        ]
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
        problems = self.problems(devices)
        if problems:
            raise PlanError("; ".join(problems))

    def problems(self, devices: int | None = None) -> list[str]:
        """What :meth:`check` would complain about."""
        wrong = [(a, wrong_stage(a.stage)) for a in self.assignments]
        problems = [f"{a.name}: {why}" for a, why in wrong if why]
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
        """Whether calls that are not listed stay where the forward is, as with marks; a plan that
        lists none says that of all."""
        return self.partial or not self.assignments or any(a.call is None for a in self.assignments)

    def differences(
        self, other: "StagePlan | HasPlan", *, here: str = "this plan", there: str = "the other"
    ) -> list[str]:
        """How its calls differ from those of another plan or a recording; stages do not count.

        Args:
            other: a plan, or a recording. What a partial plan does not list is no difference.
            here: what messages call this plan.
            there: what messages call the other.

        Returns:
            One text for each difference: calls in one only, other classes, another order.

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
                found.append(f"{mine.name} in {here} comes where {there} has {theirs[key].name}")
                break
        return found

    # --- as text

    @property
    def layout(self) -> str:
        """Where the stage changes, as one line of text: ``layer3=1, layer4=2``."""
        calls: dict[str, int] = {}
        for a in self.assignments:
            calls[a.path] = calls.get(a.path, 0) + 1
        items = []
        stage = 0
        for a in self.assignments:
            # Where an entry stands for every call of its module, no other goes without saying.
            if a.stage != stage or self.is_partial:
                call = None if calls[a.path] == 1 and not self.is_partial else a.call
                items.append((a.path, call, a.stage))
            stage = a.stage
        return write_layout(items)

    @classmethod
    def from_layout(cls, text: str) -> "StagePlan":
        """A partial plan from a line of text.

        Args:
            text: ``"layer3=1, layer4=2"``: from the call of ``layer3`` on the forward is on
                stage 1. ``act#1=2`` is the second call of a module that is called several times;
                without a number it is every call, and the path may be a pattern
                (``blocks.[6-9]=1``). A path with other signs in it is in double quotes.

        Raises:
            PlanError: it cannot be read (with the position), or cannot be carried out.

        Example:
            >>> StagePlan.from_layout("layer3=1, layer4=2").num_stages
            3
        """
        plan = cls([Assignment(*item) for item in read_layout(text)], partial=True)
        plan.check()
        return plan

    def to_json(self) -> str:
        """The plan as JSON text."""
        data: dict[str, Any] = {"version": 2}
        if self.partial:
            data["partial"] = True
        data["assignments"] = [asdict(a) for a in self.nested]
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "StagePlan":
        """A plan from JSON text.

        Raises:
            PlanError: the text is no plan; the message says which entry is off.
        """
        try:
            data = parse_json(text)
            if data.get("version", 1) not in (1, 2):
                raise ValueError(
                    f"version {data['version']!r} is not known; this library reads 1 and 2"
                )
            entries = [_entry(e, i) for i, e in enumerate(data["assignments"])]
            plan = cls(entries, partial=bool(data.get("partial", False)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(
                'a plan is {"version": 2, "assignments": [{"path", "call", "stage", …}, …]}, but '
                f"this came: {str(text)[:80]!r} ({error})"
            ) from error
        plan.check()
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a JSON file: an earlier one stays whole until this one is."""
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
        """Read it from a JSON file.

        Raises:
            PlanError: there is no such file, or it holds no plan.

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
            raise PlanError(f"{str(path)!r} is no JSON file of a plan: {error}") from error

    def __str__(self) -> str:
        paths = [one_line(a.path) for a in self.assignments]
        width = max(map(len, paths), default=0)
        return "\n".join(
            f"{path:<{width}}  call {'any' if a.call is None else a.call}  stage {a.stage}"
            for path, a in zip(paths, self.assignments, strict=True)
        )


def matches(pattern: str, path: str) -> bool:
    """Whether a path pattern names a module, segment by segment."""
    wanted, have = pattern.split("."), path.split(".")
    return len(have) == len(wanted) and all(map(fnmatchcase, have, wanted))


def wrong_stage(stage: object) -> str | None:
    """What is wrong with a stage; ``None``: nothing."""
    if not isinstance(stage, int) or isinstance(stage, bool) or stage < 0:
        return f"a stage is a whole number from 0 on, not {repr(stage)[:100]}"
    return None if stage < MOST_STAGES else f"a stage is below {MOST_STAGES:,}, but a larger came"


def gaps(used: Iterable[int]) -> list[str]:
    """What to say of stage numbers that leave gaps."""
    have = set(used)
    missing = list(islice((s for s in range(max(have, default=0)) if s not in have), 8))
    if not missing:
        return []
    return [
        f"stages are numbered 0, 1, … without gaps, but {sorted(have)} are used and {missing} are "
        "not; renumber the marks, or mark something with the missing number"
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


def _entry(data: Any, where: object) -> Assignment:
    """An entry and all inside, from JSON."""
    path, call, kind = data["path"], data["call"], data.get("kind", "")
    is_number = isinstance(call, int) and not isinstance(call, bool) and call >= 0
    if not isinstance(path, str) or not isinstance(kind, str) or not (is_number or call is None):
        raise ValueError(f"entry {where}: {path!r}, call {call!r}, {kind!r}")
    inside = [_entry(e, f"{where}.{i}") for i, e in enumerate(data.get("inside", []))]
    return Assignment(path, call, data["stage"], kind, inside)
