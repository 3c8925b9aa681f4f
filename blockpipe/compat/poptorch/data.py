"""PopTorch's ``DataLoader``: torch's loader with batches for a whole call of the model."""

from typing import Any

from torch.utils import data

from ..._common.callsite import warn
from .options import Options


class DataLoader(data.DataLoader[Any]):
    """torch's loader, with batches as large as a call of the model takes.

    Args:
        options: the model's options.
        dataset: as for torch's loader.
        batch_size: the samples of one micro-batch. The number of micro-batches in a batch is the
            product of ``deviceIterations``, ``replicationFactor`` and ``gradientAccumulation``.
            ``None`` if the dataset gives whole batches.
        shuffle: as for torch's loader.
        num_workers: as for torch's loader.
        drop_last: as for torch's loader, but true by default. The model takes a smaller last batch
            too.
        persistent_workers: as for torch's loader; ``None`` is true if there are workers.
        **kwargs: other arguments of torch's loader. PopTorch's own (``mode``, ``async_options``,
            ``auto_distributed_partitioning``, ``rebatched_worker_size``) are accepted with a
            warning.

    Source: ``poptorch.DataLoader``.

    Example:
        >>> from blockpipe.compat import poptorch
        >>> opts = poptorch.Options().replicationFactor(2)
        >>> poptorch.DataLoader(opts, range(40), batch_size=4).combinedBatchSize
        8
    """

    def __init__(
        self,
        options: Options,
        dataset: data.Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool = False,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: bool | None = None,
        **kwargs: Any,
    ) -> None:
        for name in _IPUS & kwargs.keys():
            warn(f"DataLoader({name}=…) does nothing here: workers load ahead with num_workers=")
            del kwargs[name]
        self.options = options
        self.combinedBatchSize = (
            None if batch_size is None else batch_size * options.chunks * options.device_iterations
        )
        is_iterable = isinstance(dataset, data.IterableDataset)
        super().__init__(
            dataset,
            batch_size=self.combinedBatchSize,
            shuffle=None if is_iterable else shuffle,
            num_workers=num_workers,
            drop_last=drop_last and batch_size is not None,
            persistent_workers=(
                num_workers > 0 if persistent_workers is None else persistent_workers
            ),
            **kwargs,
        )


_IPUS = {"mode", "async_options", "auto_distributed_partitioning", "rebatched_worker_size"}
