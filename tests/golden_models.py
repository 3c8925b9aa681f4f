"""Marked models whose summaries are golden files. Lines of this file stand in them."""

from collections.abc import Callable
from typing import Any

from torch import nn

import blockpipe as bp

from .zoo import find, images

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

# By name: family, entry of the zoo (None: torchvision's own, below), and where stages begin.
MARKS: dict[str, tuple[str, str | None, dict[str, int]]] = {
    "resnet50": ("torchvision", None, {"layer3": 1, "layer4": 2}),
    "vit_b_16": (
        "torchvision",
        None,
        {"encoder.layers.encoder_layer_4": 1, "encoder.layers.encoder_layer_8": 2},
    ),
    "convnext_atto": ("timm", "convnext_atto", {"stages.2": 1, "stages.3": 2}),
    "xcit": ("timm", "xcit_nano_12_p16_224", {"blocks.6": 1}),
    "llama_tied": ("huggingface", "llama_tied", {"model.layers.1": 1, "model.layers.3": 2}),
    "t5": ("huggingface", "t5", {"decoder": 1}),
    "bert": ("huggingface", "bert", {"bert.encoder.layer.2": 1}),
}


def _torchvision(name: str) -> tuple[Callable[[], nn.Module], Callable[[], Any]]:
    import torchvision

    build = getattr(torchvision.models, name)
    return (
        (lambda: build(num_classes=10), images(64))
        if name == "resnet50"
        else (lambda: build(image_size=32, num_classes=10), images(32))
    )


def make(name: str) -> Made:
    """A marked model, and the arguments of a micro-batch."""
    family, entry_name, begins = MARKS[name]
    if entry_name is None:
        build, batch = _torchvision(name)
    else:
        entry = find(family, entry_name)
        build, batch = entry.build, entry.batch
    model = bp.begin_blocks(build(), begins)
    args, kwargs = batch()
    if "attention_mask" in kwargs:  # a mask of ones is dropped in a real run, and not in a fake one
        kwargs["attention_mask"][0, 12:] = 0
    return model, args, kwargs
