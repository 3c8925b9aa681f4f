"""Checkpoints as files: loaded, saved, and replaced whole."""

import json
import os
import time
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe._common.files.replaced_files import part_of
from blockpipe.errors import UsageError, WeightsError
from blockpipe.weights import save as saving
from blockpipe.weights.safetensors_file import write_tensors
from blockpipe.weights.sources import _open_file, open_weights

from ..stage_devices import assert_close, equal, stages
from .saved_models import X, copies, make, pipeline, same_state

# --- files, in and out


@pytest.mark.parametrize("kind", ["file", "directory", "index", "torch", "bin", "mapping"])
def test_every_kind_of_weights_loads_into_every_kind_of_model(tmp_path, kind):
    """Into a model on meta, into a placed one, and into one that is neither."""
    plain = make()
    saving.save_weights(plain, tmp_path, {}, 10**9 if kind == "file" else 200)
    torch.save(plain.state_dict(), tmp_path / "x.pt")
    where = {"weight_map": dict.fromkeys(plain.state_dict(), "x.pt")}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(where))
    weights = {
        "bin": tmp_path / "pytorch_model.bin.index.json",
        "file": tmp_path / "model.safetensors",
        "directory": str(tmp_path),
        "index": tmp_path / "model.safetensors.index.json",
        "torch": tmp_path / "x.pt",
        "mapping": plain.state_dict(),
    }[kind]
    with torch.device("meta"):
        net = make()
    pipes = pipeline(net, weights=weights), pipeline(), pipeline()
    pipes[0](X.clone())
    pipes[0].load_state_dict(plain.state_dict())  # the running statistics of that call
    pipes[1](X)
    for pipe in pipes[1:]:
        pipe.load_weights(weights)
    for pipe in pipes:
        assert same_state(pipe.state_dict(), plain.state_dict())
    pipes[2](X)
    with torch.device("meta"):
        late = pipeline(make())
    late.load_weights(weights)
    assert_close(late.eval()(X), plain.eval()(X))


def test_what_is_loaded_later_wins():
    """Weights given to the constructor do not come back over a later load."""
    first, second = make(), make()
    pipe = pipeline(make(), weights=first.state_dict())
    pipe.load_state_dict(second.state_dict())
    pipe.eval()(X)
    assert same_state(pipe.state_dict(), second.state_dict())


def test_load_weights_checks_first(tmp_path):
    """A misfit changes nothing."""
    pipe = pipeline()
    pipe(X)
    before = copies(pipe.state_dict())
    state = {**make().state_dict(), "0.bias": torch.zeros(3)}
    torch.save(state, tmp_path / "x.pt")
    fits_not = (
        r"x.pt, which does not fit \(.*test_save.py:\d+\):\n  wrong shape: '0.bias' .stage 0."
    )
    with pytest.raises(WeightsError, match=fits_not):
        pipe.load_weights(tmp_path / "x.pt")
    assert same_state(pipe.state_dict(), before)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_cannot_be_copied_is_found_first():
    """Sparse, quantized and meta sources, expanded targets, other kinds of numbers."""
    quantized = torch.quantize_per_tensor(torch.ones(6, 6), 0.1, 0, torch.qint8)
    odd = {
        "of torch.sparse_coo: pass its to_dense": torch.eye(6).to_sparse(),
        "that is quantized: pass its dequantize": quantized,
        "on the meta device, without values": torch.zeros(6, 6, device="meta"),
    }
    pipe = pipeline()
    before = copies(pipe.state_dict())
    state = {n: t + 1 for n, t in before.items()}
    for why, value in odd.items():
        for load in (pipe.load_weights, pipe.load_state_dict):
            with pytest.raises(WeightsError, match=f"'2.weight' is a tensor {why}"):
                load({**state, "2.weight": value})
    kinds = {
        "2.weight": torch.ones(6, 6, dtype=torch.int8),
        "1.num_batches_tracked": torch.ones(()),
    }
    for name, value in kinds.items():
        with pytest.raises(WeightsError, match=f"wrong kind: '{name}'"):
            pipe.load_weights({**state, name: value})
    assert same_state(pipe.state_dict(), before)

    pipe.module.register_buffer("wide", torch.zeros(1).expand(4))
    before = copies(pipe.state_dict())
    for load in (pipe.load_weights, pipe.load_state_dict):
        with pytest.raises(WeightsError, match="cannot be copied: 'wide' is expanded"):
            load({**state, "wide": torch.ones(4)})
    assert same_state(pipe.state_dict(), before)


