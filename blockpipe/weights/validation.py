"""Whether a checkpoint fits a model: everything that does not, found before anything changes.

``Module.load_state_dict`` copies what fits and raises afterwards; a model is then half of one
checkpoint and half of another.
"""

import copy
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._common.callsite import users_line
from .._common.modules import paths_around
from .._torch.modules import (
    IncompatibleKeys,
    buffers_of,
    keep_versions,
    parameters_of,
    unsaved_buffers_of,
)
from .._torch.tensors import of_class_of
from ..errors import WeightsError
from ..recording.recording import Recording
from .sources import Header, is_extra, why_unreadable


@dataclass
class StateSlot:
    """A tensor of a model: all the names it goes by, and what a checkpoint has to give it."""

    names: list[str]
    header: Header
    stage: int | None = None
    required: bool = True  # whether a checkpoint without it does not fit
    saved: bool = True  # in a state dict; buffers that are not persistent are not
    expanded: bool = False  # one value at several indices: nothing can be copied into it

    def source_name(self, headers: Mapping[str, Header]) -> str | None:
        """Return the name under which a checkpoint has it; of several the last, as
        ``load_state_dict`` takes it."""
        return next((name for name in reversed(self.names) if name in headers), None)


@dataclass
class StateDictMismatch:
    """The tensors that do not fit, as the lines of a message."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    uncopyable: list[str] = field(default_factory=list)
    hint: str = ""  # one explanation of them all

    def lines(self) -> list[str]:
        """Return all lines of the message."""
        return [
            *(f"missing: {line}" for line in self.missing),
            *(f"unexpected: {line}" for line in self.unexpected),
            *(f"wrong shape: {line}" for line in self.wrong),
            *(f"wrong kind: {line}" for line in self.kinds),
            *(f"cannot be copied: {line}" for line in self.uncopyable),
        ]

    def check(self, what: str, model: nn.Module, remedy: str) -> None:
        """Raise one :class:`WeightsError` for all of them, if there are any."""
        lines = self.lines()
        if lines:
            listed = "\n  ".join(lines)
            raise WeightsError(
                f"expected a checkpoint of {type(model).__name__}, got {what}, which does not fit "
                f"({users_line()}){self.hint}:\n  {listed}\nNothing was changed; {remedy}"
            )


def compare_state_dict(
    slots: Sequence[StateSlot], headers: Mapping[str, Header]
) -> StateDictMismatch:
    """Compare a model's tensors with a checkpoint's, by names, shapes and kinds of numbers."""
    found = StateDictMismatch()
    slot_of = {name: slot for slot in slots for name in slot.names}
    for slot in slots:
        if slot.required and slot.source_name(headers) is None:
            why = "" if slot.saved else ", not persistent: it needs init="
            found.missing.append(f"{_named(slot)}, {slot.header}{why}")
    near = _stages_by_path(slots)
    for name, header in headers.items():
        known = slot_of.get(name)
        if known is None:
            found.unexpected.append(f"{name!r}{_stage(_stage_near(name, near))}, {header}")
        elif header.shape != known.header.shape:
            found.wrong.append(
                f"{name!r}{_stage(known.stage)}: {list(known.header.shape)} in the model, "
                f"{list(header.shape)} in the checkpoint"
            )
        elif _kind(header.dtype) != _kind(known.header.dtype):
            # Quantized weights without their scales would pass for weights.
            found.kinds.append(
                f"{name!r}{_stage(known.stage)}: {known.header} in the model, {header} in the "
                "checkpoint; cast it yourself if it is meant so"
            )
        elif known.expanded:
            found.uncopyable.append(
                f"{name!r}{_stage(known.stage)} is expanded, with one value at several indices; "
                "clone() it in the model"
            )
    if found.unexpected and headers.keys().isdisjoint(slot_of):
        found.hint = _prefix_hint(slot_of.keys(), headers.keys())
    return found


def _prefix_hint(model: Collection[str], checkpoint: Collection[str]) -> str:
    """Return a sentence on a prefix that only one side's names have, as a wrapper leaves it."""
    for longer, shorter, whose in (
        (checkpoint, model, "checkpoint"),
        (model, checkpoint, "model"),
    ):
        first = next(iter(longer), "")
        prefix, *_ = [first[: len(first) - len(n)] for n in shorter if first.endswith(f".{n}")] or [
            ""
        ]
        if prefix and all(name.startswith(prefix) for name in longer):
            return (
                f"; every name of the {whose} begins with {prefix!r}, and none of the other's: "
                "pass a mapping with the names changed"
            )
    return ""


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    return "floating" if dtype.is_floating_point else "integer"  # bool too: masks were uint8 once


