"""From a model that nobody has marked to stages one can trust: balance, verify, profile.

    python examples/find_stages.py
    python examples/find_stages.py --model vgg11 --stages 3 --page timeline.html

Nothing is downloaded: the models are torchvision's, with random weights.
"""

import argparse
from pathlib import Path

import torch
import torchvision
from torch.nn import functional as F

import blockpipe as bp

CHUNKS = 4


def main() -> None:
    """Find a plan, see what it says, check it, and look at a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet18", help="a classifier of torchvision's")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--size", type=int, default=64, help="of the images")
    parser.add_argument("--page", type=Path, help="write the timeline as a page")
    options = parser.parse_args()
    torch.manual_seed(0)
    gpus = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    devices = [
        f"cuda:{i * gpus // options.stages}" if gpus else "cpu" for i in range(options.stages)
    ]

    model = torchvision.models.get_model(options.model, weights=None, num_classes=10)
    images = torch.randn(8 * CHUNKS, 3, options.size, options.size)
    labels = torch.randint(0, 10, (8 * CHUNKS,))

    # Where to cut: every module call is looked at, measured, and the best cut is found exactly.
    plan = bp.balance(
        model,
        images[:8],
        options.stages,
        target=labels[:8],
        loss_fn=F.cross_entropy,
        chunks=CHUNKS,
        devices=devices,
    )
    print(plan)
    print("\nas marks:\n" + plan.marks())

    with bp.Pipeline(model, devices=devices, chunks=CHUNKS, plan=plan) as pipe:
        print(f"\n{pipe.summary(images)}\n")
        # What a step gives is what the plain loop gives: gradients, buffers, loss.
        verification = pipe.verify(images, target=labels, loss_fn=F.cross_entropy)
        print(verification)
        verification.raise_if_different()

        pipe.forward_backward(images, target=labels, loss_fn=F.cross_entropy)
        with pipe.profile() as timeline:
            pipe.forward_backward(images, target=labels, loss_fn=F.cross_entropy)
        print(f"\n{timeline}")
        if options.page is not None:
            timeline.to_html(options.page)
            print(f"\nthe timeline as a page: {options.page}")


if __name__ == "__main__":
    main()
