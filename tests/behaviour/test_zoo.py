"""The representative part of the model sweep; all of it is ``python -m tests.sweep``."""

from typing import Any

import pytest

from .. import sweep
from ..zoo import Entry, find

QUICK = ("resnet18", "gpt2", "mean, bert")  # also where it shall be quick
CHOSEN = {
    "torchvision": [
        "densenet121",
        "googlenet",
        "mobilenet_v3_small",
        "resnet18",
        "shufflenet_v2_x0_5",
        "swin_t",
    ],
    "timm": [
        "convnext_atto",
        "edgenext_xx_small",
        "ghostnet_050",
        "res2net50_14w_8s",
        "vit_tiny_patch16_224",
        "xcit_nano_12_p16_224",
    ],
    "huggingface": [
        "albert",
        "bart",
        "bert",
        "clip",
        "gemma2",
        "gpt2",
        "llama_tied",
        "mixtral",
        "segformer",
        "t5",
    ],
}
# Of the other families in two cuts each; those of the extra ``sweep`` where it is installed.
ALSO_CHOSEN = {
    "huggingface": ["Wav2Vec2ForCTC"],
    "pooling": ["mean, bert"],
    "peft": ["lora, llama"],
    "diffusers": ["flux"],
    "smp": ["unet"],
    "openclip": ["clip"],
}


def _entry(family: str, name: str) -> Entry:
    try:
        return find(family, name)
    except ImportError as error:
        pytest.skip(f"{family}: {error}")


def _pairs(chosen: dict[str, list[str]]) -> list[Any]:
    return [
        pytest.param(family, name, marks=[] if name in QUICK else [pytest.mark.slow])
        for family, names in chosen.items()
        for name in names
    ]


@pytest.mark.sweep
@pytest.mark.parametrize(("family", "name"), _pairs(CHOSEN))
@pytest.mark.filterwarnings("ignore")
def test_a_real_model_trains_as_plain(family: str, name: str) -> None:
    """Cut into 2 and 4 stages at blocks and at random modules: loss, gradients and buffers equal."""
    found = sweep.check(_entry(family, name))
    assert all(value == "exact" for value in found.values()), found


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(("family", "name"), _pairs(ALSO_CHOSEN))
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_is_no_classifier_trains_as_plain(family: str, name: str) -> None:
    """Speech, embeddings, frozen weights, diffusion, segmentation, two towers."""
    found = sweep.check(_entry(family, name), ("blocks 2", "random 2"))
    assert all(value == "exact" for value in found.values()), found


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name", "schedule"),
    [
        ("torchvision", "resnet18", "1f1b"),
        ("torchvision", "efficientnet_b0", "zb-h1"),
        ("timm", "convnext_atto", "gpipe"),
        ("huggingface", "bart", "1f1b"),
        ("huggingface", "t5", "gpipe"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_real_model_recomputes_with_dropout_on(family: str, name: str, schedule: str) -> None:
    """With random numbers drawn and everything recomputed: as sequential without."""
    cuts = ("blocks 4", "random 4")
    found = sweep.check(
        _entry(family, name), cuts, schedule=schedule, checkpoint="always", random_too=True
    )
    assert all(value == "exact" for value in found.values()), found