def test_a_disk_that_fails_in_the_middle(monkeypatch):
    """The error says that the model holds a part."""
    pipe, state = pipeline(), make().state_dict()

    def read(source, name, into):
        if name == "2.weight":
            raise OSError("Input/output error")
        into.copy_(state[name])

    monkeypatch.setattr("blockpipe.weights.sources.InMemory.read", read)
    with pytest.raises(OSError, match="Input/output") as caught:
        pipe.load_weights(state)
    assert caught.value.__notes__ == ["blockpipe: the model now holds a part of the checkpoint"]


@pytest.mark.parametrize("longer", ["checkpoint", "model"])
def test_names_that_a_wrapper_made_longer_are_explained_quickly(longer):
    """The common prefix is said, and looking for it takes no time in a large model."""
    net = nn.Sequential(*(nn.BatchNorm1d(1) for _ in range(1500)))
    inner = net.state_dict()
    outer = nn.Sequential(OrderedDict(module=net))
    given = {"checkpoint": outer.state_dict(), "model": inner}[longer]
    pipe = bp.Pipeline(net if longer == "checkpoint" else outer)
    start = time.process_time()
    with pytest.raises(WeightsError, match=f"name of the {longer} begins with 'module.'"):
        pipe.load_weights(given)
    assert time.process_time() - start < 5  # it was a minute


def test_mapped_files_are_let_go(tmp_path, monkeypatch):
    """A file of ``torch.save`` is mapped anew after so many bytes, and reads the same."""
    monkeypatch.setattr("blockpipe.weights.sources._MAPPED", 100)
    plain = make()
    torch.save(plain.state_dict(), tmp_path / "x.pt")
    pipe = pipeline()
    pipe.load_weights(tmp_path / "x.pt")
    assert same_state(pipe.state_dict(), plain.state_dict())


def test_shards_follow_the_stages(tmp_path):
    """Shards follow the stages, so that a process reads few files."""
    pipe = pipeline()
    pipe(X)
    pipe.save_weights(tmp_path, max_shard_bytes=200)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    stage_of = {
        n: h.stage for h in (*pipe.recording.parameters, *pipe.recording.buffers) for n in h.names
    }
    stages = [stage_of[n] for n, _ in sorted(index["weight_map"].items(), key=lambda item: item[1])]
    assert stages == sorted(stages)
    assert "4.weight" not in index["weight_map"]  # tied to 0.weight


def test_saving_replaces_what_was_there(tmp_path):
    """Fewer or more shards: no file of the earlier checkpoint stays to be read; others do."""
    (tmp_path / "config.json").write_text("{}")
    pipe = pipeline()
    for limit in (100, 10**9, 200):
        pipe.save_weights(tmp_path, max_shard_bytes=limit)
        names = {path.name for path in tmp_path.iterdir()}
        assert "config.json" in names
        assert ("model.safetensors" in names) == (limit == 10**9)
        assert ("model.safetensors.index.json" in names) == (limit != 10**9)
        assert len({name.rpartition("-of-")[2] for name in names if "-of-" in name}) <= 1
        pipe.load_weights(tmp_path)
    with pytest.raises(UsageError, match="a positive integer for max_shard_bytes, got 0"):
        pipe.save_weights(tmp_path, max_shard_bytes=0)


def test_a_failure_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    """A disk that fills up in the second shard."""
    pipe = pipeline()
    pipe.save_weights(tmp_path, max_shard_bytes=100)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    calls = []

    def full(path, tensors):
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"half")
            raise OSError("No space left on device")
        write_tensors(path, tensors)

    monkeypatch.setattr(saving, "write_tensors", full)
    with pytest.raises(OSError, match="No space left"):
        pipe.save_weights(tmp_path, max_shard_bytes=200)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("limit", [10**9, 100])
