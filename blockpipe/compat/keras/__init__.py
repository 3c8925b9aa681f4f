"""IPU Keras' names: scopes that put layers on stages, and stages as data on a model.

In: a model of PyTorch's, a sample where the forward has to be known. Out: marks, or an assignment
that the model keeps; a ``Pipeline`` of the model follows both. Read first: ``scopes``, then
``assignment``. ``docs/how-to/from-keras.md`` is the users' page.
"""

from typing import NoReturn

from ..._common.hints import lacking
from .assignment import (
    get_pipeline_stage_assignment,
    reset_pipeline_stage_assignment,
    set_pipeline_stage_assignment,
)
from .options import pipelining_options
from .scopes import PipelineStage
from .table import print_pipeline_stage_assignment_summary

__all__ = [
    "PipelineStage",
    "get_pipeline_stage_assignment",
    "pipelining_options",
    "print_pipeline_stage_assignment_summary",
    "reset_pipeline_stage_assignment",
    "set_pipeline_stage_assignment",
]

_ENTRY = "get_pipeline_stage_assignment(model, sample) makes the entries: blockpipe.Assignment"
MISSING = {
    "FunctionalLayerPipelineStageAssignment": _ENTRY,
    "ModelLayerPipelineStageAssignment": _ENTRY,
    "NestedModelPipelineStageAssignment": _ENTRY,
    "SequentialLayerPipelineStageAssignment": _ENTRY,
    "IPUConfig": "pass Pipeline(…, devices=[…])",
    "IPUStrategy": "leave its scope out, and pass Pipeline(model, devices=[…])",
    "Model": "the model is PyTorch's: derive it from torch.nn.Module",
    "Sequential": "the model is PyTorch's: torch.nn.Sequential",
    "layers": "layers are PyTorch's: torch.nn",
    "set_gradient_accumulation_options": "pass Pipeline(…, chunks=n)",
    "set_infeed_queue_options": "use torch's DataLoader with num_workers= and pin_memory=True",
    "set_outfeed_queue_options": "results stay on the device of the last stage until they are read",
    "set_pipelining_options": "pass Pipeline(model, **pipelining_options(…))",
}
"""The names of IPU Keras that this module lacks, and their replacements."""


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(lacking(__name__, name, MISSING, __all__))