def _named(slot: StateSlot) -> str:
    return " = ".join(map(repr, slot.names)) + _stage(slot.stage)


def _stage(stage: int | None) -> str:
    return "" if stage is None else f" (stage {stage})"


def _stages_by_path(slots: Sequence[StateSlot]) -> dict[str, int | None]:
    """Return, by the path of every module, the stage of the first tensor in it."""
    stages: dict[str, int | None] = {}
    for slot in slots:
        for path in paths_around(slot.names[0]):  # a tied one's other names are elsewhere
            stages.setdefault(path, slot.stage)
    return stages


def _stage_near(name: str, stages: Mapping[str, int | None]) -> int | None:
    """Return the stage of the nearest tensors in the tree of names."""
    return next((stages[path] for path in paths_around(name) if path and path in stages), None)


def slots_of(model: nn.Module) -> dict[int, tuple[StateSlot, Tensor]]:
    """Return every parameter and buffer by its ``id``, tied ones once, under all of their names."""
    slots: dict[int, tuple[StateSlot, Tensor]] = {}
    # Duplicates too: a module that is registered twice has two names in a state dict.
    for path, module in model.named_modules(remove_duplicate=False):
        for key, tensor in (*parameters_of(module).items(), *buffers_of(module).items()):
            if tensor is not None:
                slot, _ = slots.setdefault(id(tensor), (_slot_of(tensor, saved=False), tensor))
                slot.names.append(f"{path}.{key}" if path else key)
                slot.saved |= key not in unsaved_buffers_of(module)
    return slots


def _slot_of(tensor: Tensor, stage: int | None = None, saved: bool = True) -> StateSlot:
    expanded = tensor.layout is torch.strided and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    header = Header(tuple(tensor.shape), tensor.dtype)
    return StateSlot([], header, stage, saved=saved, expanded=expanded and not tensor.is_meta)


def stages_of(recording: Recording | None) -> dict[str, int]:
    """Return the stage of a parameter or buffer by each of its names."""
    held = [] if recording is None else [*recording.parameters, *recording.buffers]
    return {name: h.stage for h in held for name in h.names}


# --- load_state_dict


def load_checked(
    model: nn.Module, state: Mapping[str, Any], *, strict: bool, recording: Recording | None
) -> Any:
    """Load a state dict as ``model.load_state_dict`` does, after a check that finds everything that
    does not fit. A tied tensor may come under one of its names alone.

    Raises:
        WeightsError: it does not fit; every misfit is named.
    """
    own = model.state_dict(keep_vars=True)
    if any(is_lazy(value) for value in own.values()):
        return model.load_state_dict(state, strict=strict)  # shapes come with the dictionary
    found, complete = _compared(own, state, strict, recording)
    try:
        found.check("the state dict", model, _REMEDY)
    except WeightsError as error:
        # The model may have its own way with old or renamed keys: does it, on a copy without data?
        refusal = _refusal(model, complete, strict)
        if refusal is not None or found.uncopyable:
            raise error from refusal
    keys = model.load_state_dict(complete, strict=strict)
    return keys if strict else _with_tied(keys, own, state, complete)


def to_be_loaded(
    model: nn.Module, state: Mapping[str, Any], *, strict: bool
) -> tuple[dict[str, Any], Any]:
    """Return what ``load_state_dict`` would put into a model on the meta device, where it can put
    nothing.

    Returns:
        Tensors of the dictionary and extra state under the model's own names; and what torch
        returns, the missing and the unexpected keys.

    Raises:
        WeightsError: it does not fit; every misfit is named.
    """
    own = model.state_dict(keep_vars=True)
    found, complete = _compared(own, state, strict, None)
    if own.keys() == complete.keys() and not found.lines():
        keys, taken = IncompatibleKeys([], []), complete
    else:
        # As above; and what the model's own way makes of the dictionary is in the copy then.
        try:
            keys, taken = _put_into_a_copy(model, complete, strict)
        except Exception as refusal:
            try:
                found.check("the state dict", model, _REMEDY)
            except WeightsError as error:
                raise error from refusal
            raise
    keys = keys if strict else _with_tied(keys, own, state, complete)
    # What has values and is not in the dictionary keeps them.
    kept = {n: v for n, v in own.items() if isinstance(v, Tensor) and not v.is_meta}
    return {**kept, **taken}, keys


