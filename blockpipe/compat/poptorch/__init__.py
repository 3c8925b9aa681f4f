"""PopTorch's names, so that a script for IPUs runs with one import changed.

In: a model with PopTorch's blocks, its ``Options``, an optimizer. Out: a model each call of which
is a whole training step, by ``Pipeline`` and ``Replicas``. Read first: ``executor``, then
``strategies``, which makes stages of blocks. ``docs/how-to/from-poptorch.md`` is the users' page.
"""

from typing import NoReturn

from ..._common.hints import lacking
from ...errors import BlockpipeError as Error
from .blocks import BeginBlock, Block, BlockFunction, recomputationCheckpoint, removeBlocks
from .data import DataLoader
from .executor import PoplarExecutor, inferenceModel, trainingModel
from .losses import identity_loss
from .options import Options, ReductionType
from .outputs import OutputMode
from .strategies import AutoStage, PipelinedExecution, ShardedExecution, Stage

AnchorMode = OutputMode  # as it was called first

__all__ = [
    "AnchorMode",
    "AutoStage",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "DataLoader",
    "Error",
    "Options",
    "OutputMode",
    "PipelinedExecution",
    "PoplarExecutor",
    "ReductionType",
    "ShardedExecution",
    "Stage",
    "identity_loss",
    "inferenceModel",
    "recomputationCheckpoint",
    "removeBlocks",
    "trainingModel",
]

_PHASES = (
    "phases keep weights off the chip between them, which a pipeline does not; use "
    "PipelinedExecution, with trainingModel(…, offload=True) for activations in host memory"
)
MISSING = {
    "AsynchronousDataAccessor": "use torch's DataLoader with num_workers= and pin_memory=True",
    "CTCBeamSearchDecoder": "decode the outputs of a call, by torchaudio for example",
    "CPU": "call the function in the forward: it runs where its tensors are",
    "DataLoaderMode": "loading is asynchronous with DataLoader(…, num_workers=4)",
    "ParallelPhasedExecution": _PHASES,
    "Phase": _PHASES,
    "SerialPhasedExecution": _PHASES,
    "TensorLocationSettings": "call trainingModel(…, offload=True) for activations in host memory",
    "custom_op": "write a torch.autograd.Function, or a torch.library operator",
    "distributed": "every process has its own pipeline; all-reduce gradients between the steps",
    "for_loop": "write a Python loop: it runs as it is",
    "ipuHardwareIsAvailable": "ask torch.accelerator.is_available()",
    "ipuHardwareVersion": "ask torch.accelerator.current_accelerator()",
    "ipu_print_tensor": "call print(): the forward is Python at every step",
    "nop": "leave it out",
    "optim": "use torch.optim: any of its optimizers works",
    "profiling": "use model.pipeline.profile()",
    "serializedMatMul": "call torch.matmul",
    "setLogLevel": "call blockpipe.set_log_level(…)",
    "set_available_memory": "leave it out: a GPU's kernels choose their workspace",
    "set_overlap_for_input": "leave it out: copies overlap with computation",
    "set_overlap_for_output": "leave it out: copies overlap with computation",
}
"""PopTorch's names that this module does not have, and what to use instead."""


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(lacking(__name__, name, MISSING, __all__))
