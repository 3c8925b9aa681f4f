"""Real models in small random configurations, a file for each library.

What comes out is :data:`FAMILIES`: a function for each family that lists its entries. It imports the
family's library, builds nothing, and raises ``ImportError`` where the library is not installed. Read
``entry.py`` first.
"""

from collections.abc import Callable

from . import diffusers, huggingface, openclip, peft, pooling, smp, timm, torchvision
from .entry import Entry, images

__all__ = ["FAMILIES", "LIBRARIES", "Entry", "find", "images"]

FAMILIES: dict[str, Callable[[], list[Entry]]] = {
    "torchvision": torchvision.entries,
    "torchvision-dense": torchvision.dense_entries,
    "timm": timm.entries,
    "huggingface": huggingface.entries,
    "pooling": pooling.entries,
    "peft": peft.entries,
    "diffusers": diffusers.entries,
    "smp": smp.entries,
    "openclip": openclip.entries,
}
# The distributions whose versions a table names.
LIBRARIES = {
    "torchvision": ["torch", "torchvision"],
    "torchvision-dense": ["torch", "torchvision"],
    "timm": ["torch", "timm"],
    "huggingface": ["torch", "transformers"],
    "pooling": ["torch", "transformers"],
    "peft": ["torch", "transformers", "peft"],
    "diffusers": ["torch", "diffusers"],
    "smp": ["torch", "segmentation-models-pytorch", "timm"],
    "openclip": ["torch", "open-clip-torch", "timm"],
}


def find(family: str, name: str) -> Entry:
    """The entry of that name."""
    (entry,) = [e for e in FAMILIES[family]() if e.name == name]
    return entry
