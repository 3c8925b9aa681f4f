"""The parameters and buffers of a process's stages, and the state dict of all stages together."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._common.checks import expected
from .._common.nested import map_tensors
from ..errors import UsageError
from ..weights.sources import is_extra
from ..weights.validation import load_checked
from .build import CutForward
from .microbatches.loss_watch import LossWatch
from .stage_places import StagePlaces


class StageValues:
    """The values of the stages that are in this process, which are moved to its device.

    Args:
        cut: a forward of the model.
        places: the ranks of its stages.

    Raises:
        UsageError: a parameter has no values.
    """

    def __init__(self, cut: CutForward, places: StagePlaces) -> None:
        for stage in places.own:
            cut.place(stage)
        self._model = cut.model
        self._recording = cut.recording
        self._device = cut.device
        self._places = places
        self._stages = [cut.module(stage) for stage in places.own]
        every = range(len(cut.stages))
        self._names = [_names_of(cut.module(stage)) for stage in every]
        empty = [name for name, p in self.named_parameters() if p.is_meta]
        if empty:
            raise UsageError(
                expected(
                    "parameters with values",
                    empty[0],
                    for_="this process's stages",
                    fix="pass weights=… or init=…",
                )
            )

    @functools.cached_property
    def loss_watch(self) -> LossWatch:
        """What refuses losses that read what is not in this process."""
        own = (*self.parameters(), *self.buffers())
        here = {id(module) for stage in self._stages for module in stage.called()}
        kept = {place for stage in self._stages for place in stage.keeps()}
        sets = (name.rpartition(".") for name in self._recording.changing)
        found = ((self._model.get_submodule(path), path, name) for path, _, name in sets)
        left = (
            (module, path, name)
            for module, path, name in found
            if id(module) not in here and (id(module), name) not in kept
        )
        is_alone = len(self._stages) == len(self._places.ranks)
        return LossWatch(self._model, own, left, is_alone=is_alone)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by the names that the model has for them."""
        seen: set[int] = set()
        for stage in self._stages:
            for name, parameter in stage.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield self._first_name(parameter, name), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters."""
        return (parameter for _, parameter in self.named_parameters())

    def trained_by_stages(self) -> dict[tuple[int, ...], list[Tensor]]:
        """Return the parameters that are trained, by the stages of this process that read them."""
        stages: dict[int, list[int]] = {}
        for stage in self._stages:
            for parameter in stage.parameters():
                stages.setdefault(id(parameter), []).append(stage.index)
        found: dict[tuple[int, ...], list[Tensor]] = {}
        for parameter in self.parameters():
            if parameter.requires_grad:
                found.setdefault(tuple(stages[id(parameter)]), []).append(parameter)
        return found

    def buffers(self) -> Iterator[Tensor]:
        """Yield the buffers."""
        return (buffer for stage in self._stages for buffer in stage.buffers())

    def paths(self) -> set[str]:
        """Return the paths of the modules that these stages call."""
        called = {id(module) for stage in self._stages for module in stage.called()}
        return {path for path, module in self._model.named_modules() if id(module) in called}

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget the gradients."""
        for stage in self._stages:
            stage.zero_grad(set_to_none)

    def own(self) -> dict[str, Any]:
        """Return the state dict of this process's stages; the tensors are its own."""
        found: dict[str, Any] = {}
        for stage in self._stages:
            found.update(stage.state_dict())
        return found

    @torch.no_grad()
    def load_own(self, state: Mapping[str, Any]) -> None:
        """Load the state dict of this process's stages."""
        for name, value in self.own().items():
            if is_extra(name):
                path = name.rpartition(".")[0]
                self._model.get_submodule(path).set_extra_state(state[name])
            elif isinstance(value, Tensor) and value is not state[name]:
                value.copy_(state[name])

    def gathered(self) -> dict[str, Any]:
        """Return the whole model's state dict, on the CPU, in every process."""
        state = self._model.state_dict(keep_vars=True)
        names = self._from_all(frozenset(state))
        common = names[0].intersection(*names)
        found = {
            name: self._gathered_extra(name, value)
            if is_extra(name) or not isinstance(value, Tensor)
            else self.gathered_one(name, value)
            for name, value in state.items()
            if name in common
        }
        if any(common != every for every in names):  # a forward has registered a buffer
            late = {name: value for name, value in self.own().items() if name not in common}
            for other in self._from_all(map_tensors(lambda t: t.detach().cpu(), late)):
                found.update(other)
        return found

    def _from_all(self, value: Any) -> list[Any]:
        """Return the objects of all processes."""
        found: list[Any] = [None] * dist.get_world_size(self._places.group)
        dist.all_gather_object(found, value, group=self._places.group)
        return found

    def _gathered_extra(self, name: str, value: Any) -> Any:
        """Return what a module's ``get_extra_state`` gives where its stage is."""
        home = self._home(name)
        own = map_tensors(lambda tensor: tensor.detach().cpu(), value)
        return own if home is None else self._places.shared(own, home)

    def _home(self, name: str) -> int | None:
        """The first stage that has a value, by its name; ``None``: no stage does."""
        return next((stage for stage, names in enumerate(self._names) if name in names), None)

    @torch.no_grad()
    def gathered_one(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor of the model's state dict, on the CPU, in every process.

        Args:
            name: in the state dict.
            tensor: the model's, which has its shape.
        """
        home = self._home(name)
        if home is None:
            return tensor.detach().cpu()
        if self._places.is_own(home):
            value = tensor.detach().contiguous()
        else:
            value = torch.empty_like(
                tensor, device=self._device, memory_format=torch.contiguous_format
            )
        self._places.broadcast(value, home)
        return value.to("cpu", copy=True)

    def gathered_gradient(self, name: str, parameter: Tensor) -> Tensor | None:
        """Return a parameter's gradient, on the CPU, in every process.

        Args:
            name: of the parameter.
            parameter: the model's.
        """
        home = self._home(name)
        if home is None:
            return None
        is_own = self._places.is_own(home)
        gradient = parameter.grad if is_own else None
        has_one = torch.tensor([gradient is not None], dtype=torch.int32, device=self._device)
        self._places.broadcast(has_one, home)
        if not has_one.item():
            return None
        if gradient is None:
            gradient = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
        gradient = gradient.contiguous()
        self._places.broadcast(gradient, home)
        return gradient.to("cpu", copy=True)

    def load(self, state: Mapping[str, Any], *, strict: bool) -> Any:
        """Load this process's part of the whole model's state dict, once all of it is checked.

        Raises:
            WeightsError: it does not fit.
        """
        with warnings.catch_warnings():
            # Other stages' tensors may be on the meta device, which takes no values, torch says.
            warnings.simplefilter("ignore")
            return load_checked(self._model, state, strict=strict, recording=self._recording)

    def _first_name(self, parameter: Tensor, name: str) -> str:
        names = (n for n, p in self._model.named_parameters() if p is parameter)
        return next(names, name)


def _names_of(stage: nn.Module) -> set[str]:
    """All names of a stage's parameters and buffers, and what else is in its state dict."""
    parameters = stage.named_parameters(remove_duplicate=False)
    buffers = stage.named_buffers(remove_duplicate=False)
    return {*stage.state_dict(keep_vars=True), *(name for name, _ in (*parameters, *buffers))}
