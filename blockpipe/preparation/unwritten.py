"""What no forward wrote when it was recorded: whether one did after all.

A recording sees one micro-batch. A forward that writes every fifth time, where the data says so or
after a warm-up, is found by the step in which it does. Where several hops read it, the step is
spoilt; else the model has to be recorded anew, for others may read it now
(:meth:`Unwritten.written` says which).
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import Tensor, nn

from .._common.modules import Slots, all_slots
from .._torch.modules import buffers_of, parameters_of
from .._torch.tensors import version_of
from ..errors import StateError
from ..recording.entries import OutsideTensor, TensorInfo
from ..recording.recording import Recording

_Look = Callable[[], Tensor | None]
_State = tuple[Tensor, int, int] | None  # the tensor stays alive: no other one gets its address
States = tuple[list[_State], dict[str, _State]]  # of what several hops read, and of the rest


# The types of nearly everything that a module has in its __dict__. There are thousands of these in
# a large model, and isinstance takes several times as long.
_NO_TENSORS = frozenset([bool, int, float, str, type(None), dict, OrderedDict, list, tuple, set])


class Unwritten:
    """The tensors that the forward of a recording did not write, looked at before and after a step.

    Args:
        model: the user's.
        recording: says what several hops read, and what is written.
        but: names of what later steps were seen to write.
    """

    def __init__(self, model: nn.Module, recording: Recording, but: Collection[str] = ()) -> None:
        held = {n: h for h in (*recording.parameters, *recording.buffers) for n in h.names}
        self._shared: list[tuple[str, TensorInfo | OutsideTensor, _Look]] = []
        self._others: list[tuple[str, _Look]] = []
        self._modules = [(path, vars(module)) for path, module in model.named_modules()]
        self._changing = recording.changing | set(but)
        self._read_on = {name: found.hops for name, found in held.items()}
        self._readers: dict[int, list[int]] = {}  # of tensors that no module has registered, by id
        parameters, buffers = all_slots(model, parameters_of), all_slots(model, buffers_of)
        for name, slots, key, tensor in (*parameters, *buffers):
            found = held.get(name)
            if found is None or found.written:
                continue
            look = partial(_slot, slots, key)
            if len(found.hops) > 1:
                what = "buffer" if found.is_buffer else "parameter"
                self._shared.append((f"{what} {found.name!r}", found, look))
            elif found.is_buffer or not tensor.requires_grad:
                # What has a gradient may be written by an optimizer in the backward.
                self._look_at(name, look)
        on_modules = {id(value) for _, own in self._modules for value in own.values()}
        for index, outside in enumerate(recording.outside):
            value = None if outside.tensor is None else outside.tensor()
            if value is None or outside.tensor is None or outside.written:
                continue
            self._readers[id(value)] = outside.hops
            if len(outside.hops) > 1:
                self._shared.append((outside.name, outside, outside.tensor))
            elif not value.requires_grad and id(value) not in on_modules:
                self._look_at(f"{outside.name} ({outside.where}; {index})", outside.tensor)

    def _look_at(self, name: str, look: _Look) -> None:
        if name not in self._changing:
            self._others.append((name, look))

    def states(self) -> States:
        """Return the present state of all of the tensors."""
        shared = [_state_of(look()) for _, _, look in self._shared]
        others = {name: _state_of(look()) for name, look in self._others}
        for path, own in self._modules:
            if _NO_TENSORS.issuperset(map(type, own.values())):
                continue
            for key, value in own.items():
                if type(value) not in _NO_TENSORS and isinstance(value, Tensor):
                    name = f"{path}.{key}"
                    if name not in self._changing:
                        others[name] = _state_of(value)
        return shared, others

    def written(self, before: States) -> dict[str, list[int]]:
        """Return the names of what was written since and is read by one hop, or by none that is
        known, with that hop. They are not looked at again: the model is recorded anew.

        Raises:
            StateError: something that several hops read was written.
        """
        now = self.states()
        for (what, found, _), one, other in zip(self._shared, before[0], now[0], strict=True):
            if not _is_same(one, other):
                raise StateError(
                    f"{what} was written during the step, which it was not when it was recorded, "
                    f"and is read on hops {found.hops} ({found.where}): micro-batches under way at "
                    "once have mixed in it, and this step's gradients are not the plain loop's; "
                    "write it between steps, read and write it on one hop, or use schedule='uncut'"
                )
        names = sorted(
            name
            for name in now[1].keys() | before[1].keys()
            if not _is_same(now[1].get(name), before[1].get(name))
        )
        self._changing.update(names)
        self._others = [other for other in self._others if other[0] not in self._changing]
        return {name: self._hops_of(name, before[1].get(name)) for name in names}

    def _hops_of(self, name: str, before: _State) -> list[int]:
        if name in self._read_on or before is None:
            return self._read_on.get(name, [])
        return self._readers.get(id(before[0]), [])


def _slot(slots: Slots, key: str) -> Tensor | None:
    return slots[key] if key in slots else None  # noqa: SIM401 - TorchScript's has no other way


def _state_of(tensor: Tensor | None) -> _State:
    """Return which tensor it is, how often it was written to, and where its values are."""
    if tensor is None:
        return None
    where = tensor.data_ptr() if tensor.layout is torch.strided else 0
    return tensor, version_of(tensor), where


def _is_same(one: _State, other: _State) -> bool:
    if one is None or other is None:
        return one is other
    return one[0] is other[0] and one[1:] == other[1:]
