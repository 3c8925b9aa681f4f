"""torchdistpackage's names, for a script whose stages are devices of one process.

In: a list of layers, functions for a forward and a backward, an optimizer. Out: gradients in
``.grad``, losses and outputs, computed by a ``Pipeline``. Read first: ``steps``, then ``ranks``,
with which one process runs every rank. ``docs/how-to/from-torchdistpackage.md`` is for users.
"""

from typing import NoReturn

from ..._common.hints import lacking
from . import dist as dist
from .clipping import clip_grad_norm_
from .layers import NaiveDDP, flatten_model, partition_uniform
from .ranks import launch
from .steps import forward_backward, forward_eval
from .topology import ProcessTopology, is_using_pp, torch_parallel_context, tpc

__all__ = [
    "NaiveDDP",
    "ProcessTopology",
    "clip_grad_norm_",
    "flatten_model",
    "forward_backward",
    "forward_eval",
    "is_using_pp",
    "launch",
    "partition_uniform",
    "torch_parallel_context",
    "tpc",
]

_PROCESSES = "one process needs none: leave it out"
MISSING = {
    "Bf16ZeroOptimizer": "use any optimizer of torch.optim on bfloat16 parameters",
    "create_moe_dp_hooks": _PROCESSES,
    "flat_and_partition": "call partition_uniform(flatten_model(model, names, return_list=True))",
    "flatten_sequence": "call flatten_model(model, names, return_list=True)",
    "fix_rand": "call torch.manual_seed(…)",
    "fix_random_seed": "call torch.manual_seed(…)",
    "moe_dp_iter_step": _PROCESSES,
    "partition_balanced": "call blockpipe.balance(model, sample, stages), which measures",
    "setup_distributed": _PROCESSES,
    "setup_distributed_slurm": _PROCESSES,
    "test_comm": _PROCESSES,
}
"""The names of torchdistpackage that this module lacks, and their replacements."""


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(lacking(__name__, name, MISSING, __all__))
