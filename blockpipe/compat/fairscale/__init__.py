"""fairscale's pipeline by its names: ``fairscale.nn.Pipe``, which is torchgpipe's ``GPipe``.

In: a sequential module and fairscale's arguments. Out: a ``Pipeline`` with fairscale's methods.
What it has of its own is only the names; read ``compat/torchgpipe`` for the rest.
"""

from . import nn as nn

__all__: list[str] = []
