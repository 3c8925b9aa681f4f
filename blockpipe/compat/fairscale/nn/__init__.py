"""``fairscale.nn``, of which the pipeline is here: ``Pipe``, and the package ``pipe``.

In and out: as in ``compat/fairscale``.
What else fairscale has there (FSDP, checkpoint wrappers) torch itself has by now.
"""

from .pipe.pipe import Pipe

__all__ = ["Pipe"]
