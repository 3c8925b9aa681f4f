"""Real models in small random configurations: torchvision, timm and Hugging Face."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass
class Entry:
    """How to build a model and a batch for it."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]


def _image(size: int, batch: int = 6, channels: int = 3) -> Callable[[], Any]:
    def make() -> Any:
        generator = torch.Generator().manual_seed(1)
        return (torch.randn(batch, channels, size, size, generator=generator),), {}

    return make


TORCHVISION = {
    "alexnet": 64,
    "convnext_tiny": 64,
    "densenet121": 64,
    "efficientnet_b0": 64,
    "efficientnet_v2_s": 64,
    "googlenet": 96,
    "inception_v3": 299,
    "maxvit_t": 224,
    "mnasnet0_5": 64,
    "mobilenet_v2": 64,
    "mobilenet_v3_small": 64,
    "mobilenet_v3_large": 64,
    "regnet_x_400mf": 64,
    "regnet_y_400mf": 64,
    "resnet18": 64,
    "resnet50": 64,
    "resnext50_32x4d": 64,
    "shufflenet_v2_x0_5": 64,
    "squeezenet1_0": 64,
    "squeezenet1_1": 64,
    "swin_t": 64,
    "swin_v2_t": 64,
    "vgg11": 64,
    "vgg11_bn": 64,
    "vit_b_32": 224,
    "wide_resnet50_2": 64,
}


def torchvision_entries() -> list[Entry]:
    """Every family of torchvision's classifiers."""
    import torchvision

    def build(name: str) -> Callable[[], nn.Module]:
        options: dict[str, Any] = {"num_classes": 10}
        if name in ("googlenet", "inception_v3"):
            options |= {"aux_logits": True, "init_weights": False}
        return lambda: getattr(torchvision.models, name)(**options)

    return [
        Entry(name, build(name), _image(size, 4 if size > 100 else 6))
        for name, size in TORCHVISION.items()
    ]


TIMM = {
    "beit_base_patch16_224": 32,
    "botnet26t_256": 256,
    "cait_xxs24_224": 32,
    "coat_lite_tiny": 224,
    "coatnet_nano_rw_224": 224,
    "convit_tiny": 224,
    "convmixer_768_32": 64,
    "convnext_atto": 64,
    "convnextv2_atto": 64,
    "crossvit_9_240": 240,
    "cs3darknet_s": 64,
    "davit_tiny": 224,
    "deit3_small_patch16_224": 32,
    "densenet121": 64,
    "dla34": 64,
    "dm_nfnet_f0": 64,
    "dpn68": 64,
    "edgenext_xx_small": 64,
    "efficientformer_l1": 224,
    "efficientformerv2_s0": 224,
    "efficientnet_lite0": 64,
    "efficientvit_b0": 64,
    "efficientvit_m0": 224,
    "eva02_tiny_patch14_224": 28,
    "fastvit_t8": 64,
    "fbnetc_100": 64,
    "focalnet_tiny_srf": 224,
    "gcvit_xxtiny": 224,
    "ghostnet_050": 64,
    "gmixer_12_224": 224,
    "gmlp_ti16_224": 224,
    "hardcorenas_a": 64,
    "hgnet_tiny": 64,
    "hrnet_w18_small": 64,
    "inception_next_tiny": 64,
    "inception_v4": 128,
    "lcnet_035": 64,
    "levit_128s": 224,
    "maxvit_rmlp_pico_rw_256": 256,
    "mixer_s32_224": 224,
    "mixnet_s": 64,
    "mobilenetv3_small_050": 64,
    "mobileone_s0": 64,
    "mobilevit_xxs": 64,
    "mobilevitv2_050": 64,
    "mvitv2_tiny": 224,
    "nest_tiny": 224,
    "nfnet_l0": 64,
    "pit_ti_224": 224,
    "poolformer_s12": 64,
    "pvt_v2_b0": 64,
    "regnetx_002": 64,
    "repghostnet_050": 64,
    "repvgg_a0": 64,
    "repvit_m0_9": 64,
    "res2net50_14w_8s": 64,
    "resmlp_12_224": 224,
    "resnest14d": 64,
    "resnetv2_50": 64,
    "rexnet_100": 64,
    "seresnet18": 64,
    "skresnet18": 64,
    "starnet_s1": 64,
    "swin_s3_tiny_224": 224,
    "swiftformer_xs": 224,
    "tiny_vit_5m_224": 224,
    "tinynet_e": 64,
    "tnt_s_patch16_224": 224,
    "tresnet_m": 64,
    "twins_svt_small": 224,
    "vgg11": 64,
    "visformer_tiny": 224,
    "vit_tiny_patch16_224": 32,
    "volo_d1_224": 224,
    "vovnet39a": 64,
    "xception41": 64,
    "xcit_nano_12_p16_224": 64,
    "nextvit_small": 64,
}
_SIZED = ("beit", "cait", "deit", "eva02", "vit_tiny")


def timm_entries() -> list[Entry]:
    """timm architectures, one or two of each family."""
    import timm

    def build(name: str, size: int) -> Callable[[], nn.Module]:
        options: dict[str, Any] = {"num_classes": 10}
        if name.startswith(_SIZED):
            options["img_size"] = size
        return lambda: timm.create_model(name, **options)

    return [
        Entry(name, build(name, size), _image(size, 4 if size > 100 else 6))
        for name, size in TIMM.items()
    ]


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
HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any]]] = {
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


def _tokens(kind: str) -> Callable[[], Any]:
    def make() -> Any:
        generator = torch.Generator().manual_seed(1)
        if kind in ("lm", "class"):
            ids = torch.randint(3, 99, (4, 16), generator=generator)
            labels = ids if kind == "lm" else torch.arange(4) % 2
            return (), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        if kind == "image":
            pixels = torch.randn(6, 3, 32, 32, generator=generator)
            return (), {"pixel_values": pixels, "labels": torch.arange(6) % 5}
        ids = torch.randint(3, 98, (4, 16), generator=generator)
        pixels = torch.randn(4, 3, 32, 32, generator=generator)
        return (), {"input_ids": ids, "pixel_values": pixels, "return_loss": True}

    return make


def hugging_face_entries() -> list[Entry]:
    """Encoders, decoders, encoder-decoders and vision models, tied weights among them."""
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

    return [
        Entry(name, build(model, options), _tokens(kind))
        for name, (model, kind, options) in HUGGING_FACE.items()
    ]


FAMILIES: dict[str, Callable[[], list[Entry]]] = {
    "torchvision": torchvision_entries,
    "timm": timm_entries,
    "huggingface": hugging_face_entries,
}
