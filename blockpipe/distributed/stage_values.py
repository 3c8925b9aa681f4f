"""The parameters and buffers of a process's stages, and the state dict of all stages together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._common.callsite import users_line
from .._common.checks import expected
from ..errors import UsageError, WeightsError
from .build import CutForward
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
        self._device = cut.device
        self._places = places
        self._stages = [cut.module(stage) for stage in places.own]
        every = range(len(cut.stages))
        self._names = [list(cut.module(stage).state_dict(keep_vars=True)) for stage in every]
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

    def buffers(self) -> Iterator[Tensor]:
        """Yield the buffers."""
        return (buffer for stage in self._stages for buffer in stage.buffers())

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget the gradients."""
        for stage in self._stages:
            stage.zero_grad(set_to_none)

    @torch.no_grad()
    def gathered(self) -> dict[str, Tensor]:
        """Return the whole model's state dict, on the CPU, in every process."""
        own = {}
        for stage in self._stages:
            own.update(stage.state_dict())
        found = {}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            home = next((k for k, names in enumerate(self._names) if name in names), None)
            if home is None or not isinstance(tensor, Tensor):
                found[name] = tensor.detach().cpu() if isinstance(tensor, Tensor) else tensor
                continue
            is_home = self._places.is_own(home)
            value = own[name].detach() if is_home else torch.empty_like(tensor, device=self._device)
            value = value.contiguous()
            self._places.broadcast(value, home)
            found[name] = value.to("cpu", copy=True)
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Load this process's part of the whole model's state dict.

        Raises:
            WeightsError: names are missing, or there are others.
        """
        expected_names = self._model.state_dict(keep_vars=True).keys()
        differing = sorted(expected_names ^ state.keys())
        if differing:
            raise WeightsError(
                f"expected the names of {type(self._model).__name__}, got others: "
                f"{differing[:5]} ({users_line()}); pass a state_dict() of this model"
            )
        for stage in self._stages:
            for name, tensor in stage.state_dict(keep_vars=True).items():
                if isinstance(tensor, Tensor):
                    tensor.copy_(state[name])

    def _first_name(self, parameter: Tensor, name: str) -> str:
        names = (n for n, p in self._model.named_parameters() if p is parameter)
        return next(names, name)
