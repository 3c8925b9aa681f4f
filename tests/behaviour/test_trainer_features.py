"""The features of Transformers' trainer, with a pipeline as the model."""

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate")

import tokenizers
import transformers
from transformers import (
    EarlyStoppingCallback,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
)

import blockpipe as bp
from blockpipe.integrations.transformers import PipelineTrainer, PipelineTrainerMixin

from ..integrations.trainers import PIPELINE, assert_same, gpt, logged, made, texts, train_both
from ..stage_devices import stages

# --- the trainer's own features


def test_evaluation_and_prediction_give_the_plain_runs_numbers(tmp_path):
    """Batches of 5 and 2, and a model that has not been trained before."""

    def metrics(found: Any) -> dict[str, float]:
        return {"mean": float(found.predictions.mean()), "rows": len(found.predictions)}

    plain, ours = (
        made(kind, tmp_path, compute_metrics=metrics, **options)
        for kind, options in [(Trainer, {}), (PipelineTrainer, {"pipeline": PIPELINE})]
    )
    for name in ("eval_loss", "eval_mean", "eval_rows"):
        assert ours.evaluate()[name] == pytest.approx(plain.evaluate()[name], abs=1e-6)
    unlabelled = [{"input_ids": row["input_ids"]} for row in texts()[:7]]
    for rows in (texts()[:7], unlabelled):
        mine, theirs = ours.predict(rows), plain.predict(rows)
        torch.testing.assert_close(mine.predictions, theirs.predictions, rtol=0, atol=1e-6)
        assert mine.predictions.shape == (7, 8, 32)


