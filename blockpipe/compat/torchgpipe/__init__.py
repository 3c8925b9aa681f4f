"""torchgpipe's names: its scripts run here with their imports changed.

In: a sequential module and torchgpipe's arguments. Out: a ``Pipeline`` with torchgpipe's methods.
The submodules ``skip`` and ``balance`` have torchgpipe's names; ``balancing`` stands for
its package ``torchgpipe_balancing``. Read first: ``gpipe.py``.
"""

from .gpipe import BalanceError, GPipe, TooFewDevicesError
from .microbatch import current_microbatch, is_checkpointing, is_recomputing

__all__ = [
    "BalanceError",
    "GPipe",
    "TooFewDevicesError",
    "current_microbatch",
    "is_checkpointing",
    "is_recomputing",
]
