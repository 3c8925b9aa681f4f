"""A model's stages in processes of their own, on ``torch.distributed.pipelining``.

In: a marked model and a sample. Out: stages for torch's engine, and ``DistributedPipeline``, which
has the calls of ``Pipeline``. Read ``build.py`` first: it records (``recording``), tapes what the
code between modules does (``taping``), cuts the tape (``cutting.py``) and makes modules of the
pieces (``replay.py``). Then read ``distributed_pipeline.py`` and ``step.py``; ``rank_failures`` is
for the case that a process fails.
"""

from .build import build_stage
from .data_parallel.replicated import ReplicatedPipeline
from .distributed_pipeline import DistributedPipeline
from .engine import build_schedule, make_stage

__all__ = [
    "DistributedPipeline",
    "ReplicatedPipeline",
    "build_schedule",
    "build_stage",
    "make_stage",
]
