"""Several processes: what they share beside the tensors that they send each other."""

from collections.abc import Callable
from typing import Any

from torch.distributed import distributed_c10d

shared_store: Callable[[], Any] = distributed_c10d._get_default_store
"""The store by which torch's processes found each other: texts under keys. A failure is told there,
for whoever waits for a tensor hears nothing else; a store of our own would need an address."""