def test_a_checkpoint_is_read_as_it_was_opened(tmp_path, limit):
    """Another one is saved in its place before a tensor is read: what was opened stays whole."""
    first, second = pipeline(), pipeline()
    first.save_weights(tmp_path, max_shard_bytes=limit)
    source = open_weights(tmp_path)
    second.save_weights(tmp_path, max_shard_bytes=limit)
    for name, value in first.state_dict().items():
        if name in source.headers:  # tied tensors are there once
            read = torch.zeros(value.shape)
            source.read(name, read)
            assert equal(read, value)


def test_shards_that_are_replaced_while_they_are_opened_are_an_error(tmp_path, monkeypatch):
    """The index is of one checkpoint, and a file may be of the next."""
    first, second = pipeline(), pipeline()
    first.save_weights(tmp_path, max_shard_bytes=100)
    opened, original = [], _open_file

    def opening(path):
        if len(opened) == 1:
            second.save_weights(tmp_path, max_shard_bytes=100)
        opened.append(path)
        return original(path)

    monkeypatch.setattr("blockpipe.weights.sources._open_file", opening)
    with pytest.raises(WeightsError, match="replaced while its files were opened"):
        open_weights(tmp_path)
    assert len(opened) > 2


def test_a_torch_file_that_is_replaced_is_an_error(tmp_path):
    """It is mapped anew from time to time: never another one."""
    path = tmp_path / "model.pt"
    torch.save({"a": torch.ones(4, 4)}, path)
    source = open_weights(path)
    torch.save({"a": torch.zeros(1)}, path)
    with pytest.raises(WeightsError, match="replaced while it was being read"):
        source.read("a", torch.empty(4, 4))


def test_two_that_save_at_once_write_to_files_of_their_own(tmp_path, monkeypatch):
    """Also where both are process 1, in containers; what a killed one left is removed in time."""
    parts = {part_of(tmp_path / "model.safetensors") for _ in range(100)}
    assert len(parts) == 100
    left, fresh, other = parts.pop(), parts.pop(), tmp_path / ".model.safetensors.mine.part"
    for path in (left, fresh, other):
        path.touch()
    for path in (left, other):
        os.utime(path, (1, 1))
    pipeline().save_weights(tmp_path)
    assert [path.exists() for path in (left, fresh, other)] == [False, True, True]


def test_no_directory_is_no_working_directory():
    """An empty path is refused."""
    with pytest.raises(UsageError, match=r"path of a directory for directory, got '' .*pass '\.'"):
        pipeline().save_weights("")


def test_a_plan_that_cannot_be_written_leaves_the_earlier_one(tmp_path, monkeypatch):
    """A full disk loses nothing, and leaves nothing."""
    path = tmp_path / "plan.json"
    first, second = bp.StagePlan([]), bp.StagePlan([bp.Assignment("a", 0, 0)])
    first.save(path)

    def full(file):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        second.save(path)
    assert bp.StagePlan.load(path) == first
    assert list(tmp_path.iterdir()) == [path]


def test_saving_a_plan_removes_what_a_killed_one_left(tmp_path):
    """Only of this plan, and only what has not been written to for an hour."""
    path = tmp_path / "plan.json"
    left, fresh, other = part_of(path), part_of(path), part_of(tmp_path / "plan2.json")
    for part in (left, fresh, other):
        part.touch()
    for part in (left, other):
        os.utime(part, (1, 1))
    bp.StagePlan([]).save(path)
    assert sorted(tmp_path.iterdir()) == sorted([path, fresh, other])


@pytest.mark.parametrize("limits", [(10**9, 200), (100, 200), (200, 10**9), (10**9, 10**9)])
@pytest.mark.parametrize("failing", ["replace", "unlink"])
def test_a_failure_while_renaming_leaves_a_whole_checkpoint(tmp_path, monkeypatch, limits, failing):
    """At every single rename and removal the directory holds a whole checkpoint, old or new."""
    first, second = pipeline(), pipeline()
    states = [copies(pipe.state_dict()) for pipe in (first, second)]
    original = getattr(Path, failing)
    for last in range(20):
        first.save_weights(tmp_path, max_shard_bytes=limits[0])
        left = iter(range(last))

        def fails(path, *args, left=left, **options):
            if path.name.endswith(".part") == (failing == "replace"):
                next(left)
            return original(path, *args, **options)

        monkeypatch.setattr(Path, failing, fails)
        try:
            second.save_weights(tmp_path, max_shard_bytes=limits[1])
            break
        except StopIteration:
            monkeypatch.setattr(Path, failing, original)
            found = pipeline()
            found.load_weights(tmp_path)
            assert any(same_state(found.state_dict(), state) for state in states)
    else:
        pytest.fail("never saved")


