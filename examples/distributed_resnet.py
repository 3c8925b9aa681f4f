"""Stages in processes of their own, and replicas of them: torchvision's ResNet under torchrun.

    torchrun --standalone --nproc-per-node 4 examples/distributed_resnet.py --replicas 2

Each of the two replicas has two stages, in a process each. They train on random images, under
autocast to bfloat16 and with clipped gradients, and process 0 says how the loss falls. Then they
evaluate, and the plain model takes what they have learned.
"""

import argparse
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torchvision.models import resnet18

import blockpipe as bp
from blockpipe.distributed import DistributedPipeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()

    has_gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpus else "gloo")
    stages = dist.get_world_size() // options.replicas
    mesh = init_device_mesh("cuda" if has_gpus else "cpu", (options.replicas, stages))
    torch.set_num_threads(1)

    torch.manual_seed(0)
    model = resnet18(num_classes=10)
    places = [["layer3"], ["layer2", "layer3"], ["layer2", "layer3", "layer4"]][stages - 2]
    bp.begin_blocks(model, {path: stage for stage, path in enumerate(places, start=1)})

    images, labels = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    x, y = (t.chunk(options.replicas)[mesh.get_local_rank(0)] for t in (images, labels))
    pipe = DistributedPipeline(model, sample=x, mesh=mesh, chunks=4)
    autocast = partial(torch.autocast, "cuda" if has_gpus else "cpu", torch.bfloat16)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.02)
    for step in range(options.steps):
        optimizer.zero_grad()
        with autocast():
            loss = pipe.forward_backward(x, target=y, loss_fn=F.cross_entropy).loss
        norm = pipe.clip_grad_norm_(5.0)
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}, gradient norm {norm.item():.3f}")

    pipe.eval()
    with torch.no_grad(), autocast():
        scores = pipe(x)  # of this replica's share, in each of its processes
    right = (scores.argmax(1).cpu() == y).sum()
    right = right.to(pipe.device)
    dist.all_reduce(right, group=mesh.get_group(0))  # of the processes with the same stages
    if dist.get_rank() == 0:
        print(f"{right.item()} of {len(images)} right")

    state = pipe.state_dict()  # the whole model's, in every process
    if dist.get_rank() == 0:
        resnet18(num_classes=10).load_state_dict(state)
        print(f"{len(state)} tensors gathered, and loaded into the plain model")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
