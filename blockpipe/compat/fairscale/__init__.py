"""fairscale's pipeline by its names: ``fairscale.nn.Pipe``, which is torchgpipe's ``GPipe``.

In: a sequential module and fairscale's arguments. Out: a ``Pipeline`` with fairscale's methods.
Only the names differ from torchgpipe's: everything else is in ``compat/torchgpipe``.
"""

from . import nn as nn

__all__: list[str] = []
