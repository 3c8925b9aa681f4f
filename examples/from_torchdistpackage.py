"""A training script in torchdistpackage's manner, in one process: handwritten digits on two stages.

    python examples/from_torchdistpackage.py

The model is any one whose forward is a row of layers: it is flattened, cut evenly, and trained by
``forward_backward`` in bfloat16, with clipping over all stages. The data is scikit-learn's digits
(1797 images of 8×8 pixels), which its package ships. Runs on two GPUs of the machine, or on the
CPU.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from blockpipe.compat.torchdistpackage import (
    clip_grad_norm_,
    flatten_model,
    forward_backward,
    forward_eval,
    partition_uniform,
    tpc,
)

STAGES, EPOCHS, MICROBATCHES = 2, 5, 4


class Classifier(nn.Module):
    """Two convolutions and two layers, in a forward that says their order."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()
        )
        self.pool = nn.MaxPool2d(2)
        self.hidden, self.relu, self.out = nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Scores for each digit."""
        features = torch.flatten(self.pool(self.features(images)), 1)
        return self.out(self.relu(self.hidden(features)))


def digits() -> TensorDataset:
    """Images [n, 1, 8, 8] in 0..1 and labels [n]."""
    images, labels = load_digits(return_X_y=True)
    rows = torch.tensor(images / 16.0).float().reshape(-1, 1, 8, 8)
    return TensorDataset(rows, torch.tensor(labels))


def main() -> None:
    """Train, with the mean loss and the last norm of each epoch, and test."""
    torch.manual_seed(0)
    training_data, test_data = random_split(digits(), [0.8, 0.2])
    loader = DataLoader(training_data, batch_size=64, shuffle=True)
    accelerators = torch.accelerator.device_count()
    devices = [i % accelerators for i in range(STAGES)] if accelerators else None  # or share one
    tpc.setup_process_groups([("data", 1), ("pipe", STAGES)], devices=devices)
    autocast_device = torch.accelerator.current_accelerator() if accelerators else "cpu"

    layer_list = ["features", "pool", lambda x: torch.flatten(x, 1), "hidden", "relu", "out"]
    layers = partition_uniform(flatten_model(Classifier(), layer_list, return_list=True))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def forward(inputs: list[Tensor]) -> Tensor:
        images, labels = inputs
        with torch.autocast(str(autocast_device), dtype=torch.bfloat16):
            # Gradients add up over the micro-batches: divided, they are the whole batch's mean.
            return nn.functional.cross_entropy(model(images), labels) / MICROBATCHES

    for epoch in range(EPOCHS):
        losses = []
        for images, labels in loader:
            batch = [images, labels]
            loss = forward_backward(optimizer, forward, None, batch, num_microbatches=MICROBATCHES)
            norm = clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss * MICROBATCHES)
        print(f"epoch {epoch + 1}: loss {torch.stack(losses).mean():.3f}, last norm {norm:.2f}")
    print(f"trained on {tpc.get_group_size('pipe')} stages of one process")

    model.eval()
    right = 0
    for images, labels in DataLoader(test_data, batch_size=120):
        scores = forward_eval(
            lambda x: model(x), images, torch.float32, num_microbatches=MICROBATCHES
        )
        right += int((scores.argmax(1).cpu() == labels).sum())
    print(f"test accuracy: {100 * right / len(test_data):.1f} %")


if __name__ == "__main__":
    main()
