"""A whole training script, to copy: loader, epochs, evaluation, checkpoints, resuming, a log.

    python examples/training_script.py --into runs/digits
    python examples/training_script.py --into runs/digits --epochs 9   # goes on where it stopped

The lines that a script without a pipeline would not have are the two marks in ``Classifier``,
``devices_for``, the ``Pipeline``, and ``forward_backward`` in the place of a forward, a loss and a
backward. The data is scikit-learn's digits (1797 images of 8×8 pixels), which its package ships.
Runs on the GPUs of the machine, or on the CPU.
"""

import argparse
import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import blockpipe as bp

log = logging.getLogger("train")


class Classifier(nn.Module):
    """Convolutions on stage 0, linear layers on stage 1."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(
            nn.Linear(512, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Scores for each digit."""
        with bp.Block(stage=0):
            features = self.features(images)
        with bp.Block(stage=1):
            return self.classifier(features)


def devices_for(stages: int) -> list[str]:
    """A device for each stage: the GPUs in turn, or the CPU."""
    gpus = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    kind = torch.accelerator.current_accelerator().type if gpus else "cpu"
    return [f"{kind}:{stage * gpus // stages}" if gpus else "cpu" for stage in range(stages)]


def digits() -> TensorDataset:
    """Images [n, 1, 8, 8] in 0..1 and labels [n]."""
    images, labels = load_digits(return_X_y=True)
    rows = torch.tensor(images / 16.0).float().reshape(-1, 1, 8, 8)
    return TensorDataset(rows, torch.tensor(labels))


def train(
    pipe: bp.Pipeline, loader: DataLoader[Any], optimizer: torch.optim.Optimizer
) -> tuple[float, int]:
    """Train for one epoch; return the mean loss of its samples, and their number."""
    pipe.train()
    total, samples = torch.zeros((), device=pipe.output_device), 0
    for images, labels in loader:  # the last batch may be smaller
        optimizer.zero_grad()
        loss = pipe.forward_backward(images, target=labels, loss_fn=F.cross_entropy).loss
        nn.utils.clip_grad_norm_(pipe.parameters(), max_norm=1.0)
        optimizer.step()
        total += loss * len(images)  # no item(): it would wait for the devices at each step
        samples += len(images)
    return total.item() / samples, samples


@torch.no_grad()
def evaluate(pipe: bp.Pipeline, loader: DataLoader[Any]) -> float:
    """Return the share of images whose digit is found."""
    pipe.eval()
    right, samples = torch.zeros((), device=pipe.output_device), 0
    for images, labels in loader:
        found = pipe(images).argmax(1)
        right += (found == labels.to(found.device)).sum()
        samples += len(images)
    return right.item() / samples


def save(path: Path, **state: Any) -> None:
    """Write a checkpoint, so that an interrupt leaves the earlier one whole."""
    torch.save(state, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def command_line() -> argparse.Namespace:
    """Return the options that were given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=Path("runs/digits"))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--chunks", type=int, default=4, help="micro-batches in a batch")
    parser.add_argument("--workers", type=int, default=0, help="processes that load the data")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train, with a checkpoint after each epoch; go on from the one that is there."""
    options = command_line()
    options.into.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(message)s",
        handlers=[logging.StreamHandler(), logging.FileHandler(options.into / "log.txt")],
    )

    torch.manual_seed(options.seed)
    training_data, test_data = random_split(digits(), [0.8, 0.2])
    loading = {"batch_size": options.batch_size, "num_workers": options.workers}
    training_loader = DataLoader(training_data, shuffle=True, **loading)
    test_loader = DataLoader(test_data, **loading)

    pipe = bp.Pipeline(Classifier(), devices=devices_for(2), chunks=options.chunks)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    done, best = 0, 0.0
    checkpoint = options.into / "last.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu")
        pipe.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        done, best = state["done"], state["best"]
        log.info("resumed after epoch %d", done)
    log.info("%d parameters on %s", sum(p.numel() for p in pipe.parameters()), pipe.devices)

    for epoch in range(done + 1, options.epochs + 1):
        torch.manual_seed(options.seed + epoch)  # order and dropout of an epoch, also when resumed
        loss, samples = train(pipe, training_loader, optimizer)
        accuracy = evaluate(pipe, test_loader)
        log.info("epoch %d: loss %.5f of %d, accuracy %.4f", epoch, loss, samples, accuracy)
        scheduler.step()
        best = max(best, accuracy)
        state = {
            "model": pipe.state_dict(),  # the plain model's keys
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "done": epoch,
            "best": best,
        }
        save(checkpoint, **state)
        if accuracy == best:
            save(options.into / "best.pt", **state)
    log.info("best accuracy: %.4f", best)
    pipe.close()


if __name__ == "__main__":
    main()
