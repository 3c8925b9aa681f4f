"""What no forward wrote when it was recorded: whether one did after all.

A recording sees one micro-batch. A forward that writes every fifth time, where the data says so or
after a warm-up, is found by the step in which it does. Where several hops read it, the step is
spoilt; else the model has to be recorded anew, for others may read it now
(:meth:`Unwritten.written` says which).
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.modules import buffers_of, parameters_of
from .._torch.tensors import version_of
from ..errors import StateError
from ..recording.recording import Recording, TensorInfo

_Slots = dict[str, Any]
_State = tuple[Tensor, int, int] | None  # the tensor stays alive: no other one gets its address
States = tuple[list[_State], dict[str, _State]]  # of what several hops read, and of the rest


class Unwritten:
    """What the forward of a recording did not write, looked at before and after a step.

    Args:
        model: the user's.
        recording: says what several hops read, and what is written.
        but: names of what later steps were seen to write.
    """

    def __init__(self, model: nn.Module, recording: Recording, but: Collection[str] = ()) -> None:
        held = {n: h for h in (*recording.parameters, *recording.buffers) for n in h.names}
        self._shared: list[tuple[TensorInfo, _Slots, str]] = []
        self._others: list[tuple[str, _Slots, str]] = []
        self._modules = [(path, vars(module)) for path, module in model.named_modules()]
        self._changing = recording.changing | set(but)
        for name, slots, key, tensor in _named(model):
            found = held.get(name)
            if found is None or found.written:
                continue
            if len(found.hops) > 1:
                self._shared.append((found, slots, key))
            elif name not in self._changing and (found.is_buffer or not tensor.requires_grad):
                # What has a gradient may be written by an optimizer in the backward.
                self._others.append((name, slots, key))

    def states(self) -> States:
        """How all of it is now."""
        shared = [_state_of(slots.get(key)) for _, slots, key in self._shared]
        others = {name: _state_of(slots.get(key)) for name, slots, key in self._others}
        for path, own in self._modules:
            for key, value in own.items():
                if isinstance(value, Tensor):
                    name = f"{path}.{key}"
                    if name not in self._changing:
                        others[name] = _state_of(value)
        return shared, others

    def written(self, before: States) -> list[str]:
        """The names of what was written since, and one hop reads, or none that is known. They are
        not looked at again: the model is recorded anew.

        Raises:
            StateError: something that several hops read was written.
        """
        now = self.states()
        for (held, _, _), one, other in zip(self._shared, before[0], now[0], strict=True):
            if not _is_same(one, other):
                what = "buffer" if held.is_buffer else "parameter"
                raise StateError(
                    f"{what} {held.name!r} was written during the step, which it was not when it "
                    f"was recorded, and is read on hops {held.hops} ({held.where}): micro-batches "
                    "under way at once have mixed in it, and this step's gradients are not the "
                    "plain loop's; write it between steps, read and write it on one hop, or use "
                    "schedule='uncut'"
                )
        names = sorted(
            name
            for name in now[1].keys() | before[1].keys()
            if not _is_same(now[1].get(name), before[1].get(name))
        )
        self._changing.update(names)
        self._others = [other for other in self._others if other[0] not in self._changing]
        return names


def _named(model: nn.Module) -> Iterator[tuple[str, _Slots, str, Tensor]]:
    for path, module in model.named_modules():
        for slots in (parameters_of(module), buffers_of(module)):
            for key, tensor in slots.items():
                if tensor is not None:
                    yield (f"{path}.{key}" if path else key), slots, key, tensor


def _state_of(tensor: Tensor | None) -> _State:
    """Which tensor it is, how often it was written to, and where its values are."""
    if tensor is None:
        return None
    where = tensor.data_ptr() if tensor.layout is torch.strided else 0
    return tensor, version_of(tensor), where


def _is_same(one: _State, other: _State) -> bool:
    if one is None or other is None:
        return one is other
    return one[0] is other[0] and one[1:] == other[1:]
