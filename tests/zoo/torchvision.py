"""torchvision: classifiers, and what predicts more than a class (for pixels, objects, videos, motion)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .entry import Batch, Entry, draw, images, named

# Every family of classifiers, and the size of its images.
CLASSIFIERS = {
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


def entries() -> list[Entry]:
    """Every family of torchvision's classifiers."""
    import torchvision

    def build(name: str) -> Callable[[], nn.Module]:
        options: dict[str, Any] = {"num_classes": 10}
        if name in ("googlenet", "inception_v3"):
            options |= {"aux_logits": True, "init_weights": False}
        return lambda: getattr(torchvision.models, name)(**options)

    return [
        Entry(name, build(name), images(size, 4 if size > 100 else 6))
        for name, size in CLASSIFIERS.items()
    ]


def _targets(masks: bool, points: bool) -> Callable[[], Batch]:
    """Four images of two sizes; every other one has two objects, but for detectors of keypoints."""

    def target(n: int, image: torch.Tensor) -> dict[str, torch.Tensor]:
        count = 1 if points else 1 + n % 2
        corners = torch.tensor([[4.0 + 3 * k, 5.0, 30.0 + 3 * k, 40.0] for k in range(count)])
        found = {"boxes": corners, "labels": torch.arange(count) % 2 + 1}
        if masks:
            found["masks"] = torch.ones(count, *image.shape[1:], dtype=torch.uint8)
        if points:
            found["keypoints"] = torch.tensor([[[9.0, 9.0, 1.0], [20.0, 30.0, 1.0]]] * count)
        return found

    def make() -> dict[str, Any]:
        pixels = draw(4, 3, 64, 72).sigmoid()
        found = [image[:, :, : 64 + 8 * (n % 2)] for n, image in enumerate(pixels)]
        return {"images": found, "targets": [target(n, image) for n, image in enumerate(found)]}

    return named(make)


# Two-stage detectors draw a sample of their anchors and proposals; a sample of all is no draw.
_ALL_ANCHORS: dict[str, Any] = {
    "rpn_batch_size_per_image": 100_000,
    "box_batch_size_per_image": 100_000,
    "rpn_pre_nms_top_n_train": 40,
    "rpn_post_nms_top_n_train": 20,
}
DETECTORS = [
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "fasterrcnn_mobilenet_v3_large_fpn",
    "fasterrcnn_resnet50_fpn",
    "fasterrcnn_resnet50_fpn_v2",
    "fcos_resnet50_fpn",
    "keypointrcnn_resnet50_fpn",
    "maskrcnn_resnet50_fpn",
    "maskrcnn_resnet50_fpn_v2",
    "retinanet_resnet50_fpn",
    "retinanet_resnet50_fpn_v2",
    "ssd300_vgg16",
    "ssdlite320_mobilenet_v3_large",
]
# By name: what its constructor takes besides.
SEGMENTERS: dict[str, dict[str, Any]] = {
    "deeplabv3_mobilenet_v3_large": {"aux_loss": None},
    "deeplabv3_resnet50": {"aux_loss": True},
    "fcn_resnet50": {"aux_loss": None},
    "lraspp_mobilenet_v3_large": {},
}
# By name: batch, frames, and their size.
VIDEO = {
    "mc3_18": (4, 8, 32),
    "mvit_v1_b": (2, 16, 224),
    "mvit_v2_s": (2, 16, 224),
    "r2plus1d_18": (4, 8, 32),
    "r3d_18": (4, 8, 32),
    "s3d": (2, 16, 224),
    "swin3d_t": (4, 8, 32),
}


def dense_entries() -> list[Entry]:
    """torchvision's models for segmentation, detection, video and optical flow."""
    import torchvision.models as zoo

    def build(package: Any, name: str, **options: Any) -> Callable[[], nn.Module]:
        return lambda: getattr(package, name)(weights=None, **options)

    backbone: dict[str, Any] = {"weights_backbone": None, "num_classes": 3}
    segmenters = [
        Entry(name, build(zoo.segmentation, name, **backbone, **options), images(64, 4))
        for name, options in SEGMENTERS.items()
    ]
    detectors = [
        Entry(
            name,
            build(zoo.detection, name, **backbone | _detector_options(name)),
            _targets(name.startswith("maskrcnn"), name.startswith("keypointrcnn")),
            {"batch_dims": {"images": "list", "targets": "list"}, "chunks": 2},
        )
        for name in DETECTORS
    ]
    videos = [
        Entry(name, build(zoo.video, name, num_classes=5), _clips(*shape))
        for name, shape in VIDEO.items()
    ]
    flows = [
        Entry(name, build(zoo.optical_flow, name), _frames) for name in ("raft_large", "raft_small")
    ]
    return [*segmenters, *detectors, *videos, *flows]


def _detector_options(name: str) -> dict[str, Any]:
    options: dict[str, Any] = {} if name.startswith("ssd") else {"min_size": 64, "max_size": 96}
    if "rcnn" in name:
        options |= _ALL_ANCHORS
    if name.startswith("keypointrcnn"):
        options |= {"num_keypoints": 2, "num_classes": 2}
    return options


def _clips(batch: int, frames: int, size: int) -> Callable[[], Batch]:
    return lambda: ((draw(batch, 3, frames, size, size),), {})


def _frames() -> Batch:
    first = draw(2, 3, 128, 128).tanh()
    return (first, first.roll(3, -1)), {"num_flow_updates": 2}
