"""Cut a tape into the calls of each stage, and find the tensors that go from one to the next.

Boundary k is every tensor that is made before stage k + 1 and used on it or later, including the
arguments of the forward, because torch's engine sends tensors only from a stage to the next. Their
order is that of their origins, which is the same in every process.
Parameters do not cross: each stage that reads one has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..errors import CrossingError, PlanError
from .taping.origins import origins
from .taping.tape import Entry, Held, Meta, Tape, Value, View, references, size_question

Order = tuple[int, ...] | None


@dataclass
class StageTape:
    """The calls of one stage, and the values that it takes and returns.

    Attributes:
        index: the stage's place in the chain of stages.
        stage: the stage's number in the marks.
        entries: the calls.
        inputs: the values that it takes, in order.
        origins: what made each of them.
        outputs: the values that it returns, in order; empty for the last stage.
        input_metas: the shapes and dtypes of ``inputs``, as they are sent.
        output_metas: the shapes and dtypes of its results, as they are sent.
        input_orders: the order in memory of the dims of each input, if that is not its shape's.
        output_orders: the same of each output.
        result: for the last stage, the forward's result with references.
        held: first names of the parameters and buffers that its glue reads.
        modules: paths of the modules that it calls.
        written: the inputs that it writes to.
        shared: the outputs that share memory with others, or with an input.
    """

    index: int
    stage: int
    entries: list[Entry]
    inputs: list[int]
    outputs: list[int]
    origins: list[str] = field(default_factory=list)
    input_metas: list[Meta] = field(default_factory=list)
    output_metas: list[Meta] = field(default_factory=list)
    input_orders: list[Order] = field(default_factory=list)
    output_orders: list[Order] = field(default_factory=list)
    result: Any = None
    held: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    written: set[int] = field(default_factory=set)
    shared: set[int] = field(default_factory=set)


def cut(tape: Tape) -> list[StageTape]:
    """Cut a tape into its stages, one for each hop.

    Raises:
        PlanError: a stage reads nothing that an earlier one made.
        CrossingError: a tensor crosses whose size depends on data.
    """
    last_use, made_by, crossing = _last_uses(tape), origins(tape), _crossing_sizes(tape)
    stages = []
    inputs = [v for v, made in enumerate(tape.made) if made < 0 and v in last_use]
    for hop, stage in enumerate(tape.route):
        entries = [entry for entry in tape.entries if entry.hop == hop]
        is_last = hop == len(tape.route) - 1
        outputs = [v for v, end in sorted(last_use.items()) if tape.made[v] <= hop < end]
        outputs.sort(key=lambda value: made_by[value])
        if is_last:
            outputs = []
        elif not outputs:
            raise PlanError(
                f"expected stages that are a chain, got stage {tape.route[hop + 1]}, which reads "
                f"nothing that stage {stage} or an earlier one made; put the two on one stage"
            )
        entries += [question for question in crossing if question.hop == hop]
        now = StageTape(hop, stage, entries, inputs, outputs)
        now.origins = [made_by[v] for v in inputs]
        given = [tape.metas[hop][v] for v in inputs]
        now.input_metas = [meta.sent() for meta in given] if hop else given
        now.input_orders = [meta.order if hop else None for meta in given]
        made = [tape.metas[hop + 1][v] for v in outputs]
        now.output_metas = [meta.sent() for meta in made]
        now.output_orders = [meta.order for meta in made]
        if is_last:
            now.result = tape.output
        read = [r for entry in entries for r in references((entry.args, entry.kwargs))]
        read += references(now.result)
        now.held = list(dict.fromkeys(r.name for r in read if isinstance(r, Held)))
        now.modules = list(dict.fromkeys(e.module for e in entries if e.module is not None))
        written = {tape.storages[v] for entry in entries for v in entry.writes}
        now.written = {v for v in inputs if tape.storages[v] in written}
        now.shared = _sharing(tape, inputs, outputs)
        _check_crossing(tape, now)
        _check_writes(tape, now)
        stages.append(now)
        inputs = outputs
    return stages


def questions(tape: Tape) -> StageTape | None:
    """Return the calls that answer what the forward asks about its arguments, on any stage, and
    whether what crosses has the sizes that it had.

    They depend on the arguments alone, so that one process can ask before a step. Of what modules
    return they take the shape, and the modules are not called.

    Returns:
        A stage without results; ``None`` if the forward asks nothing.
    """
    needed: set[int] = set()
    entries: list[Entry] = []
    for entry in reversed([*tape.entries, *_crossing_sizes(tape)]):
        made = {value for value in (*entry.results, *entry.writes) if value is not None}
        if entry.answer is None and not made & needed:
            continue
        if entry.module is not None:
            entries = [*_blanks(entry, tape, needed), *entries]
            continue
        entries.insert(0, entry)
        given = references((entry.args, entry.kwargs))
        needed.update(r.index for r in given if isinstance(r, Value))
    if not entries:
        return None
    inputs = [v for v, made in enumerate(tape.made) if made < 0 and v in needed]
    written = {tape.storages[v] for entry in entries for v in entry.writes}
    metas = [tape.metas[0][v] for v in inputs]
    asked = StageTape(0, tape.route[0], entries, inputs, [], input_metas=metas)
    asked.input_orders = [None for _ in inputs]
    asked.written = {v for v in inputs if tape.storages[v] in written}
    return asked


def _blanks(entry: Entry, tape: Tape, needed: set[int]) -> list[Entry]:
    """Return calls that make tensors of the shapes of what a module returns."""
    metas = tape.metas[entry.hop + 1]
    found = []
    for value in entry.results:
        if value is not None and value in needed:
            make = partial(torch.empty, metas[value].shape, dtype=metas[value].dtype)
            found.append(Entry(make, None, (), {}, [value], entry.hop, entry.where))
    return found


def _crossing_sizes(tape: Tape) -> list[Entry]:
    """Return questions for the sizes of what crosses, where they depend on the arguments' data."""
    return [
        size_question(v, torch.Size(tape.metas[made + 1][v].shape), made, tape.sized[v])
        for v, end in sorted(_last_uses(tape).items())
        if v in tape.sized and (made := tape.made[v]) < end
    ]


