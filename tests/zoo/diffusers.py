"""diffusers: U-Nets, ControlNets, autoencoders and diffusion transformers, with tiny configurations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .entry import Entry, draw, named, without_zeros

_BLOCKS: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
}
_CONDITIONED: dict[str, Any] = {
    **_BLOCKS,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
}
_UPWARD = {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
_AUTOENCODER: dict[str, Any] = {
    **_BLOCKS,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 4}
_JOINT: dict[str, Any] = {**_HEADS, "joint_attention_dim": 16, "pooled_projection_dim": 16}
_SD3: dict[str, Any] = {
    **_JOINT,
    "sample_size": 8,
    "in_channels": 4,
    "caption_projection_dim": 32,
    "pos_embed_max_size": 8,
}
_FLUX: dict[str, Any] = {
    **_JOINT,
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 2,
    "axes_dims_rope": (2, 2, 4),
}
_UPSAMPLED: dict[str, Any] = {
    "encoder_block_out_channels": (8, 8),
    "decoder_block_out_channels": (8, 8),
}
_LATENTS, _TEXTS, _TIMES = (4, 4, 8, 8), (4, 6, 16), (4,)
_U_NET = {"sample": _LATENTS, "timestep": _TIMES, "encoder_hidden_states": _TEXTS}
_TRANSFORMER = {"hidden_states": _LATENTS, "timestep": _TIMES, "encoder_hidden_states": _TEXTS}
_PACKED = {  # as Flux packs its latents
    "hidden_states": (4, 9, 4),
    "timestep": _TIMES,
    "encoder_hidden_states": _TEXTS,
    "pooled_projections": (4, 16),
    "img_ids": (9, 3),
    "txt_ids": (6, 3),
}
_PIXELS = {"sample": (4, 3, 32, 32)}

# By name: the class, its options, and the shapes of its arguments (a dictionary of them is one argument).
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "unet2d": (
        "UNet2DModel",
        {
            **_BLOCKS,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 4,
        },
        {"sample": (4, 3, 16, 16), "timestep": _TIMES},
    ),
    "unet2d_condition": ("UNet2DConditionModel", {**_CONDITIONED, **_UPWARD}, _U_NET),
    "unet2d_condition, as SDXL": (
        "UNet2DConditionModel",
        {
            **_CONDITIONED,
            **_UPWARD,
            "transformer_layers_per_block": (1, 2),
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 64,
        },
        {**_U_NET, "added_cond_kwargs": {"text_embeds": (4, 16), "time_ids": (4, 6)}},
    ),
    "unet3d_condition": (
        "UNet3DConditionModel",
        {
            **_CONDITIONED,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
        {**_U_NET, "sample": (4, 4, 2, 8, 8)},
    ),
    "kandinsky3": (
        "Kandinsky3UNet",
        {
            "time_embedding_dim": 16,
            "groups": 4,
            "attention_head_dim": 4,
            "layers_per_block": 2,
            "block_out_channels": (8, 16),
            "cross_attention_dim": 16,
            "encoder_hid_dim": 16,
        },
        {**_U_NET, "encoder_attention_mask": (4, 6)},
    ),
    "controlnet": (
        "ControlNetModel",
        {**_CONDITIONED, "conditioning_embedding_out_channels": (4, 8)},
        {**_U_NET, "controlnet_cond": (4, 3, 16, 16)},
    ),
    "autoencoder_kl": ("AutoencoderKL", _AUTOENCODER, _PIXELS),
    "autoencoder_kl_temporal": (
        "AutoencoderKLTemporalDecoder",
        {
            "block_out_channels": (32, 32),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "layers_per_block": 1,
        },
        _PIXELS,
    ),
    "autoencoder_tiny": (
        "AutoencoderTiny",
        {**_UPSAMPLED, "num_encoder_blocks": (1, 2), "num_decoder_blocks": (2, 1)},
        _PIXELS,
    ),
    "autoencoder_oobleck": (
        "AutoencoderOobleck",
        {
            "encoder_hidden_size": 8,
            "downsampling_ratios": [2, 4],
            "channel_multiples": [1, 2],
            "decoder_channels": 8,
            "decoder_input_channels": 4,
        },
        {"sample": (4, 2, 256)},
    ),
    "vq": ("VQModel", {**_AUTOENCODER, "num_vq_embeddings": 12}, _PIXELS),
    "dit": (
        "DiTTransformer2DModel",
        {**_HEADS, "sample_size": 8, "norm_num_groups": 4},
        {"hidden_states": _LATENTS, "timestep": _TIMES, "class_labels": _TIMES},
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        {
            **_HEADS,
            "sample_size": 8,
            "norm_num_groups": 4,
            "cross_attention_dim": 32,
            "caption_channels": 16,
            "use_additional_conditions": False,
        },
        _TRANSFORMER,
    ),
    "sd3": ("SD3Transformer2DModel", _SD3, {**_TRANSFORMER, "pooled_projections": (4, 16)}),
    "sd3.5": (
        "SD3Transformer2DModel",
        {**_SD3, "dual_attention_layers": (0, 1), "qk_norm": "rms_norm"},
        {**_TRANSFORMER, "pooled_projections": (4, 16)},
    ),
    "sd3, controlnet": (
        "SD3ControlNetModel",
        _SD3,
        {**_TRANSFORMER, "pooled_projections": (4, 16), "controlnet_cond": _LATENTS},
    ),
    "flux": ("FluxTransformer2DModel", _FLUX, _PACKED),
    "flux, guided": (
        "FluxTransformer2DModel",
        {**_FLUX, "guidance_embeds": True},
        {**_PACKED, "guidance": _TIMES},
    ),
    "flux, controlnet": (
        "FluxControlNetModel",
        _FLUX,
        {**_PACKED, "controlnet_cond": (4, 9, 4)},
    ),
    "aura_flow": (
        "AuraFlowTransformer2DModel",
        {
            "num_attention_heads": 4,
            "attention_head_dim": 8,
            "sample_size": 8,
            "num_mmdit_layers": 2,
            "num_single_dit_layers": 2,
            "joint_attention_dim": 16,
            "caption_projection_dim": 32,
            "pos_embed_max_size": 64,
        },
        _TRANSFORMER,
    ),
    "sana": (
        "SanaTransformer2DModel",
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_cross_attention_heads": 4,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 32,
            "caption_channels": 16,
            "sample_size": 8,
        },
        _TRANSFORMER,
    ),
    "cogvideox": (
        "CogVideoXTransformer3DModel",
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 16,
            "text_embed_dim": 16,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 9,
            "max_text_seq_length": 6,
        },
        {**_TRANSFORMER, "hidden_states": (4, 3, 4, 8, 8)},
    ),
    "wan": (
        "WanTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 16,
            "ffn_dim": 32,
            "num_layers": 4,
        },
        {**_TRANSFORMER, "hidden_states": (4, 4, 3, 8, 8)},
    ),
    "mochi": (
        "MochiTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 3,
            "pooled_projection_dim": 16,
            "in_channels": 4,
            "text_embed_dim": 16,
            "time_embed_dim": 4,
            "max_sequence_length": 6,
        },
        {
            **_TRANSFORMER,
            "hidden_states": (4, 4, 2, 8, 8),
            "encoder_attention_mask": (4, 6),
        },
    ),
    "lumina2": (
        "Lumina2Transformer2DModel",
        {
            "sample_size": 8,
            "in_channels": 4,
            "hidden_size": 24,
            "num_layers": 3,
            "num_refiner_layers": 1,
            "num_attention_heads": 3,
            "num_kv_heads": 1,
            "multiple_of": 2,
            "scaling_factor": 1.0,
            "axes_dim_rope": (4, 2, 2),
            "axes_lens": (32, 32, 32),
            "cap_feat_dim": 16,
        },
        {**_TRANSFORMER, "encoder_attention_mask": (4, 6)},
    ),
    "prior": (
        "PriorTransformer",
        {**_HEADS, "embedding_dim": 16, "num_embeddings": 6},
        {
            "hidden_states": (4, 16),
            "timestep": _TIMES,
            "proj_embedding": (4, 16),
            "encoder_hidden_states": _TEXTS,
        },
    ),
}
_WHOLE_NUMBERS = {"timestep": 100, "class_labels": 10}  # and below how many


class ControlledUNet(nn.Module):
    """A frozen U-Net with the ControlNet that is trained on it, as diffusers' example does."""

    def __init__(self, unet: nn.Module, controlnet: nn.Module) -> None:
        super().__init__()
        self.unet, self.controlnet = unet.requires_grad_(False), controlnet

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        controlnet_cond: Tensor,
    ) -> Tensor:
        """The noise that the U-Net finds."""
        down, middle = self.controlnet(
            sample, timestep, encoder_hidden_states, controlnet_cond, return_dict=False
        )
        return self.unet(
            sample,
            timestep,
            encoder_hidden_states,
            down_block_additional_residuals=down,
            mid_block_additional_residual=middle,
        ).sample