def test_as_many_shards_again_fail_without_mixing(tmp_path, monkeypatch):
    """Their names collide: rather no checkpoint for a moment than half of each."""
    pipe = pipeline()
    pipe.save_weights(tmp_path, max_shard_bytes=200)
    monkeypatch.setattr(Path, "replace", lambda *names: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        pipe.save_weights(tmp_path, max_shard_bytes=200)
    with pytest.raises(WeightsError, match="without one index for them"):
        pipe.load_weights(tmp_path)


def test_what_cannot_be_saved(tmp_path):
    """A model without values, a dtype that the format does not have."""
    with torch.device("meta"):
        pipe = pipeline(make())
    with pytest.raises(WeightsError, match="'0.weight' is on the meta device"):
        pipe.save_weights(tmp_path)
    odd = nn.Linear(2, 2, dtype=torch.complex128)
    with pytest.raises(WeightsError, match="'weight' is torch.complex128"):
        bp.Pipeline(odd).save_weights(tmp_path)
    named = nn.Linear(2, 2)
    named.register_buffer("__metadata__", torch.zeros(1))
    with pytest.raises(WeightsError, match="keeps '__metadata__' for itself"):
        bp.Pipeline(named).save_weights(tmp_path)
    two = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    wrapped = nn.Linear(2, 2)
    wrapped.weight = nn.Parameter(two(torch.ones(2, 2), torch.ones(2, 2)))
    with pytest.raises(WeightsError, match="'weight' is a .*keeps its values in other tensors"):
        bp.Pipeline(wrapped).save_weights(tmp_path)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_hugging_face_checkpoints_go_both_ways(tmp_path, kind):
    """A model built on meta loads what ``save_pretrained`` wrote, by its own ``_init_weights`` for
    the rest; what the pipeline saves, ``from_pretrained`` and safetensors' ``load_model`` read."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_model

    if kind == "llama":
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, vocab_size=32, tie_word_embeddings=True, use_cache=False,
        )  # fmt: skip
        mark = "model.layers.1"
    else:
        config = transformers.GPT2Config(
            n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=16, use_cache=False,
            bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        mark = "transformer.h.1"
    plain = transformers.AutoModelForCausalLM.from_config(config).eval()
    plain.save_pretrained(tmp_path / "theirs", max_shard_size="5KB")
    with torch.device("meta"):
        net = transformers.AutoModelForCausalLM.from_config(config)
    bp.begin_blocks(net, {mark: 1})
    ids = torch.randint(0, 32, (4, 8))
    pipe = bp.Pipeline(
        net,
        devices=stages(2),
        chunks=2,
        weights=tmp_path / "theirs",
        init=net._init_weights,
        sample=((), {"input_ids": ids}),
    ).eval()
    assert same_state(net.state_dict(), plain.state_dict())
    assert_close(pipe(input_ids=ids).logits, plain(input_ids=ids).logits)
    pipe.save_weights(tmp_path / "ours", max_shard_bytes=5000)
    config.save_pretrained(tmp_path / "ours")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert same_state(back.state_dict(), plain.state_dict())
    pipe.save_weights(tmp_path / "one")
    fresh = transformers.AutoModelForCausalLM.from_config(config)
    load_model(fresh, tmp_path / "one" / "model.safetensors")
    assert same_state(fresh.state_dict(), plain.state_dict())


def test_buffers_that_timm_saves_in_no_checkpoint_are_reset():
    """Buffers that no checkpoint holds come from the modules' ``reset_parameters``."""
    timm = pytest.importorskip("timm")
    plain = timm.create_model("levit_128s")
    with torch.device("meta"):
        net = timm.create_model("levit_128s")
    bp.begin_blocks(net, {"stages.1": 1})
    images = torch.zeros(4, 3, 224, 224)
    weights = plain.state_dict()
    pipeline(net, cuts=(0,), weights=weights, init="reset_parameters", sample=((images,), {}))
    for pair in zip(plain.named_buffers(), net.named_buffers(), strict=True):
        assert equal(pair[0][1], pair[1][1]), pair[0][0]
