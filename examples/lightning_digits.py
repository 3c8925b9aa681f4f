"""Lightning's trainer with a pipeline: handwritten digits on two stages, with a checkpoint.

    python examples/lightning_digits.py

The data is scikit-learn's digits (1797 images of 8×8 pixels), which its package ships. Runs on the
GPUs of the machine, or on the CPU.
"""

import tempfile
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

import blockpipe as bp
from blockpipe.integrations.lightning import PipelineStrategy

EPOCHS = 6


class Digits(pl.LightningDataModule):
    """Images [n, 1, 8, 8] in 0..1 and labels [n]."""

    def setup(self, stage: str) -> None:
        """Split the data, always in the same way."""
        images, labels = load_digits(return_X_y=True)
        rows = torch.tensor(images / 16.0).float().reshape(-1, 1, 8, 8)
        data = TensorDataset(rows, torch.tensor(labels))
        parts = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
        self.training_data, self.test_data = parts

    def train_dataloader(self) -> DataLoader[Any]:
        """Batches of 64."""
        return DataLoader(self.training_data, batch_size=64, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Batches of 120."""
        return DataLoader(self.test_data, batch_size=120)


class Classifier(pl.LightningModule):
    """One layer on one stage, two on the next; the step runs its own backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        net = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 128),
            nn.ReLU(),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )
        bp.begin_blocks(net, {"3": 1})
        self.net = bp.Pipeline(net, devices=devices(), chunks=4)
        self.accuracy = MulticlassAccuracy(10)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """One optimizer step."""
        images, labels = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.net.forward_backward(images, target=labels, loss_fn=F.cross_entropy).loss
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        optimizer.step()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()

    def on_train_epoch_end(self) -> None:
        """Print the mean loss."""
        loss = self.trainer.callback_metrics["loss"]
        print(f"epoch {self.current_epoch + 1}: loss {loss:.3f}")

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Count what is right."""
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> Any:
        """AdamW, and a cosine for its learning rate."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=4e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)]


def devices() -> list[str]:
    """A device for each of the two stages: the first and the last GPU, or the CPU."""
    gpus = torch.cuda.device_count()
    return ["cuda:0", f"cuda:{gpus - 1}"] if gpus else ["cpu", "cpu"]


def trainer(epochs: int) -> pl.Trainer:
    """A trainer of one process: the pipeline has the GPUs."""
    has_gpus = torch.cuda.is_available()
    return pl.Trainer(
        max_epochs=epochs,
        strategy=PipelineStrategy(),
        accelerator="gpu" if has_gpus else "cpu",
        devices=1,
        precision="bf16-mixed" if has_gpus else "32-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main() -> None:
    """Train half of the epochs, save, resume in a new module, and test."""
    warnings.filterwarnings("ignore", module="lightning")  # of few workers, for so little data
    torch.manual_seed(0)
    data = Digits()
    with tempfile.TemporaryDirectory() as directory:
        first = trainer(EPOCHS // 2)
        first.fit(Classifier(), data)
        first.save_checkpoint(f"{directory}/half.ckpt")
        last = trainer(EPOCHS)
        last.fit(Classifier(), data, ckpt_path=f"{directory}/half.ckpt")
    print(f"test accuracy: {100 * float(last.callback_metrics['accuracy']):.1f} %")


if __name__ == "__main__":
    main()
