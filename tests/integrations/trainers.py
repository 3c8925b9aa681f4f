"""Models and helpers of several test files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

from blockpipe.integrations.transformers import PipelineTrainer

from ..stage_devices import stages

PIPELINE = {"devices": stages(2), "chunks": 3, "stages": {"transformer.h.1": 1}}


def gpt(kind: type[nn.Module] = GPT2LMHeadModel, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=16,
        vocab_size=32,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return kind(config).to(dtype)


def texts() -> list[dict[str, Tensor]]:
    """Rows with 8, 5, 2, 7 … labels that count, and one with none."""
    ids = torch.randint(0, 32, (18, 8), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for at, row in enumerate(labels):
        row[: at * 3 % 8] = -100
    labels[3] = -100
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]


def made(kind: type[Trainer], directory: Path, model: Any = None, **given: Any) -> Any:
    """A trainer of two batches of 4 for each step."""
    own = {
        "pipeline",
        "compute_loss_func",
        "compute_metrics",
        "callbacks",
        "model_init",
        "processing_class",
    }
    own |= {"train_dataset", "eval_dataset", "args_class"}
    for_trainer = {name: given.pop(name) for name in own & given.keys()}
    for_args = {
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 5,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.1,
        "optim": "sgd",
        "optim_args": "momentum=0.9",
        "logging_steps": 1,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
        "save_strategy": "no",
    }
    args = for_trainer.pop("args_class", TrainingArguments)(str(directory), **for_args | given)
    for_trainer = {"train_dataset": texts(), "eval_dataset": texts()[:7], **for_trainer}
    if model is None and "model_init" not in for_trainer:
        model = gpt()
    return kind(model, args=args, **for_trainer)


def logged(trainer: Trainer, *names: str) -> list[float]:
    return [log[name] for log in trainer.state.log_history for name in names if name in log]


def assert_same(ours: Trainer, plain: Trainer, atol: float = 1e-6) -> None:
    """The weights, the losses and the norms of the gradients are those of the plain run."""
    assert plain.state.global_step == ours.state.global_step > 0
    for (name, mine), theirs in zip(
        ours.model.named_parameters(), plain.model.parameters(), strict=True
    ):
        mine = mine.to(theirs.device)
        torch.testing.assert_close(
            mine, theirs, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
    for name in ("loss", "grad_norm", "eval_loss"):
        assert logged(ours, name) == pytest.approx(logged(plain, name), abs=1e-5), name
    assert logged(plain, "loss")


def train_both(directory: Path, model: Any = gpt, kinds: Any = None, **given: Any) -> Any:
    """A plain run and a pipelined one, from the same weights."""
    plain_kind, kind = kinds or (Trainer, PipelineTrainer)
    pipeline = given.pop("pipeline", PIPELINE)
    plain = made(plain_kind, directory / "plain", model(), **given)
    ours = made(kind, directory / "ours", model(), pipeline=pipeline, **given)
    plain.train()
    ours.train()
    assert ours.pipe.recording.route == [0, 1]
    return ours, plain
