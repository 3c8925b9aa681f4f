"""``fairscale.nn.pipe``: ``Pipe``, and whether a forward is recomputed.

In and out: as in ``compat/fairscale``.
``skip`` and ``balance`` are torchgpipe's under fairscale's path.
"""

from ....torchgpipe.microbatch import is_checkpointing, is_recomputing
from .pipe import Pipe

__all__ = ["Pipe", "is_checkpointing", "is_recomputing"]
