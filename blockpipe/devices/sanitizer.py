"""The stage sanitizer: proof, on one machine, that no operation reads another stage's tensor.

Under ``isolate=True`` every crossing is a real copy and every storage has an owner. A dispatch
mode sees each operation below autograd, in sealed modules and in backward too, and an operation
that touches the storage of another stage is an error: on several devices it would be one.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._common.callsite import users_line
from .._common.nested import tensors
from .._common.threads.thread_state import ours
from .._torch.modes import DispatchMode
from .._torch.tensors import shape_of
from ..errors import IsolationError
from .ownership import NOBODY, Owner, is_copying, owner_of, set_owner


class Sanitizer(DispatchMode):
    """Checks the owners of the tensors that operations read, and sets those of their results.

    Args:
        pipeline: the number of the pipeline in owners.
        microbatch: the index of the micro-batch, for messages.
        stage: the stage that runs now; the run changes it when it crosses.
        phase: "forward" or "backward", for messages.
    """

    def __init__(self, pipeline: int, microbatch: int, stage: int, phase: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pipeline = pipeline
        self.microbatch = microbatch
        self.stage = stage
        self.phase = phase

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with ours():
            return self._checked(func, args, dict(kwargs or {}))

    def _checked(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        if is_copying() or func is torch.ops.aten.detach.default:
            return func(*args, **kwargs)
        for tensor in tensors((args, kwargs)):
            self._check(tensor, func)
        result = func(*args, **kwargs)
        for tensor in tensors(result):
            owner = owner_of(tensor)
            if owner is None or (owner.pipeline != self.pipeline and owner is not NOBODY):
                set_owner(tensor, Owner(self.pipeline, self.stage))
        return result

    def _check(self, tensor: Tensor, func: Callable[..., Any]) -> None:
        owner = owner_of(tensor)
        if owner is None or owner.pipeline != self.pipeline or owner.stage == self.stage:
            return
        raise IsolationError(
            f"{func} in the {self.phase} of micro-batch {self.microbatch} on stage {self.stage} "
            f"touches a tensor of shape {shape_of(tensor)} that stage {owner.stage} owns "
            f"({users_line()}), which fails with one device a stage; pass it as an argument of the "
            "module, or read it in the forward's own code, where Blockpipe sees it"
        )
