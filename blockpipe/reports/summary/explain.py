"""The reasons why a module, a parameter or a buffer is where it is, from its recording.

A summary shows where everything is; the next question is why. The answer is taken from notes that
the recording made at the time. To work the reasons out from the result would be guessing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from ..._common.checks import did_you_mean, expected
from ..._common.modules import is_within
from ..._common.text import bytes_text, one_line, short, stages_text
from ...errors import UsageError

if TYPE_CHECKING:  # a recording can explain itself; that needs only its fields
    from ...recording.calls import Call
    from ...recording.entries import TensorInfo
    from ...recording.recording import Recording

_MOST_LISTED = 6  # of a module's parameters and buffers


def explain(
    recording: Recording,
    path: str,
    *,
    devices: Sequence[object] | None = None,
    checkpoint: str | None = None,
) -> str:
    """Say why a module, or a parameter, is where it is.

    Args:
        recording: the recording.
        path: the path of a module, a parameter or a buffer; ``""`` is the model.
        devices: the stages' devices; ``None`` if they are not known.
        checkpoint: the pipeline's option; ``None`` if it is not known.

    Raises:
        UsageError: nothing has that name.
    """
    info = next((info for info in _infos(recording) if path in info.names), None)
    if info is not None:
        return _about_tensor(recording, info, devices)
    if isinstance(path, str):
        calls = [c for c in recording.calls if path in (c.path, _function_name(c))]
        inside = [info for info in _infos(recording) if _is_inside(info, path)]
        if calls:
            return _about_module(recording, calls, inside, devices, checkpoint)
        if inside:
            lines = [f"{path} is not called itself", *_about_inside(path, inside)]
            return _text(lines)
    known = list(dict.fromkeys(c.path for c in recording.calls))
    names = [*known, *(name for info in _infos(recording) for name in info.names)]
    hint = did_you_mean(str(path), names, otherwise=f"there are {', '.join(known[1:9])}")
    contract = "the name of a module that the forward calls, a parameter or a buffer"
    raise UsageError(expected(contract, path, for_="path", fix=hint))


def _text(lines: Sequence[str]) -> str:
    return "\n  ".join(map(one_line, lines))


def _infos(recording: Recording) -> list[TensorInfo]:
    return [*recording.parameters, *recording.buffers]


def _function_name(call: Call) -> str | None:
    """Return a function's name, which is enough to ask for it; its path has the line too."""
    return call.path.partition(" (")[0] if call.is_function else None


def _is_inside(info: TensorInfo, path: str) -> bool:
    return any(is_within(name, path) for name in info.names)


def _on(stage: int, devices: Sequence[object] | None) -> str:
    return f"stage {stage}" + (f" ({devices[stage]})" if devices is not None else "")


# --- a module


def _about_module(
    recording: Recording,
    calls: list[Call],
    inside: list[TensorInfo],
    devices: Sequence[object] | None,
    checkpoint: str | None,
) -> str:
    path = calls[0].path
    name = f"{path or recording.model} ({calls[0].kind})"
    texts = [_about_call(recording, call, devices, checkpoint) for call in calls]
    if len(calls) == 1:
        lines = [f"{name} {texts[0][0]}", *texts[0][1:]]
    else:
        lines = [f"{name} is called {len(calls)} times"]
        for _, group in groupby(zip(calls, texts, strict=True), key=lambda pair: pair[1]):
            alike = list(group)
            first, last = alike[0][0].call, alike[-1][0].call
            which = f"call {first}" if first == last else f"calls {first} to {last}"
            head, *rest = alike[0][1]
            lines += [f"{which} {head}", *(f"  {line}" for line in rest)]
    return _text([*lines, *_about_inside(path, inside)])


def _about_call(
    recording: Recording,
    call: Call,
    devices: Sequence[object] | None,
    checkpoint: str | None,
) -> list[str]:
    route = recording.route
    stages = list(dict.fromkeys(route[hop] for hop in call.hops)) or [call.stage]
    where = ", ".join(_on(stage, devices) for stage in stages)
    lines = [f"spans {where}" if len(stages) > 1 else f"is on {where}"]
    lines.append(f"stage: {_why_there(recording, call)}")
    if call.parent is not None:
        lines.append(f"called by: {call.parent.path or recording.model}, at {short(call.where)}")
    lines.append(f"sealed: {_whether_sealed(recording, call)}")
    lines += [f"arguments: {text}" for text in _arguments(route, call)]
    lines += [f"crosses into it: {text}" for text in _crosses(recording, call)]
    lines.append(f"recomputed: {_recomputed(recording, call, checkpoint)}")
    return lines


def _why_there(recording: Recording, call: Call) -> str:
    if call.hop is None:
        by = "it begins there" if call.mark is None else f"the mark at {short(call.mark)} is before"
        return f"it computes nothing, and the forward is on stage {call.stage} then ({by})"
    hop = recording.hops[call.hop]
    on_it = (c for c in recording.calls if c.hop == call.hop and c.parent is not None)
    first = next(on_it, call)
    begins = "" if first is call else f"; {first.path} was the first call there"
    if recording.planned:
        at = "" if recording.planned_at is None else f" set at {short(recording.planned_at)}"
        put = f"the plan{at} put the forward on stage {hop.stage}"
    elif hop.where == "the start":
        return f"no mark came before it, and a forward begins on stage {hop.stage}"
    else:
        name = f" {hop.name!r}" if hop.name else ""
        put = f"the mark{name} at {short(hop.where)} put the forward on stage {hop.stage}"
    since = f"{put}{begins}; nothing moved it before this call"
    if call.mark is not None and call.mark != hop.where and not recording.planned:
        since += f" (the mark at {short(call.mark)} is in effect, and is of the same stage)"
    return since


