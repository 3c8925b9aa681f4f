"""``torch.compile``, in a program that uses it. To import the compiler takes seconds."""

import sys
from types import FrameType, ModuleType

CHOOSES = "_callback_from_stance"
"""The compiler's function that chooses what runs a compiled function's code. It is called in the
thread that calls such a function; what is set in public is for all threads."""


def compiler() -> ModuleType | None:
    """Return the compiler's module with that function; ``None``: nobody has imported it."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    return module if hasattr(module, CHOOSES) else None


def is_compilers(frame: FrameType) -> bool:
    """Return whether a function is the compiler's, and not one that only switches it off."""
    module = frame.f_globals.get("__name__") or ""
    is_off = frame.f_code.co_qualname.startswith("DisableContext.")
    return module.startswith("torch._dynamo") and not is_off
