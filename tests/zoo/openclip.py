"""open_clip: its towers for images and texts, of each kind, and CoCa."""

from collections.abc import Callable
from typing import Any

from torch import nn

from .entry import Batch, Entry, draw, draw_tokens

_IMAGES: dict[str, Any] = {
    "image_size": 32,
    "layers": 3,
    "width": 32,
    "head_width": 8,
    "patch_size": 8,
}
_TEXTS: dict[str, Any] = {
    "context_length": 16,
    "vocab_size": 99,
    "width": 32,
    "heads": 4,
    "layers": 3,
}
# By name: the class, what differs in its image tower, in its text tower, and in itself.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "clip": ("CLIP", {}, {}, {}),
    "clip, named outputs": ("CLIP", {}, {}, {"output_dict": True}),
    "clip, resnet": ("CLIP", {"layers": (1, 1, 1, 1)}, {}, {"quick_gelu": True}),
    "clip, timm": ("CLIP", {"timm_model_name": "convnext_atto"}, {}, {}),
    "siglip": (
        "CustomTextCLIP",
        {"pool_type": "avg", "ls_init_value": 0.1},
        {"pool_type": "last", "no_causal_mask": True, "proj_bias": True},
        {"init_logit_bias": -10.0},
    ),
    "attentional pooling": (
        "CustomTextCLIP",
        {"attentional_pool": True, "attn_pooler_queries": 4, "attn_pooler_heads": 4},
        {"embed_cls": True},
        {},
    ),
    "scaled attention": (
        "CLIP",
        {"block_type": "custom", "qk_norm": True, "scale_fc": True},
        {},
        {},
    ),
    "coca": (
        "CoCa",
        {
            "attentional_pool": True,
            "attn_pooler_queries": 5,
            "attn_pooler_heads": 4,
            "output_tokens": True,
        },
        {"embed_cls": True, "output_tokens": True},
        {
            "multimodal_cfg": {
                "context_length": 16,
                "vocab_size": 99,
                "width": 32,
                "heads": 4,
                "layers": 3,
                "dim_head": 8,
            }
        },
    ),
}


def _batch() -> Batch:
    return (draw(4, 3, 32, 32), draw_tokens(99, 4, 16)), {}


def entries() -> list[Entry]:
    """Each of :data:`MODELS`."""
    import open_clip

    def build(name: str) -> Callable[[], nn.Module]:
        kind, seen, read, own = MODELS[name]

        def make() -> nn.Module:
            # As open_clip's own factory passes them: dictionaries that the model takes apart.
            return getattr(open_clip, kind)(
                embed_dim=32, vision_cfg={**_IMAGES, **seen}, text_cfg={**_TEXTS, **read}, **own
            )

        return make

    return [Entry(name, build(name), _batch) for name in MODELS]