def _sealed_call_of(recording: Recording, call: Call | None) -> Call | None:
    """Return the outermost sealed call that a call is, or is inside of."""
    found = None
    while call is not None:
        sealed = recording.sealed_functions if call.is_function else recording.sealed
        if call.sealed and (call.hop or 0) in sealed.get(call.path, ()):
            found = call
        call = call.parent
    return found


def _whether_sealed(recording: Recording, call: Call) -> str:
    sealed_call = _sealed_call_of(recording, call)
    if sealed_call is call:
        return "yes: it stays on one stage, and all that it reads of others is in its arguments"
    if sealed_call is not None:
        return f"yes, as a part of {sealed_call.path or 'the model'}"
    why = call.opened or "another of its calls, on this stage, is not sealed"
    return f"no, its operations are intercepted: {why}"


def _arguments(route: list[int], call: Call) -> Iterator[str]:
    for source in call.inbound[:_MOST_LISTED]:
        made = source.stage if source.last_hop is None else route[source.last_hop]
        beside = "the same stage" if made == call.stage else f"stage {made}"
        yield f"computed from the result of {source.path}, on {beside}"


def _crosses(recording: Recording, call: Call) -> Iterator[str]:
    into = [c for c in recording.crossings if _is_around(call, c.reader)]
    if not into:
        yield "nothing"
    for crossing in into:
        what = f"{crossing.what}, " if crossing.what else ""
        back = "and its gradient goes back" if crossing.needs_grad else "without a gradient"
        yield (
            f"{what}{crossing.dtype} {list(crossing.shape)} ({bytes_text(crossing.bytes)}) from "
            f"stage {crossing.from_stage} to {crossing.to_stage}, {back} "
            f"(read at {short(crossing.where)})"
        )


def _is_around(call: Call, inner: Call | None) -> bool:
    while inner is not None and inner is not call:
        inner = inner.parent
    return inner is call


def _recomputed(recording: Recording, call: Call, checkpoint: str | None) -> str:
    sealed_call = _sealed_call_of(recording, call)
    if sealed_call is None:
        return "never as a whole: only sealed calls can be recomputed"
    whole = "it" if sealed_call is call else sealed_call.path
    about = recording.recomputable.get(sealed_call.path)
    if about is not None and about.refuses:
        return f"never: {about.refuses}"
    if about is None or not about.pays:
        return f"never: {whole} keeps hardly more than its arguments, so it would save no memory"
    if sealed_call.checkpoint is not None:
        decision = "yes" if sealed_call.checkpoint else "no"
        return f"{decision}: its mark says checkpoint={sealed_call.checkpoint}"
    if checkpoint is None:
        return "where a pipeline's checkpoint= asks for it; its mark does not say"
    return f"{'no' if checkpoint == 'never' else 'yes'}: the pipeline's checkpoint={checkpoint!r}"


# --- parameters and buffers


def _about_inside(path: str, inside: list[TensorInfo]) -> Iterator[str]:
    """Describe a module's parameters and buffers: each if they are few, else by stage.

    Of many, those that no call reads or that are shared are described as well.
    """
    noun = "parameters and buffers"
    if len(inside) > _MOST_LISTED:
        for stage in sorted({info.stage for info in inside}):
            here = [info for info in inside if info.stage == stage]
            size = bytes_text(sum(info.bytes for info in here))
            yield f"{noun}: {len(here)} live on stage {stage}, {size}"
        inside = [i for i in inside if i.hop is None or i.also_read_on or len(i.names) > 1]
    for info in inside[:_MOST_LISTED]:
        own = next(name for name in info.names if is_within(name, path))
        yield f"{own}: on stage {info.stage}, {'; '.join(_reasons(info))}"
    if len(inside) > _MOST_LISTED:
        yield f"… {len(inside) - _MOST_LISTED} more that no call reads, or that are shared"


def _about_tensor(recording: Recording, info: TensorInfo, devices: Sequence[object] | None) -> str:
    kind = "buffer" if info.is_buffer else "parameter" if info.trainable else "frozen parameter"
    about = f"{kind}, {info.dtype} {list(info.shape)}, {bytes_text(info.bytes)}"
    lines = [f"{info.name} ({about}) lives on {_on(info.stage, devices)}", *_reasons(info)]
    if info.hop is not None:
        hop = recording.hops[info.hop]
        if recording.planned:
            lines.append("a plan put the forward there")
        elif hop.where != "the start":
            lines.append(f"the mark at {short(hop.where)} put the forward there")
    return _text(lines)


def _reasons(info: TensorInfo) -> list[str]:
    if info.hop is None:
        reasons = ["no call reads it: it is where its module runs, or else the nearest one around"]
    else:
        reasons = [f"first read there, at {short(info.where)}"]
    if len(info.names) > 1:
        reasons.append(f"tied: {' = '.join(info.names)} are one tensor")
    if info.also_read_on:
        back = ", and its gradient is sent back" if info.trainable and not info.is_buffer else ""
        on = f"stage {stages_text(info.also_read_on)}"
        reasons.append(f"also read on {on}: a copy of the value goes there{back}")
    if info.written:
        reasons.append("the forward writes to it")
    return reasons
