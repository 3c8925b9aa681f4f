"""Retrofit: torchvision's ResNet in three stages, trained on handwritten digits.

    python examples/digits_resnet.py

The model is torchvision's; two ``BeginBlock`` lines make it a pipeline. The data is scikit-learn's
digits (1797 images of 8×8 pixels), which its package ships. Runs on the GPUs of the machine, or on
the CPU.
"""

import argparse
import copy
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet
from tqdm import tqdm

import blockpipe as bp


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images [n, 1, 8, 8] in 0..1 and labels [n]: training, then test."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    train_x, test_x = (torch.tensor(x / 16.0).float().reshape(-1, 1, 8, 8) for x in split[:2])
    train_y, test_y = (torch.tensor(y) for y in split[2:])
    return train_x, train_y, test_x, test_y


def resnet_for_digits() -> nn.Module:
    """torchvision's ResNet, one block a layer, for small images, marked at two places."""
    model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)
    model.conv1 = nn.Conv2d(1, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    model.layer3 = bp.BeginBlock(model.layer3, stage=1)
    model.layer4 = bp.BeginBlock(model.layer4, stage=2)
    return model


def devices_for(stages: int) -> list[str]:
    """A device for each stage: the GPUs in turn, or the CPU."""
    gpus = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    kind = torch.accelerator.current_accelerator().type if gpus else "cpu"
    return [f"{kind}:{stage * gpus // stages}" if gpus else "cpu" for stage in range(stages)]


def shifted(images: Tensor) -> Tensor:
    """The images moved by up to one pixel each way: few images, so each is shown in many places."""
    rows, columns = (int(torch.randint(-1, 2, ())) for _ in range(2))
    return images.roll((rows, columns), (2, 3))


def check_gradients(pipe: bp.Pipeline, x: Tensor, y: Tensor) -> float:
    """The worst difference to the plain model's gradients, relative to their global norm."""
    device = pipe.output_device
    plain = copy.deepcopy(pipe.module).to(device)
    plain.zero_grad()
    pipe.zero_grad()
    pipe.forward_backward(x, target=y, loss_fn=F.cross_entropy)
    for xs, ys in zip(x.tensor_split(pipe.chunks), y.tensor_split(pipe.chunks), strict=True):
        loss = F.cross_entropy(plain(xs.to(device)), ys.to(device))
        (loss * (len(ys) / len(y))).backward()
    pairs = list(zip(pipe.module.parameters(), plain.parameters(), strict=True))
    norm = torch.stack([q.grad.norm() for _, q in pairs]).norm()
    worst = max((p.grad.to(device) - q.grad).norm() for p, q in pairs)
    return float(worst / norm)


def main() -> None:
    """Train, test, and check the gradients."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    torch.manual_seed(0)
    begun = time.perf_counter()
    train_x, train_y, test_x, test_y = digits()
    model = resnet_for_digits()
    pipe = bp.Pipeline(model, devices=devices_for(3), chunks=4)
    print(pipe.summary(train_x[:64]), "\n")

    optimizer = torch.optim.SGD(
        pipe.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    batches = len(train_x) // 64
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.05, total_steps=options.epochs * batches
    )
    with tqdm(total=options.epochs * batches, unit="step") as bar:
        for epoch in range(options.epochs):
            pipe.train()
            for index in torch.randperm(len(train_x))[: batches * 64].split(64):
                optimizer.zero_grad()
                result = pipe.forward_backward(
                    shifted(train_x[index]), target=train_y[index], loss_fn=F.cross_entropy
                )
                nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                bar.update()
                bar.set_postfix(epoch=epoch + 1, loss=f"{result.loss.item():.3f}")

    pipe.eval()
    with torch.no_grad():
        found = pipe(test_x).argmax(1)
    accuracy = float((found.cpu() == test_y).float().mean())
    pipe.train()
    difference = check_gradients(pipe, train_x[:64], train_y[:64])
    print(f"test accuracy: {100 * accuracy:.2f} % of {len(test_y)} images")
    print(f"gradients: {difference:.1e} of their norm from the plain model's")
    print(f"time: {time.perf_counter() - begun:.0f} s on {', '.join(map(str, pipe.devices))}")
    pipe.close()
    if accuracy < 0.97 or difference > 1e-5:
        raise SystemExit("the demo fell short of 97 % accuracy or of equal gradients")


if __name__ == "__main__":
    main()
