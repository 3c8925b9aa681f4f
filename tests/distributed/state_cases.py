"""What several processes run together: a pipeline's state, saved with some stages and loaded with
others."""

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import blockpipe as bp
from blockpipe.distributed import DistributedPipeline
from blockpipe.errors import WeightsError

from .cases import mean_square
from .models import gpt, ids

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def net(stages: int) -> nn.Module:
    """Three layers, with a buffer, on some stages."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 6))
    return bp.begin_blocks(model, {str(stage + 1): stage for stage in range(1, stages)})


def batch() -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """One folder for all processes; the first one's."""
    with tempfile.TemporaryDirectory() as own:
        given = [own]
        dist.broadcast_object_list(given, 0)
        yield Path(given[0])
        dist.barrier()


def train(pipe: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    x, y = batch()
    for _ in range(steps):
        optimizer.zero_grad()
        pipe.forward_backward(x, target=y, loss_fn=mean_square)
        optimizer.step()


def adam(pipe: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pipe.parameters(), lr=0.05)


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def one_process(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The plain model in a pipeline of three stages of this process, trained."""
    model = net(3)
    pipe = bp.Pipeline(model, devices=["cpu"] * 3, chunks=4)
    optimizer = adam(pipe)
    train(pipe, optimizer, steps)
    return model, optimizer


def saved_with_two_stages_and_loaded_with_one_and_three(rank: int, ranks: int) -> None:
    """Sharded, with AdamW's state: training goes on as if it had not stopped."""
    two, one = dist.new_group([0, 1]), dist.new_group([2])
    x, _ = batch()
    options: dict[str, Any] = {"sample": x, "chunks": 4}
    with shared_folder() as folder:
        if rank < 2:
            pipe = DistributedPipeline(net(2), group=two, **options)
            optimizer = adam(pipe)
            train(pipe, optimizer, 2)
            state = {"train": pipe.sharded_state(optimizer)}
            dcp.save(state, checkpoint_id=folder / "two", process_group=two)
            own = pipe.sharded_state().state_dict()["model"]
            assert own.keys() == {n for n in net(2).state_dict() if (n > "2") == bool(rank)}
        dist.barrier()
        expected = one_process(3)[0].state_dict()
        if rank == 2:
            pipe = DistributedPipeline(net(1), group=one, **options)
            optimizer = adam(pipe)
            state = {"train": pipe.sharded_state(optimizer)}
            dcp.load(state, checkpoint_id=folder / "two", process_group=one)
            train(pipe, optimizer, 1)
            same(pipe.state_dict(), expected)
        pipe = DistributedPipeline(net(3), **options)
        optimizer = adam(pipe)
        dcp.load({"train": pipe.sharded_state(optimizer)}, checkpoint_id=folder / "two")
        train(pipe, optimizer, 1)
        same(pipe.state_dict(), expected)


def a_plain_model_reads_a_sharded_checkpoint(rank: int, ranks: int) -> None:
    """And what a plain model has saved, by torch's own functions, is read by stages."""
    x, _ = batch()
    with shared_folder() as folder:
        pipe = DistributedPipeline(net(ranks), sample=x, chunks=4)
        optimizer = adam(pipe)
        train(pipe, optimizer, 2)
        dcp.save({"train": pipe.sharded_state(optimizer)}, checkpoint_id=folder / "stages")
        plain = net(1)
        state = {"train": {"model": plain.state_dict()}}
        dcp.load(state, checkpoint_id=folder / "stages", no_dist=True)
        same(plain.state_dict(), one_process(2)[0].state_dict())
        if rank == 0:
            model, trained = one_process(2)
            states = get_optimizer_state_dict(model, trained, options=BY_NAME)
            state = {"train": {"model": model.state_dict(), "optimizer": states}}
            dcp.save(state, checkpoint_id=folder / "plain", no_dist=True)
        dist.barrier()
        pipe = DistributedPipeline(net(ranks), sample=x, chunks=4)
        optimizer = adam(pipe)
        dcp.load({"train": pipe.sharded_state(optimizer)}, checkpoint_id=folder / "plain")
        train(pipe, optimizer, 1)
        same(pipe.state_dict(), one_process(3)[0].state_dict())


def gathered_into_one_process_and_back(rank: int, ranks: int) -> None:
    """A Pipeline with another number of stages loads it, and what that has learned is loaded."""
    x, y = batch()
    pipe = DistributedPipeline(net(ranks), sample=x, chunks=4)
    train(pipe, adam(pipe), 1)
    whole = bp.Pipeline(net(3), devices=["cpu"] * 3, chunks=4, sample=(x,))
    whole.load_state_dict(pipe.state_dict())
    for each in (whole, pipe):
        train(each, torch.optim.SGD(each.parameters(), lr=0.1), 1)
    same(pipe.state_dict(), whole.state_dict())
    train(whole, adam(whole), 1)
    assert not torch.equal(pipe.state_dict()["0.weight"], whole.state_dict()["0.weight"])
    pipe.load_state_dict(whole.state_dict())
    same(pipe.state_dict(), whole.state_dict())
    found = pipe.forward_backward(x, target=y, loss_fn=mean_square).loss
    expected = whole.forward_backward(x, target=y, loss_fn=mean_square).loss
    torch.testing.assert_close(found.item(), expected.item())


def safetensors_are_written_and_each_process_reads_its_own(rank: int, ranks: int) -> None:
    """In several files; tied parameters once; from a model on the meta device, too."""
    given = {"input_ids": ids(8), "labels": ids(8)}
    options: dict[str, Any] = {"sample": ((), given), "chunks": 4, "schedule": "interleaved"}
    model = gpt()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    expected = copy.deepcopy(model.state_dict())
    with shared_folder() as folder:
        pipe = DistributedPipeline(model, **options)
        pipe.save_weights(folder / "weights", max_shard_bytes=5000)
        files = sorted(path.name for path in (folder / "weights").iterdir())
        assert "model.safetensors.index.json" in files
        assert len(files) > 3
        text = (folder / "weights" / "model.safetensors.index.json").read_text()
        assert ("transformer.wte.weight" in text) != ("lm_head.weight" in text)
        with torch.device("meta"):
            empty = gpt()
        buffers = dict(gpt().named_buffers())

        def fill(module: nn.Module) -> None:
            names = {id(m): name for name, m in empty.named_modules()}
            for key, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta:
                    name = f"{names[id(module)]}.{key}"
                    module.register_buffer(key, buffers[name].clone(), persistent=False)

        pipe = DistributedPipeline(empty, weights=folder / "weights", init=fill, **options)
        same(pipe.state_dict(), expected)
        other = [p for p in empty.parameters() if p.is_meta]
        assert len(other) == len(list(empty.parameters())) - len(list(pipe.parameters()))
        assert other
        plain = gpt()
        bp.Pipeline(plain, devices=["cpu"] * 4).load_weights(folder / "weights")
        same(plain.state_dict(), expected)
        (folder / "a file").touch()
        try:
            pipe.save_weights(folder / "a file")
        except bp.BlockpipeError as error:
            what = "expected a directory" if rank == 0 else "rank 0 failed"
            assert what in str(error), str(error)
        else:
            raise AssertionError("not refused")
        pipe.save_weights(folder / "again")


def a_tied_tensor_is_loaded_by_one_of_its_names(rank: int, ranks: int) -> None:
    """As a plain pipeline does, and what does not fit is named with its stage."""
    given = {"input_ids": ids(8), "labels": ids(8)}
    pipe = DistributedPipeline(gpt(), sample=((), given), chunks=4, schedule="interleaved")
    expected = {name: tensor + 1 for name, tensor in gpt().state_dict().items()}
    expected["lm_head.weight"] = expected["transformer.wte.weight"]
    pipe.load_state_dict({n: t for n, t in expected.items() if n != "lm_head.weight"})
    same(pipe.state_dict(), expected)
    try:
        pipe.load_state_dict({**expected, "transformer.h.3.ln_1.bias": torch.zeros(3)})
    except WeightsError as error:
        assert "'transformer.h.3.ln_1.bias' (stage 2): [16] in the model" in str(error)
    else:
        raise AssertionError("not refused")


class Counts(nn.Linear):
    """Has the number of its calls in its state."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def extra_state_is_that_of_its_stage(rank: int, ranks: int) -> None:
    """In the whole state dict, and from a sharded checkpoint."""
    x, y = batch()
    expected = {f"{at}._extra_state": {"calls": 8 + at} for at in range(ranks)}

    def pipe_of() -> DistributedPipeline:
        model = nn.Sequential(*[Counts(6, 6) for _ in range(ranks)])
        bp.begin_blocks(model, {str(at): at for at in range(1, ranks)})
        return DistributedPipeline(model, sample=x, chunks=4)

    def extra(pipe: DistributedPipeline) -> dict[str, Any]:
        return {name: value for name, value in pipe.state_dict().items() if name in expected}

    pipe = pipe_of()
    for _ in range(2):
        pipe.forward_backward(x, target=y, loss_fn=mean_square)
    pipe.module[rank].calls += rank
    assert extra(pipe) == expected
    with shared_folder() as folder:
        dcp.save({"train": pipe.sharded_state()}, checkpoint_id=folder)
        again = pipe_of()
        dcp.load({"train": again.sharded_state()}, checkpoint_id=folder)
        assert extra(again) == expected
