"""A script for torchrun: it trains, saves a checkpoint after each step, and begins from the last."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import blockpipe as bp
from blockpipe.distributed import DistributedPipeline

STEPS = 5


class Mortal(nn.Linear):
    dies = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.dies and type(x) is torch.Tensor:  # in a step, not while it is recorded
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def main(folder: Path, *, dies: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), Mortal(16, 1))
    bp.begin_blocks(net, {"2": 1})
    batches = [(torch.randn(8, 6), torch.randn(8, 1)) for _ in range(STEPS)]
    pipe = DistributedPipeline(net, sample=batches[0][0], chunks=4)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    begin, losses = 0, []
    if (folder / "last").exists():
        saved = torch.load(folder / (folder / "last").read_text())
        begin, losses = saved["step"], saved["losses"]
        pipe.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizers"][rank])
    for step in range(begin, STEPS):
        if dies and rank == 1 and step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            net[2].dies = True
        optimizer.zero_grad()
        x, y = batches[step]
        losses.append(
            pipe.forward_backward(x, target=y, loss_fn=nn.functional.mse_loss).loss.item()
        )
        optimizer.step()
        optimizers = [None, None]
        dist.all_gather_object(optimizers, optimizer.state_dict())
        state = pipe.state_dict()
        if rank == 0:
            now = f"{step}.pt"
            saved = {"step": step + 1, "model": state, "optimizers": optimizers, "losses": losses}
            torch.save(saved, folder / now)
            (folder / "new").write_text(now)
            (folder / "new").rename(folder / "last")
        dist.barrier()
    if rank == 0:
        restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
        torch.save((begin, restarts, losses, state), folder / "result")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), dies=sys.argv[2] == "dies")
