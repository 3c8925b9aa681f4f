"""Hugging Face: encoders, decoders, encoder-decoders, vision and speech, with tiny configurations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .entry import Batch, Entry, draw, draw_tokens, named
from .huggingface_names import ALIKE

_TEXT: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 64,
}
_NO_DROPOUT: dict[str, Any] = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "activation_dropout": 0.0,
    "layerdrop": 0.0,
    "classifier_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "dropout_rate": 0.0,
    "drop_path_rate": 0.0,
    "embd_dropout": 0.0,
    "resid_dropout": 0.0,
    "summary_first_dropout": 0.0,
    "ffn_dropout": 0.0,
    "seq_classif_dropout": 0.0,
    "embedding_dropout": 0.0,
    "residual_dropout": 0.0,
    "classifier_dropout_prob": 0.0,
    "feat_proj_dropout": 0.0,
    "attn_dropout": 0.0,
    "emb_dropout": 0.0,
    "pooler_dropout": 0.0,
    "use_cache": False,
    "head_dropout": 0.0,
}
_GQA = {"num_key_value_heads": 2, "head_dim": 8}
_BART: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 37,
    "decoder_ffn_dim": 37,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
}

# name: (model class, kind of batch, configuration)
CHOSEN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "albert": ("AlbertForMaskedLM", "lm", {**_TEXT, "embedding_size": 16}),
    "bert": ("BertForMaskedLM", "lm", _TEXT),
    "bert_classifier": ("BertForSequenceClassification", "class", _TEXT),
    "camembert": ("CamembertForMaskedLM", "lm", _TEXT),
    "convbert": ("ConvBertForMaskedLM", "lm", {**_TEXT, "embedding_size": 32}),
    "deberta_v2": ("DebertaV2ForMaskedLM", "lm", _TEXT),
    "distilbert": (
        "DistilBertForMaskedLM",
        "lm",
        {"vocab_size": 99, "dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 37},
    ),
    "electra": ("ElectraForMaskedLM", "lm", {**_TEXT, "embedding_size": 16}),
    "fnet": ("FNetForMaskedLM", "lm", _TEXT),
    "mpnet": ("MPNetForMaskedLM", "lm", _TEXT),
    "modernbert": (
        "ModernBertForMaskedLM",
        "lm",
        {
            **_TEXT,
            "pad_token_id": 0,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "reference_compile": False,
        },
    ),
    "roberta": ("RobertaForMaskedLM", "lm", _TEXT),
    "roformer": ("RoFormerForMaskedLM", "lm", {**_TEXT, "embedding_size": 32}),
    "squeezebert": (
        "SqueezeBertForMaskedLM",
        "lm",
        {
            **_TEXT,
            "embedding_size": 32,
            "intermediate_size": 64,
            **{
                f"{part}_groups": 2
                for part in ("q", "k", "v", "post_attention", "intermediate", "output")
            },
        },
    ),
    "xlm_roberta": ("XLMRobertaForMaskedLM", "lm", _TEXT),
    "bloom": (
        "BloomForCausalLM",
        "lm",
        {"vocab_size": 99, "hidden_size": 32, "n_layer": 4, "n_head": 4},
    ),
    "codegen": (
        "CodeGenForCausalLM",
        "lm",
        {
            "vocab_size": 99,
            "n_embd": 32,
            "n_layer": 4,
            "n_head": 4,
            "rotary_dim": 4,
            "n_positions": 64,
        },
    ),
    "cohere": ("CohereForCausalLM", "lm", {**_TEXT, "num_key_value_heads": 2}),
    "falcon": ("FalconForCausalLM", "lm", _TEXT),
    "gemma": ("GemmaForCausalLM", "lm", {**_TEXT, **_GQA}),
    "gemma2": ("Gemma2ForCausalLM", "lm", {**_TEXT, **_GQA, "sliding_window": 4}),
    "gpt2": (
        "GPT2LMHeadModel",
        "lm",
        {"vocab_size": 99, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64},
    ),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "lm",
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "num_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "max_position_embeddings": 64,
        },
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "lm", _TEXT),
    "gptj": (
        "GPTJForCausalLM",
        "lm",
        {
            "vocab_size": 99,
            "n_embd": 32,
            "n_layer": 4,
            "n_head": 4,
            "rotary_dim": 4,
            "n_positions": 64,
        },
    ),
    "granite": ("GraniteForCausalLM", "lm", {**_TEXT, "num_key_value_heads": 2}),
    "llama": ("LlamaForCausalLM", "lm", {**_TEXT, "num_key_value_heads": 2}),
    "llama_tied": (
        "LlamaForCausalLM",
        "lm",
        {**_TEXT, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "mamba": (
        "MambaForCausalLM",
        "lm",
        {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 4},
    ),
    "mistral": ("MistralForCausalLM", "lm", {**_TEXT, "num_key_value_heads": 2}),
    "mixtral": (
        "MixtralForCausalLM",
        "lm",
        {**_TEXT, "num_key_value_heads": 2, "num_local_experts": 4, "intermediate_size": 40},
    ),
    "opt": (
        "OPTForCausalLM",
        "lm",
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "ffn_dim": 37,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
        },
    ),
    "phi": ("PhiForCausalLM", "lm", _TEXT),
    "qwen2": ("Qwen2ForCausalLM", "lm", {**_TEXT, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForCausalLM", "lm", {**_TEXT, **_GQA}),
    "stablelm": ("StableLmForCausalLM", "lm", {**_TEXT, "num_key_value_heads": 2}),
    "starcoder2": ("Starcoder2ForCausalLM", "lm", {**_TEXT, "num_key_value_heads": 2}),
    "bart": ("BartForConditionalGeneration", "lm", _BART),
    "blenderbot": ("BlenderbotForConditionalGeneration", "lm", _BART),
    "marian": ("MarianMTModel", "lm", _BART),
    "mbart": ("MBartForConditionalGeneration", "lm", _BART),
    "pegasus": ("PegasusForConditionalGeneration", "lm", _BART),
    "t5": (
        "T5ForConditionalGeneration",
        "lm",
        {
            "vocab_size": 99,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 37,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "mt5": (
        "MT5ForConditionalGeneration",
        "lm",
        {
            "vocab_size": 99,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 37,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "beit": ("BeitForImageClassification", "image", _VISION),
    "convnext": (
        "ConvNextForImageClassification",
        "image",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1], "num_labels": 5},
    ),
    "deit": ("DeiTForImageClassification", "image", _VISION),
    "dinov2": ("Dinov2ForImageClassification", "image", _VISION),
    "resnet": (
        "ResNetForImageClassification",
        "image",
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [1, 1, 2, 1],
            "num_labels": 5,
        },
    ),
    "segformer": (
        "SegformerForImageClassification",
        "image",
        {
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 4],
            "num_labels": 5,
            "decoder_hidden_size": 16,
        },
    ),
    "swin": (
        "SwinForImageClassification",
        "image",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 1, 2],
            "num_heads": [2, 2, 4],
            "window_size": 4,
            "num_labels": 5,
        },
    ),
    "vit": ("ViTForImageClassification", "image", _VISION),
    "clip": ("CLIPModel", "clip", {}),
}


# Classes that are built with whichever of these sizes their configurations have, by kind of batch.
_SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_layers": 4,
    "n_heads": 4,
    "n_positions": 64,
    "n_ctx": 64,
    "dim": 32,
    "hidden_dim": 64,
    "ffn_dim": 64,
    "word_embed_proj_dim": 32,
    "embedding_size": 32,
    "emb_dim": 32,
    "rotary_dim": 4,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "sliding_window": 4,
    "state_size": 4,
    "time_step_rank": 4,
    "ffn_hidden_size": 64,
    "kv_channels": 8,
    "intermediate_dim": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "attention_window": 4,
    "num_mel_bins": 80,
    "max_source_positions": 64,
    "max_target_positions": 64,
    "sep_token_id": 2,
    "cls_token_id": 1,
}
_IMAGE_SIZES: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [1, 1, 2, 1],
    "embed_dim": 8,
    "window_size": 4,
    "decoder_hidden_size": 16,
    "num_labels": 5,
}
_AUDIO_SIZES: dict[str, Any] = {
    "conv_dim": [16, 16, 16],
    "conv_stride": [5, 2, 2],
    "conv_kernel": [10, 3, 3],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 16,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
}
_SAMPLE_EXPERTS = ("PhimoeForCausalLM",)  # while they train
_EXTRA_SIZES = {"pixels": _IMAGE_SIZES, "speech": _AUDIO_SIZES}


def _batch(kind: str) -> Callable[[], Batch]:
    def make() -> dict[str, Any]:
        if kind == "speech":
            return {"input_values": draw(4, 4000)}
        if kind == "pixels":
            return {"pixel_values": draw(4, 3, 32, 32)}
        if kind == "image":
            return {"pixel_values": draw(6, 3, 32, 32), "labels": torch.arange(6) % 5}
        if kind == "clip":
            pixels = draw(4, 3, 32, 32)
            return {
                "input_ids": draw_tokens(98, 4, 16),
                "pixel_values": pixels,
                "return_loss": True,
            }
        ids = draw_tokens(99, 4, 16)
        labels = torch.arange(4) % 2 if kind == "class" else ids
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    return named(make)


def _tiny(config: Any, sizes: dict[str, Any]) -> Any:
    """The same kind of configuration with these sizes and without dropout, inner ones too."""
    options: dict[str, Any] = {}
    for name in config.to_dict():
        inner = getattr(config, name, None)
        if hasattr(inner, "to_diff_dict"):
            options[name] = _tiny(inner, sizes).to_dict()
        elif name in sizes and inner != sizes[name]:  # an integer 0 stays one
            options[name] = sizes[name]
    return type(config)(**options)


def entries() -> list[Entry]:
    """Encoders, decoders, encoder-decoders, vision and speech models, tied weights among them."""
    import transformers

    def build(model: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            cls = getattr(transformers, model)
            if model == "CLIPModel":
                text = {**_TEXT, "projection_dim": 16}
                vision = {k: v for k, v in _VISION.items() if k != "num_labels"}
                config = transformers.CLIPConfig(
                    text_config=text, vision_config=vision, projection_dim=16
                )
            else:
                known = cls.config_class().to_dict()
                off = {k: v for k, v in _NO_DROPOUT.items() if k in known}
                config = cls.config_class(**{**off, **options})
            return cls(config).train()

        return make

    def build_alike(model: str, sizes: dict[str, Any]) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            cls = getattr(transformers, model)
            return cls(_tiny(cls.config_class(), sizes)).train(model not in _SAMPLE_EXPERTS)

        return make

    found = [
        Entry(name, build(model, options), _batch(kind))
        for name, (model, kind, options) in CHOSEN.items()
    ]
    for kind, models in ALIKE.items():
        sizes = {**_NO_DROPOUT, **_SIZES, **_EXTRA_SIZES.get(kind, {})}
        found += [Entry(model, build_alike(model, sizes), _batch(kind)) for model in models.split()]
    return found