def _argument(name: str, shape: Any) -> Any:
    if isinstance(shape, dict):
        return {key: _argument(key, inner) for key, inner in shape.items()}
    if name in _WHOLE_NUMBERS:
        return torch.arange(shape[0]) * 7 % _WHOLE_NUMBERS[name]
    if name.endswith("mask"):
        return (torch.arange(shape[1]) < torch.arange(shape[0])[:, None] + 3).bool()
    return draw(*shape)


def entries() -> list[Entry]:
    """Each of :data:`MODELS`, and a ControlNet in training."""
    import diffusers

    def make(name: str) -> nn.Module:
        kind, options, _ = MODELS[name]
        model = without_zeros(getattr(diffusers, kind)(**options).train())
        if kind == "AutoencoderOobleck":  # its weight norm can be copied only after such a forward
            with torch.no_grad():
                model(**batch(name)())
        return model

    def build(name: str) -> Callable[[], nn.Module]:
        return lambda: make(name)

    def batch(name: str) -> Callable[[], dict[str, Any]]:
        return lambda: {key: _argument(key, shape) for key, shape in MODELS[name][2].items()}

    found = [Entry(name, build(name), named(batch(name))) for name in MODELS]
    found.append(
        Entry(
            "controlnet and unet",
            lambda: ControlledUNet(make("unet2d_condition"), make("controlnet")),
            named(batch("controlnet")),
        )
    )
    return found
