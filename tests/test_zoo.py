"""The representative part of the model sweep; all of it is ``python -m tests.sweep``."""

import pytest

pytest.importorskip("timm")
pytest.importorskip("transformers")

from . import sweep
from .zoo import FAMILIES

QUICK = ("resnet18", "gpt2")  # also where it shall be quick
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


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, marks=[] if name in QUICK else [pytest.mark.slow])
        for family, names in CHOSEN.items()
        for name in names
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_real_model_trains_as_plain(family: str, name: str) -> None:
    """Cut into 2 and 4 stages at blocks and at random modules: loss, gradients and buffers equal."""
    (entry,) = [e for e in FAMILIES[family]() if e.name == name]
    found = sweep.check(entry)
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
    (entry,) = [e for e in FAMILIES[family]() if e.name == name]
    cuts = ("blocks 4", "random 4")
    found = sweep.check(entry, cuts, schedule=schedule, checkpoint="always", random_too=True)
    assert all(value == "exact" for value in found.values()), found
