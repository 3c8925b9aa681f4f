"""torchgpipe's names, as translations: change the import, and its scripts run here.

In: a sequential module and torchgpipe's arguments. Out: a ``Pipeline`` with torchgpipe's methods.
Its submodules have the names of torchgpipe's: ``skip``, ``balance``; ``balancing`` stands for the
package ``torchgpipe_balancing``. Read first: ``gpipe.py``.
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
