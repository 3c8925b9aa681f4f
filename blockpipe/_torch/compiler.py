"""``torch.compile``, in a program that uses it. To import the compiler takes seconds."""

import sys
from types import ModuleType

CHOOSES = "_callback_from_stance"
"""The compiler's function that chooses what runs a compiled function's code. It is called in the
thread that calls such a function; what is set in public is for all threads."""


def compiler() -> ModuleType | None:
    """Return the compiler's module with that function; ``None``: nobody has imported it."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    return module if hasattr(module, CHOOSES) else None