def _with_tied(
    keys: Any, own: Iterable[str], state: Mapping[str, Any], complete: Mapping[str, Any]
) -> Any:
    """What ``load_state_dict`` returns, with each name of a tied tensor that came under another
    one: as torch has it, and as ``safetensors.torch.load_model`` expects it."""
    missing = {*keys.missing_keys, *(complete.keys() - state.keys())}
    ordered = [*(name for name in own if name in missing), *keys.missing_keys]
    return IncompatibleKeys(list(dict.fromkeys(ordered)), keys.unexpected_keys)


def _put_into_a_copy(
    model: nn.Module, state: Mapping[str, Any], strict: bool
) -> tuple[Any, dict[str, Any]]:
    given: OrderedDict[str, Any] = OrderedDict(
        (n, v.detach() if isinstance(v, Tensor) else v) for n, v in state.items()
    )
    keep_versions(state, given)
    copied = _skeleton(model)
    keys = copied.load_state_dict(given, strict=strict, assign=True)
    taken = copied.state_dict(keep_vars=True)
    return keys, {n: v for n, v in taken.items() if not (isinstance(v, Tensor) and v.is_meta)}


_REMEDY = "load what was saved from a model of this structure"


def _compared(
    own: Mapping[str, Any], state: Mapping[str, Any], strict: bool, recording: Recording | None
) -> tuple[StateDictMismatch, Mapping[str, Any]]:
    """Compare a state dict with a model's; return what does not fit, and the state dict under all
    names of tied tensors."""
    slots = state_slots(own, recording)
    headers = {
        name: Header(tuple(value.shape), value.dtype)
        for name, value in state.items()
        if isinstance(value, Tensor) and not is_extra(name)
    }
    found = compare_state_dict(slots, headers)
    found.missing += [repr(name) for name in own if is_extra(name) and name not in state]
    found.unexpected += [
        f"{name!r}, a {type(value).__name__}"
        for name, value in state.items()
        if name not in headers and name not in own
    ]
    for name in (name for name in headers if name in own):
        value, into = state[name], own[name]
        why = why_unreadable(value)
        if why and (value.is_meta or _storing(value) != _storing(into)):
            found.uncopyable.append(f"{name!r} is a tensor {why}")
    if not strict:
        found.missing, found.unexpected = [], []
    return found, _completed(state, slots, headers)


def _storing(tensor: Tensor) -> tuple[torch.layout, bool]:
    return tensor.layout, tensor.is_quantized


def state_slots(own: Mapping[str, Any], recording: Recording | None) -> list[StateSlot]:
    """Return the tensors of a model's state dict (with ``keep_vars=True``), tied ones once."""
    stages = stages_of(recording)
    slots: dict[int, StateSlot] = {}
    for name, value in own.items():
        if isinstance(value, Tensor) and not is_extra(name):
            slot = slots.setdefault(id(value), _slot_of(value, stages.get(name)))
            slot.names.append(name)
    return list(slots.values())


def _completed(
    state: Mapping[str, Any], slots: Sequence[StateSlot], headers: Mapping[str, Header]
) -> Mapping[str, Any]:
    """Return the state under all names of tied tensors."""
    ties = {
        name: state[source]
        for slot in slots
        if (source := slot.source_name(headers)) is not None
        for name in slot.names
        if name not in headers
    }
    if not ties:
        return state
    complete: OrderedDict[str, Any] = OrderedDict({**state, **ties})
    keep_versions(state, complete)
    return complete


def _refusal(model: nn.Module, state: Mapping[str, Any], strict: bool) -> Exception | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # to load into a meta tensor does nothing, torch says
            _skeleton(model).load_state_dict(state, strict=strict)
    except Exception as error:
        return error
    return None


def _skeleton(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device: its structure and its hooks, and no data."""
    held = (tensor for _, tensor in slots_of(model).values())
    memo: dict[int, Any] = {id(t): like(t, torch.device("meta")) for t in held}
    return copy.deepcopy(model, memo)


def like(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a parameter or buffer of the same class, attributes and memory format on another
    device, without values."""
    # Outside of inference mode, which a first call may be under: its tensors cannot be trained.
    with torch.inference_mode(False), torch.no_grad():
        data = torch.empty_like(tensor.detach(), device=device)
    made = of_class_of(tensor, data)
    made.__dict__.update(tensor.__dict__)
    return made