def test_a_run_is_resumed_by_the_pipeline_and_by_the_plain_trainer(tmp_path):
    """From the same checkpoint, with the optimizer's momentum; the tied weight is saved once."""
    first = made(
        PipelineTrainer,
        tmp_path / "a",
        pipeline=PIPELINE,
        max_steps=2,
        save_steps=2,
        save_strategy="steps",
        lr_scheduler_type="constant",
    )
    first.train()
    checkpoint = str(tmp_path / "a" / "checkpoint-2")
    whole = made(Trainer, tmp_path / "b", max_steps=4, lr_scheduler_type="constant")
    whole.train()
    for kind, options in [(PipelineTrainer, {"pipeline": PIPELINE}), (Trainer, {})]:
        model = GPT2LMHeadModel.from_pretrained(checkpoint, dtype=torch.float64)
        assert torch.equal(model.lm_head.weight, first.model.lm_head.weight.to("cpu"))
        again = made(
            kind, tmp_path / "c", gpt(), max_steps=4, lr_scheduler_type="constant", **options
        )
        again.train(resume_from_checkpoint=checkpoint)
        for mine, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
            torch.testing.assert_close(mine.to("cpu"), theirs, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_best_model_is_loaded_at_the_end(tmp_path):
    """The learning rate is far too high, so that it is not the last one."""
    ours, plain = train_both(
        tmp_path,
        learning_rate=5.0,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        callbacks=[EarlyStoppingCallback(3)],
    )
    assert ours.state.best_global_step == plain.state.best_global_step < 4
    assert_same(ours, plain)


@pytest.mark.cpu("the trainer's autocast is for its own kind of device")
@pytest.mark.slow
def test_mixed_precision_is_the_plain_runs_over_the_same_micro_batches(tmp_path):
    """In bf16, where other micro-batches round otherwise: two of 2 samples a batch of 4. All labels
    count, so that each loss is scaled by the same number."""
    seen = set()
    rows = [row | {"labels": row["input_ids"]} for row in texts()[:16]]

    def model() -> nn.Module:
        made = gpt(dtype=torch.float32)
        made.transformer.h[1].mlp.c_fc.register_forward_hook(lambda *a: seen.add(a[2].dtype))
        return made

    given = {"bf16": True, "train_dataset": rows, "max_steps": 2}
    plain = made(Trainer, tmp_path, model(), per_device_train_batch_size=2,
                 gradient_accumulation_steps=4, **given)  # fmt: skip
    plain.train()
    assert seen == {torch.bfloat16}
    seen.clear()
    ours = made(PipelineTrainer, tmp_path, model(), pipeline={**PIPELINE, "chunks": 2}, **given)
    ours.train()
    assert seen == {torch.bfloat16}
    assert_same(ours, plain)
    assert ours.predict(texts()[:2]).predictions.dtype == "float32"


def test_a_gradient_scaler_scales_each_micro_batch_and_not_the_loss_that_is_logged(tmp_path):
    """As ``fp16`` has one on a GPU."""
    plain, ours = (
        made(kind, tmp_path, **options)
        for kind, options in [(Trainer, {}), (PipelineTrainer, {"pipeline": PIPELINE})]
    )
    for trainer in (plain, ours):
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        trainer.args.max_grad_norm = 0.0
        trainer.train()
    assert logged(plain, "grad_norm")[0] > 5
    assert_same(ours, plain)


def test_gradient_checkpointing_recomputes_and_changes_nothing(tmp_path):
    ours, plain = train_both(
        tmp_path,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    assert ours.model.is_gradient_checkpointing
    assert_same(ours, plain)


class Watching(TrainerCallback):
    """Notes the model of each event, and stops after a step."""

    def __init__(self) -> None:
        self.models: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.models.append(model)
        control.should_training_stop = state.global_step == 1


def test_callbacks_get_the_plain_model_and_the_bar_is_drawn(tmp_path, capsys):
    watching = Watching()
    ours = made(
        PipelineTrainer, tmp_path, pipeline=PIPELINE, callbacks=[watching], disable_tqdm=False
    )
    ours.train()
    assert [type(model) for model in watching.models] == [GPT2LMHeadModel]
    assert ours.state.global_step == 1
    assert "1/2" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_of_model_init_gets_a_pipeline_of_its_own(tmp_path):
    """``model_init`` is called again at each ``train``."""
    ours = made(PipelineTrainer, tmp_path, model_init=lambda: gpt(), pipeline=PIPELINE)
    first = ours.pipe
    ours.train()
    assert ours.pipe.module is ours.model
    assert ours.pipe is not first
    plain = made(Trainer, tmp_path, model_init=lambda: gpt())
    plain.train()
    assert_same(ours, plain)


def test_a_pipeline_is_taken_as_the_model(tmp_path):
    """Its options stay, and so does a sum that the user has asked for."""
    model = bp.begin_blocks(gpt(), {"transformer.h.1": 1})
    pipe = bp.Pipeline(model, devices=stages(2), chunks=4, schedule="gpipe", loss_reduction="sum")
    ours = made(PipelineTrainer, tmp_path, pipe)
    assert ours.pipe is pipe
    assert ours.model is model
    ours.train()
    plain = made(Trainer, tmp_path)
    plain.train()
    assert pipe.loss_reduction == "sum"
    assert_same(ours, plain)


def test_lora_adapters_are_trained_and_saved(tmp_path):
    """With the model wrapped by peft, whose blocks have names of its own."""
    peft = pytest.importorskip("peft")

    def model() -> nn.Module:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights="gaussian",
                                 fan_in_fan_out=True)  # fmt: skip
        return peft.get_peft_model(gpt(), config)

    options = {**PIPELINE, "stages": {"base_model.model.transformer.h.1": 1}}
    given = {"label_smoothing_factor": 0.1, "learning_rate": 1.0}
    plain = made(Trainer, tmp_path / "plain", model(), **given)
    ours = made(PipelineTrainer, tmp_path / "ours", model(), pipeline=options, **given)
    plain.train()
    ours.train()
    assert_same(ours, plain)
    ours.save_model()
    assert (tmp_path / "ours" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_trls_fine_tuning_is_the_plain_runs(tmp_path):
    """``SFTTrainer`` computes its loss itself, and counts tokens and entropy on the way."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")

    class PipelineSFTTrainer(PipelineTrainerMixin, trl.SFTTrainer):
        pass

    rows = datasets.Dataset.from_list(
        [{"input_ids": row["input_ids"].tolist()[: 3 + at % 6]} for at, row in enumerate(texts())]
    )
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({str(n): n for n in range(32)}, unk_token="0")
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="0", eos_token="1"
    )
    given = {"args_class": trl.SFTConfig, "train_dataset": rows, "eval_dataset": rows}
    given |= {"processing_class": tokenizer, "bf16": False, "max_length": 8}
    ours, plain = train_both(tmp_path, kinds=(trl.SFTTrainer, PipelineSFTTrainer), **given)
    assert_same(ours, plain)
    for name in ("entropy", "mean_token_accuracy", "num_tokens"):
        assert logged(ours, name) == pytest.approx(logged(plain, name), abs=1e-6)