def _last_uses(tape: Tape) -> dict[int, int]:
    """Return the last hop that uses each value; unused values are left out."""
    found: dict[int, int] = {}
    for entry in tape.entries:
        for reference in references((entry.args, entry.kwargs)):
            if isinstance(reference, Value):
                found[reference.index] = max(entry.hop, found.get(reference.index, 0))
    for reference in references(tape.output):
        if isinstance(reference, Value):
            found[reference.index] = len(tape.route) - 1
    return found


def _sharing(tape: Tape, inputs: list[int], outputs: list[int]) -> set[int]:
    """Return the outputs that share memory with an input or with an earlier output."""
    taken = {tape.storages[v] for v in inputs}
    found = set()
    for value in outputs:
        if tape.storages[value] in taken:
            found.add(value)
        taken.add(tape.storages[value])
    return found


def _check_crossing(tape: Tape, stage: StageTape) -> None:
    for value in stage.outputs:
        where = tape.unsized.get(value)
        if where is not None:
            raise CrossingError(
                f"expected tensors of fixed sizes between stages, got one at {where} whose size "
                f"depends on data, made before stage {stage.stage + 1}; keep it on one stage"
            )


def _check_writes(tape: Tape, stage: StageTape) -> None:
    """Refuse a write to one of two inputs of a stage that had the same memory where they were made,
    if the other one is read afterwards: here each is a tensor of its own."""
    if not stage.index or not any(entry.writes for entry in stage.entries):
        return
    sources = _sources(tape, stage)
    for at, entry in enumerate(stage.entries):
        reading = stage.entries[at + (entry.module is None) :]  # a module may read after it writes
        read = _values([(e.args, e.kwargs) for e in reading]) | _values(stage.result)
        read.update(stage.outputs)
        later = set[int]().union(*(sources.get(value, ()) for value in read))
        for written in entry.writes:
            others = later.difference(sources.get(written, ()))
            if any(_overlap(tape, written, other) for other in others):
                raise CrossingError(
                    f"expected no write to memory that two tensors from an earlier stage have, for "
                    f"each is a copy of its own here, got one at {entry.where} ({entry.name}) on "
                    f"stage {stage.stage}, which reads the other one too; clone() before the write"
                )


def _sources(tape: Tape, stage: StageTape) -> dict[int, set[int]]:
    """Return for each value of a stage the inputs whose memory it has."""
    found = {value: {value} for value in stage.inputs}
    for entry in stage.entries:
        given = _values((entry.args, entry.kwargs)) & found.keys()
        for made in entry.results:
            if made is not None:
                same = (v for v in given if tape.storages[v] == tape.storages[made])
                found[made] = set[int]().union(*(found[v] for v in same))
    return found


def _values(nested: Any) -> set[int]:
    return {r.index for r in references(nested) if isinstance(r, Value)}


def _overlap(tape: Tape, one: int, other: int) -> bool:
    """Whether two values have an element of memory in common."""
    first, second = tape.views[one], tape.views[other]
    if tape.storages[one] != tape.storages[other] or first is None or second is None:
        return False
    ends = _end(first), _end(second)
    if 0 in (*first[1], *second[1]) or ends[0] < second[0] or ends[1] < first[0]:
        return False
    marks = torch.zeros(1 + max(ends), dtype=torch.bool)
    marks.as_strided(first[1], first[2], first[0]).fill_(True)
    return bool(marks.as_strided(second[1], second[2], second[0]).any())


def _end(view: View) -> int:
    offset, shape, strides = view
    return offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
