"""Proof of placement without the devices: a run on fake ones.

The stage sanitizer (``Pipeline(..., isolate=True)``) runs for real on the CPU, and so cannot see a
``torch.zeros(n)`` whose ``device=`` is missing: on the CPU it is right. Fake tensors carry a device
without needing it, and an operation on two devices is an error for them as for real ones.

:func:`split` is here too: the plain loop that a test compares a pipeline with needs the pipeline's
micro-batches.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .batches.microbatch import Microbatch, split
from .recording.fake_run import record_on_fake_devices
from .recording.record import record
from .recording.recording import Recording
from .stages.plan import StagePlan

__all__ = ["Microbatch", "dry_run", "split"]


def dry_run(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: StagePlan | None = None,
    device_type: str = "cuda",
) -> Recording:
    """Run a model's forward on fake devices, one for each stage, to find misplaced tensors.

    It needs no device and no memory, and computes nothing. The model is not changed.

    Args:
        model: a marked model.
        args: the forward's positional arguments, in a tuple; a single tensor may be passed bare.
        kwargs: its keyword arguments.
        plan: stages that override the marks.
        device_type: the type of the fake devices.

    Returns:
        The recording of the run on the fake devices.

    Raises:
        IsolationError: an operation got tensors of two devices: a ``device=`` is missing in the
            forward, or a tensor is no parameter, buffer or argument. The message has the line.
        RecordingError: the model reads values, which fake tensors do not have.

    Example:
        >>> import torch, blockpipe as bp
        >>> from blockpipe.testing import dry_run
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> dry_run(net, torch.zeros(8, 4)).route
        [0, 1]
    """
    planned = record(model, args, kwargs, plan=plan)
    planned.check()
    devices = [torch.device(device_type, i) for i in range(planned.num_stages)]
    return record_on_fake_devices(model, args, kwargs, planned, devices, plan)
