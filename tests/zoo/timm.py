"""timm: every module of ``timm.models`` at least once, in one of its smallest variants."""

from collections.abc import Callable
from typing import Any

from torch import nn

from .entry import Entry, images, without_zeros

# By name: the size of its images. Several of a module where they differ inside.
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
    "cpubone_nano": 64,
    "csatv2": 128,
    "cspnext_tiny": 64,
    "deepseek_vit_412m": 126,
    "efficientvim_m1": 224,
    "fasternet_t0": 64,
    "gemma4_vit_167m": 96,
    "hiera_tiny_224": 224,
    "sam2_hiera_tiny": 224,
    "iformer_t": 224,
    "inception_resnet_v2": 128,
    "inception_v3": 128,
    "lcnetv2_small": 64,
    "lowformer_b0": 64,
    "test_mambaout": 64,
    "mobilenetv5_base": 64,
    "naflexvit_base_patch16_gap": 64,
    "nasnetalarge": 96,
    "pnasnet5large": 96,
    "qwen3_vit_88m": 64,
    "rdnet_tiny": 64,
    "selecsls42": 64,
    "legacy_seresnet18": 64,
    "sequencer2d_s": 224,
    "shvit_s1": 128,
    "swinv2_tiny_window8_256": 256,
    "swinv2_cr_tiny_224": 224,
    "vit_tiny_r_s16_p8_224": 64,
    "test_vit_relpos": 160,
    "samvit_base_patch16_224": 224,
    "vitamin_small_224": 224,
    "legacy_xception": 128,
}
_SIZED = ("beit", "cait", "deit", "eva02", "vit_tiny")
# Modules whose smallest variant is large: fewer blocks, or fewer cells.
_SHORTER: dict[str, dict[str, Any]] = {
    "deepseek_vit_412m": {"depth": 4},
    "gemma4_vit_167m": {"depth": 4},
    "naflexvit_base_patch16_gap": {"depth": 4},
    "qwen3_vit_88m": {"depth": 4},
    "samvit_base_patch16_224": {"depth": 4, "global_attn_indexes": (1, 3)},
}


def entries() -> list[Entry]:
    """Each of :data:`TIMM`."""
    import timm

    def build(name: str, size: int) -> Callable[[], nn.Module]:
        options: dict[str, Any] = {"num_classes": 10, **_SHORTER.get(name, {})}
        if name.startswith(_SIZED):
            options["img_size"] = size
        return lambda: without_zeros(timm.create_model(name, **options))

    return [
        Entry(name, build(name, size), images(size, 4 if size > 100 else 6))
        for name, size in TIMM.items()
    ]
