"""segmentation_models_pytorch: every architecture, and other encoders under its U-Net."""

from collections.abc import Callable
from typing import Any

from torch import nn

from .entry import Entry, images

ENCODERS = ["densenet121", "efficientnet-b0", "mit_b0", "mobilenet_v2", "tu-convnext_atto", "vgg11"]


def entries() -> list[Entry]:
    """All of ``smp.MODEL_ARCHITECTURES_MAPPING``, and U-Nets."""
    import segmentation_models_pytorch as smp

    def build(architecture: str, encoder: str, **options: Any) -> Callable[[], nn.Module]:
        return lambda: smp.create_model(
            architecture, encoder, encoder_weights=None, classes=3, **options
        )

    found = []
    for name in smp.MODEL_ARCHITECTURES_MAPPING:
        encoder, size, options = "resnet18", 64, {}
        if name == "dpt":  # only on vision transformers
            encoder, size = "tu-vit_tiny_patch16_224", 224
            options = {"dynamic_img_size": True}
        if name == "pan":  # pools by 8 what the encoder has divided by 16
            size = 128
        found.append(Entry(name, build(name, encoder, **options), images(size, 4)))
    for encoder in ENCODERS:
        found.append(Entry(f"unet, {encoder}", build("unet", encoder), images(64, 4)))
    scse: dict[str, Any] = {
        "decoder_attention_type": "scse",
        "aux_params": {"classes": 4, "dropout": None},
    }
    found.append(
        Entry("unet, scse and a classifier", build("unet", "resnet18", **scse), images(64, 4))
    )
    return found
