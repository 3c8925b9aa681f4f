"""The weights of all stages in one directory of safetensors, which one process writes.

Each process could write a file of its own, but on several machines these would lie on several
disks. So the tensors go to the first process, and no more than one file's at a time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch import Tensor, nn

from ...errors import RankError
from ...recording.recording import Recording
from ...weights.save import shards_of, write_shards
from ...weights.validation import stages_of
from ..agreement import Agreement, Kind
from ..stage_values import StageValues


def save_stages(
    model: nn.Module,
    recording: Recording,
    values: StageValues,
    agreement: Agreement,
    directory: str | os.PathLike[str],
    max_bytes: int,
    *,
    writes: bool,
) -> None:
    """Write the weights of all stages, in one process; the others send theirs.

    Args:
        model: whose.
        recording: of its forward.
        values: of this process's stages.
        agreement: of the processes of all replicas.
        directory: where to, as the process that writes names it.
        max_bytes: of one file.
        writes: whether this process is the one that writes.

    Raises:
        RankError: another process has failed.
    """
    shards = shards_of(model, stages_of(recording), max_bytes, has_values=False)

    def gathered(shard: Mapping[str, Tensor]) -> dict[str, Tensor]:
        agreement.check(Kind({"call": "writes a file of weights"}))
        return {name: values.gathered_one(name, tensor) for name, tensor in shard.items()}

    try:
        if writes:
            write_shards(directory, shards, gathered)
        else:
            for shard in shards:
                gathered(shard)
    except RankError:  # all have heard of it
        raise
    except Exception as error:
        agreement.check(Kind(), failure=error)
    agreement.check(Kind({"call": "has written the weights"}))
