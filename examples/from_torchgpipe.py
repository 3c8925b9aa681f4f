"""A torchgpipe script with its imports changed: a U-Net with named skips, trained by ``GPipe``.

    python examples/from_torchgpipe.py
    python examples/from_torchgpipe.py --partitions 4 --steps 100

It learns to find the disks in noisy images, which are made here. The model and the loop are
torchgpipe's; the last lines show what else a pipeline can do.
"""

import argparse
from collections.abc import Generator

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from blockpipe.compat.torchgpipe import GPipe
from blockpipe.compat.torchgpipe.balance import balance_by_time
from blockpipe.compat.torchgpipe.skip import Namespace, pop, skippable, stash

BATCH, SIZE, CHUNKS = 32, 32, 4


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions with batch norm."""
    return nn.Sequential(
        *(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()),
        *(nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()),
    )


@skippable(stash=["skip"])
class Down(nn.Module):
    """A level on the way down: keeps what it has found for the way up."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.block = block(inputs, outputs)

    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        found = self.block(x)
        yield stash("skip", found)
        return F.max_pool2d(found, 2)


@skippable(pop=["skip"])
class Up(nn.Module):
    """A level on the way up, beside the one that stashed."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.block = block(inputs + outputs, outputs)

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        skip = yield pop("skip")
        return self.block(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1))


def unet() -> nn.Sequential:
    """Two levels, each with a namespace of its own for its skip."""
    outer, inner = Namespace(), Namespace()
    return nn.Sequential(
        Down(1, 8).isolate(outer),
        Down(8, 16).isolate(inner),
        block(16, 32),
        Up(32, 16).isolate(inner),
        Up(16, 8).isolate(outer),
        nn.Conv2d(8, 1, 1),
    )


def disks() -> tuple[Tensor, Tensor]:
    """Noisy images, and where the disk is in each."""
    grid = torch.arange(SIZE, dtype=torch.float)
    centre, radius = torch.rand(BATCH, 2, 1, 1) * SIZE, 4 + 4 * torch.rand(BATCH, 1, 1)
    rows, columns = grid[:, None] - centre[:, 0], grid[None, :] - centre[:, 1]
    mask = (rows.square() + columns.square() < radius.square()).float()[:, None]
    return mask + 0.5 * torch.randn_like(mask), mask


def main() -> None:
    """Balance, train, and look at a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)

    net = unet()
    gpus = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    count = options.partitions  # may share devices
    devices = [i * gpus // count if gpus else "cpu" for i in range(count)]
    balance = balance_by_time(count, net, disks()[0][: BATCH // CHUNKS])
    model = GPipe(net, balance, devices=devices, chunks=CHUNKS, deferred_batch_norm=True)
    print(f"balance: {balance} on {[str(device) for device in model.devices]}")

    optimizer = optim.Adam(model.parameters(), lr=0.01)
    in_device, out_device = model.devices[0], model.devices[-1]
    for step in range(options.steps):
        images, masks = disks()
        optimizer.zero_grad()
        output = model(images.to(in_device))
        loss = F.binary_cross_entropy_with_logits(output, masks.to(out_device))
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")
    print(f"saved as: {next(iter(model.state_dict()))}, …")

    # Beyond torchgpipe: 1F1B holds fewer micro-batches at once, and a step can be looked at.
    optimizer.zero_grad()
    model.checkpoint = "never"
    images, masks = disks()
    result = model.forward_backward(
        images, target=masks, loss_fn=F.binary_cross_entropy_with_logits
    )
    print(f"forward_backward: loss {result.loss.item():.3f}")
    print(model.verify(images, target=masks, loss_fn=F.binary_cross_entropy_with_logits))


if __name__ == "__main__":
    main()
