"""Find what a recorded forward returns, and whether it writes to that again."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ...._common.nested import tensors
from ...._common.text import dtype_text
from ...._torch.tensors import shape_of
from ....batches.losses import own_loss_or_none
from ...entries import Output
from ..recorder import Recorder


def outputs_of(output: Any, given: Container[int]) -> Iterator[Output]:
    """Yield the tensors that a forward returns, with the key or position that leads to each."""
    loss = own_loss_or_none(output)
    named: Iterable[tuple[Any, Any]] = [("the output", output)]
    if isinstance(output, Mapping):
        named = ((f"output {key!r}", value) for key, value in output.items())
    elif isinstance(output, tuple | list):
        named = ((f"output {index}", value) for index, value in enumerate(output))
    for name, value in named:
        for tensor in tensors(value):
            shape, dtype = shape_of(tensor), dtype_text(tensor.dtype)
            yield Output(name, shape, dtype, tensor is loss, id(tensor) in given)


def lasting_behind(output: Any, recorder: Recorder) -> Iterator[Tensor]:
    """Yield the tensors that outlive the forward and whose memory its output has."""
    for tensor in tensors(output):
        yield from recorder.late.memory.behind(recorder.run.newest(tensor))


def is_written(tensor: Tensor, recorder: Recorder) -> bool:
    """Return whether the forward writes to a tensor that outlives it."""
    held = recorder.held.get(id(tensor))
    return recorder.outside_tensors.is_written(tensor) if held is None else held.written
