"""A program for ``test_materialize``: models and limits on memory, with processes for devices.

``python -m tests.limited stages DIRECTORY``: a model whose parameters are twice the limit that is
set for the process is recorded, planned, and loaded, each stage by a process of its own.
``python -m tests.limited peak DIRECTORY``: what a whole model's loading takes besides the model.
"""

import json
import math
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import blockpipe as bp

MIB = 2**20
WIDTH = 4096
LAYER = 64 * MIB  # WIDTH * WIDTH * 4
A_STAGE, A_SHARD = 2, 3  # layers
ROOM = 64 * MIB  # for everything that is not a parameter


def status(key: str) -> int:
    """A figure of this process, in bytes, as Linux has it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def meta_net(layers: int, a_stage: int) -> nn.Sequential:
    """Linear layers without memory, so many a stage."""
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    starts = range(a_stage, layers, a_stage)
    return bp.begin_blocks(net, {str(n): n // a_stage for n in starts})


def write_shards(directory: Path, layers: int, dtype: torch.dtype = torch.float32) -> None:
    """A checkpoint of sparse files: zeros, and a number at both ends of each tensor."""
    code = {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
    size = WIDTH * WIDTH * dtype.itemsize
    where = {f"{n}.weight": f"shard-{n // A_SHARD}.safetensors" for n in range(layers)}
    for name in dict.fromkeys(where.values()):
        held = [n for n in range(layers) if where[f"{n}.weight"] == name]
        entries = {
            f"{n}.weight": {
                "dtype": code,
                "shape": [WIDTH, WIDTH],
                "data_offsets": [i * size, (i + 1) * size],
            }
            for i, n in enumerate(held)
        }
        header = json.dumps(entries).encode()
        with (directory / name).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            start = file.tell()
            file.truncate(start + len(held) * size)
            for i, n in enumerate(held):
                number = bytes(torch.tensor([float(n + 1)], dtype=dtype).view(torch.uint8).tolist())
                for at in (i * size, (i + 1) * size - len(number)):
                    file.seek(start + at)
                    file.write(number)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))


def in_a_process(work: Callable[[], dict[str, object]]) -> dict[str, object]:
    """Run in a process of its own, with its memory figures in the result."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            result = {**work(), "resident": status("VmHWM"), "data": status("VmData")}
            os.write(writing, json.dumps(result).encode())
            os._exit(0)
        finally:
            os._exit(1)  # with its traceback on stderr
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        said = file.read()
    assert os.waitpid(child, 0)[1] == 0
    return dict(json.loads(said))


def is_loaded(net: nn.Sequential, layers: range) -> bool:
    """Whether just these layers have their values, by the numbers at both ends."""
    for n, layer in enumerate(net):
        weight = layer.weight
        if weight.is_meta != (n not in layers):
            return False
        if n in layers and not (
            weight[0, 0] == weight[-1, -1] == n + 1 and weight.any(1).sum() == 2
        ):
            return False
    return True


def stages(directory: Path) -> dict[str, object]:
    """Twice the limit, a stage at a time."""
    bp.record(meta_net(2, 1), torch.zeros(1, WIDTH))  # what torch imports when first used
    limit = status("VmData") + A_STAGE * LAYER + ROOM
    layers = math.ceil(2 * limit / (A_STAGE * LAYER)) * A_STAGE
    count = layers // A_STAGE
    write_shards(directory, layers)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    net = meta_net(layers, A_STAGE)
    recording = bp.record(net, torch.zeros(1, WIDTH))
    devices = ["cpu"] * count

    def load(stage: int) -> dict[str, object]:
        bp.materialize(net, recording, devices, weights=directory, stages=[stage])
        own = range(stage * A_STAGE, (stage + 1) * A_STAGE)
        return {"loaded": is_loaded(net, own)}

    def load_all() -> dict[str, object]:
        try:
            bp.materialize(net, recording, devices, weights=directory)
        except (RuntimeError, MemoryError) as error:
            return {"refused": str(error), "loaded": not is_loaded(net, range(0))}
        return {}

    return {
        "limit": limit,
        "parameters": layers * LAYER,
        "stage": A_STAGE * LAYER,
        "planned": recording.num_stages == count,
        "before": status("VmRSS"),
        "processes": [in_a_process(lambda k=k: load(k)) for k in range(count)],
        "whole": in_a_process(load_all),
    }


def peak(directory: Path) -> dict[str, object]:
    """One process loads everything, from each kind of checkpoint."""
    layers = 4
    write_shards(directory, layers)
    half = directory / "half"
    half.mkdir()
    write_shards(half, layers, torch.bfloat16)
    file = directory / "net.pt"

    def save() -> dict[str, object]:
        tensors = {f"{n}.weight": torch.zeros(WIDTH, WIDTH) for n in range(layers)}
        for n, tensor in enumerate(tensors.values()):
            tensor[0, 0] = tensor[-1, -1] = n + 1
        torch.save(tensors, file)
        return {}

    in_a_process(save)
    net = meta_net(layers, 2)
    recording = bp.record(net, torch.zeros(1, WIDTH))

    def load(weights: Path) -> dict[str, object]:
        before = status("VmRSS")
        bp.materialize(net, recording, ["cpu"] * 2, weights=weights)
        taken = status("VmHWM") - before - layers * LAYER
        return {"loaded": is_loaded(net, range(layers)), "more": taken}

    return {
        "layer": LAYER,
        **{where.name: in_a_process(lambda w=where: load(w)) for where in (half, file)},
        "same": in_a_process(lambda: load(directory / "model.safetensors.index.json")),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"stages": stages, "peak": peak}[sys.argv[1]](Path(sys.argv[2]))))
