"""An entry of a plan: a module call and its stage."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from .._common.checks import expected, is_integer
from ..errors import PlanError
from .path_patterns import matches

MOST_STAGES = 1 << 20  # as many as a schedule has numbers for
STAGE_RANGE = f"an integer from 0 to {MOST_STAGES - 1:,}"
_KERAS_NAMES = {  # of an entry's attributes, for errors that give ours
    "inbound_layers": "call.inbound of the calls of record(model, sample)",
    "is_nested_model": "bool(entry.inside)",
    "layer": "model.get_submodule(entry.path)",
    "nested_model": "model.get_submodule(entry.path)",
    "node_index": "entry.call",
    "pipeline_stage_assignments": "entry.inside",
}


@dataclass(slots=True)  # so that a misspelt attribute is an error
class Assignment:
    """One module call and its stage.

    Attributes:
        path: the module's path.
        call: the index of the module's call, from 0; ``None``: every call, and then ``path`` may
            be a pattern (``blocks.[6-9]``).
        stage: the stage on which the forward is from this call on, until the next call that is
            listed. So the stage of a module that contains others is that of its own code before
            the first call inside; :meth:`assign` moves it with all inside.
        kind: the name of the module's class, if known.
        inside: the calls within this one, in execution order.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> plan = bp.record(net, torch.ones(8, 4)).plan
        >>> last = plan.assignments[-1]
        >>> last.assign(1)
        >>> last
        Assignment(path='1', call=0, stage=1, kind='Linear')
    """

    path: str
    call: int | None
    stage: int
    kind: str = field(default="", compare=False)
    inside: list["Assignment"] = field(default_factory=list, compare=False, repr=False)

    def assign(self, stage: int) -> None:
        """Put this call, and all calls inside, on a stage.

        Raises:
            PlanError: the stage is not a non-negative integer.

        Example:
            >>> block = Assignment("block", 0, 0, inside=[Assignment("block.conv", 0, 0)])
            >>> block.assign(1)
            >>> block.inside
            [Assignment(path='block.conv', call=0, stage=1, kind='')]
        """
        check_stage(stage, self.name)
        for entry in self.with_inside():
            entry.stage = stage

    @property
    def pipeline_stage(self) -> int:
        """The stage, under its IPU Keras name; setting it calls :meth:`assign`."""
        return self.stage

    @pipeline_stage.setter
    def pipeline_stage(self, stage: int) -> None:
        self.assign(stage)

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an error that gives the name here of an attribute of IPU Keras' entries."""
        hint = f"; write {_KERAS_NAMES[name]}" if name in _KERAS_NAMES else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def with_inside(self) -> Iterator["Assignment"]:
        """Yield this entry and all inside, in execution order."""
        yield self
        for entry in self.inside:
            yield from entry.with_inside()

    @property
    def name(self) -> str:
        """The call's name in messages."""
        return repr(self.path) if self.call is None else f"{self.path!r} call {self.call}"

    def names(self, path: str) -> bool:
        """Return whether its path or pattern is that of a module."""
        return path == self.path or (self.call is None and matches(self.path, path))


def is_stage(stage: object) -> bool:
    """Return whether a value is a number of a stage."""
    return is_integer(stage, 0) and stage < MOST_STAGES


def check_stage(stage: object, name: str) -> None:
    """Raise an error if a value is no number of a stage.

    Args:
        stage: the value.
        name: the name of the call that it is the stage of.

    Raises:
        PlanError: it is none.
    """
    if not is_stage(stage):
        raise PlanError(expected(STAGE_RANGE, stage, for_=f"the stage of {name}"))


def entry_of(data: Any, where: object) -> Assignment:
    """Make an entry and all inside from JSON.

    Args:
        data: what :meth:`StagePlan.to_json` wrote for it.
        where: its position, for errors.

    Raises:
        ValueError: a path, call or kind that none can be. The stage is not looked at.
    """
    path, call, kind = data["path"], data["call"], data.get("kind", "")
    is_call = call is None or is_integer(call, 0)
    if not isinstance(path, str) or not isinstance(kind, str) or not is_call:
        raise ValueError(f"entry {where} has path {path!r}, call {call!r}, kind {kind!r}")
    inside = [entry_of(e, f"{where}.{i}") for i, e in enumerate(data.get("inside", []))]
    return Assignment(path, call, data["stage"], kind, inside)
