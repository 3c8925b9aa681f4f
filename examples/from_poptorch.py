"""A training script for PopTorch with one import changed: handwritten digits on two stages.

    python examples/from_poptorch.py

Compare the line marked below with ``import poptorch``. The data is scikit-learn's digits (1797
images of 8×8 pixels), which its package ships. Runs on the GPUs of the machine, or on the CPU.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

from blockpipe.compat import poptorch  # the line that was changed

EPOCHS = 5


class Classifier(nn.Module):
    """Two convolutions on one IPU, two layers on another; the loss is part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))
        self.loss = nn.CrossEntropyLoss()

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        """Scores for each digit; in training with the loss."""
        with poptorch.Block("features", ipu_id=0):
            features = self.features(images)
        with poptorch.Block("classifier", ipu_id=1):
            scores = self.classifier(features)
        return scores if labels is None else (scores, self.loss(scores, labels))


def digits() -> TensorDataset:
    """Images [n, 1, 8, 8] in 0..1 and labels [n]."""
    images, labels = load_digits(return_X_y=True)
    rows = torch.tensor(images / 16.0).float().reshape(-1, 1, 8, 8)
    return TensorDataset(rows, torch.tensor(labels))


def main() -> None:
    """Train, with the mean loss of each epoch, and test."""
    torch.manual_seed(0)
    training_data, test_data = random_split(digits(), [0.8, 0.2])

    opts = poptorch.Options()
    opts.Training.gradientAccumulation(4)
    opts.replicationFactor(2)
    # 4 samples for each of 4 micro-batches in 2 copies: 32 for each step.
    loader = poptorch.DataLoader(opts, training_data, batch_size=4, shuffle=True)

    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    training_model = poptorch.trainingModel(model, opts, optimizer)
    for epoch in range(EPOCHS):
        model.train()
        losses = [training_model(images, labels)[1].mean() for images, labels in loader]
        print(f"epoch {epoch + 1}: loss {torch.stack(losses).mean():.3f}")
    stages = len(training_model.pipeline.devices)
    print(f"trained on {opts.replication_factor} copies of {stages} stages")

    model.eval()
    test_opts = poptorch.Options().deviceIterations(4)
    test_loader = poptorch.DataLoader(test_opts, test_data, batch_size=30, drop_last=False)
    inference_model = poptorch.inferenceModel(model, test_opts)
    right = sum(
        int((inference_model(images).argmax(1) == labels).sum()) for images, labels in test_loader
    )
    print(f"test accuracy: {100 * right / len(test_data):.1f} %")


if __name__ == "__main__":
    main()
