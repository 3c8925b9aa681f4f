"""The methods of a pipeline over processes for its parameters, and for their state."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..._common.callsite import remembers_caller
from ..agreement import Agreement
from ..engines import Engines
from ..rank_failures.failures import Failures
from ..replicas import StageReplicas
from ..stage_values import StageValues
from .files import save_stages
from .homes import ValueHomes, words_of
from .sharded import ShardedState


class StageStateMethods:
    """The part of :class:`DistributedPipeline` that has its values. Its attributes are the
    pipeline's."""

    module: nn.Module
    _agreement: Agreement
    _engines: Engines
    _failures: Failures
    _homes: ValueHomes
    _replicas: StageReplicas | None
    _values: StageValues

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this process's stages, by the names that the model has for
        them."""
        return self._values.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this process's stages: for an optimizer of this process."""
        return self._values.parameters()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this process's stages; ``set_to_none=False`` makes them zeros."""
        self._values.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's state dict, on the CPU, in every process.

        The plain model, a :class:`Pipeline` and a pipeline with another number of stages load it.
        All processes call it together.
        """
        self._take_back()
        with self._failures.told(agreed=True):
            return self._values.gathered()

    def _take_back(self) -> None:
        """Take what another pipeline of the model has trained since; all processes do."""
        with self._failures.told(agreed=True):
            if self._homes.are_elsewhere_for_any():
                self._homes.take(words_of(self.module))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load the tensors of this process's stages from the whole model's state dict.

        Args:
            state_dict: of the plain model, or of a pipeline with any stages. A tied tensor may come
                under one of its names alone.
            strict: as for :meth:`Pipeline.load_state_dict`.

        Returns:
            What torch returns: the missing and the unexpected keys.

        Raises:
            WeightsError: every name and shape that does not fit, with its stage.
        """
        return self._values.load(state_dict, strict=strict)

    def sharded_state(self, optimizer: Optimizer | None = None) -> ShardedState:
        """Return the state of this process's stages for ``torch.distributed.checkpoint``.

        Nothing is gathered: each process writes and reads its own part. The names are the model's,
        so that a checkpoint is loaded by any number of stages, with the same kind of optimizer.

        Args:
            optimizer: of this process's parameters, whose state belongs to it.

        Example:
            >>> import torch.distributed.checkpoint as dcp
            >>> def save(pipe, optimizer, path):  # in every process
            ...     dcp.save({"train": pipe.sharded_state(optimizer)}, checkpoint_id=path)
            >>> def load(pipe, optimizer, path):
            ...     dcp.load({"train": pipe.sharded_state(optimizer)}, checkpoint_id=path)
        """
        self._take_back()
        return ShardedState(self.module, self._values, optimizer)

    @remembers_caller
    def save_weights(
        self, directory: str | os.PathLike[str], *, max_shard_bytes: int = 5 * 1000**3
    ) -> None:
        """Save the whole model's weights as safetensors, as :meth:`Pipeline.save_weights` does.

        All processes call it together; the one of the first stage writes, and has the tensors of
        one file at a time in host memory. Of several replicas the first one does.

        Args:
            directory: where to; made if it is not there.
            max_shard_bytes: of one file, unless a single tensor is larger.

        Raises:
            WeightsError: what safetensors cannot hold.
            RankError: the process that writes has failed.
        """
        self._take_back()
        cut, places = self._engines.first, self._engines.places
        writes = places.is_own(0) and (self._replicas is None or self._replicas.is_first)
        whose = (self.module, cut.recording, self._values, self._agreement)
        save_stages(*whose, directory, max_shard_bytes, writes=writes)
