"""What ``_torch/processes.py`` relies on."""

from pathlib import Path

import torch.distributed as dist

from blockpipe._torch import processes


def test_shared_store(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        store = processes.shared_store()
        assert not store.check(["blockpipe/1"]), "torch's store has a key that nobody set"
        store.set("blockpipe/1", "text")
        assert store.check(["blockpipe/1"])
        assert store.get("blockpipe/1") == b"text"
    finally:
        dist.destroy_process_group()
