"""What a pipeline is as a module: its model's state, and no moves.

The keys of a ``state_dict`` are the plain model's, so that checkpoints go both ways; what would
treat the stages as one module on one device (``.to(device)``, ``torch.compile``,
``DistributedDataParallel``) is refused at once.
"""

import sys
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from .errors import UsageError
from .where import users_line


class WrappedModel(nn.Module):
    """A module that holds the user's model as ``module``, and stands for it."""

    module: nn.Module

    @property
    def _initialize_hook(self) -> None:
        # What torch.compile asks a module for first.
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("torch._dynamo"):
            raise AttributeError("_initialize_hook")
        raise UsageError(
            "torch.compile around a pipeline cannot see its stages; pipe.compile() compiles the "
            f"modules inside the stages ({users_line()})"
        )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> None:
        # What DistributedDataParallel asks a module for first; anybody else has no such attribute.
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("torch.nn.parallel"):
            raise AttributeError("_ddp_params_and_buffers_to_ignore")
        raise UsageError(
            "DistributedDataParallel around a pipeline would reduce gradients once for each "
            "micro-batch; all-reduce the gradients after forward_backward instead"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # What `to`, `to_empty`, `cuda` and a module around the pipeline end in.
        probe = fn(torch.empty(0))
        if probe.device.type != "cpu":
            self._refuse_device(probe.device)
        return super()._apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]

    def _refuse_device(self, device: torch.device) -> None:
        raise UsageError(
            f"a pipeline's stages have devices of their own, but .to({str(device)!r}) came; "
            "pass devices=[…] to Pipeline, or call unplace() and move the model "
            f"({users_line()})"
        )

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Dtypes only: ``pipe.to(torch.bfloat16)``.

        Raises:
            UsageError: a device: each stage has its own.
        """
        device, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None:
            self._refuse_device(device)
        return super().to(*args, **kwargs)

    def cuda(self, device: Any = None) -> Self:
        """Refused, as :meth:`to` a device is."""
        return self.to(torch.device("cuda" if device is None else device))

    def cpu(self) -> Self:
        """Refused, as :meth:`to` a device is."""
        return self.to(torch.device("cpu"))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The plain model's, with its keys."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the plain model's."""
        return self.module.load_state_dict(*args, **kwargs)
