"""``fairscale.nn``, of which the pipeline is here: ``Pipe``, and the package ``pipe``.

In and out: as in ``compat/fairscale``.
fairscale's other names (FSDP, checkpoint wrappers) are missing: torch itself has them by now.
"""

from .pipe.pipe import Pipe

__all__ = ["Pipe"]
