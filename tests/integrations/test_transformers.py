"""Hugging Face's ``Trainer`` on a pipeline: the weights are those of its own plain run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("accelerate")

import tokenizers
import transformers
from accelerate import Accelerator
from torch.nn import functional as F
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import blockpipe as bp
from blockpipe.errors import UsageError
from blockpipe.integrations.transformers import PipelineTrainer, PipelineTrainerMixin

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


def classes() -> list[dict[str, Tensor]]:
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"][0] % 2} for row in texts()]


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


# --- losses


@pytest.mark.parametrize("accepts", [True, False])
def test_uneven_rows_and_accumulated_batches_give_the_plain_runs_weights(tmp_path, accepts):
    """Whether the model is given the number of items, or returns the mean of each batch."""

    def model() -> nn.Module:
        made = gpt()
        made.accepts_loss_kwargs = accepts
        return made

    ours, plain = train_both(tmp_path, model, max_steps=3)
    assert ours._loss_is_models_own()
    assert_same(ours, plain)


def test_a_loss_that_ignores_the_number_of_items_stays_a_mean(tmp_path):
    """A classifier's forward takes any argument, and its loss is the mean over samples."""
    ours, plain = train_both(
        tmp_path,
        lambda: gpt(GPT2ForSequenceClassification),
        train_dataset=classes(),
        eval_dataset=classes()[:7],
    )
    assert ours.model_accepts_loss_kwargs
    assert_same(ours, plain)


@pytest.mark.parametrize("accepts", [True, False])
def test_rows_without_a_label_that_counts_add_nothing(tmp_path, accepts):
    """Each row is a micro-batch: one of a batch has no label, and then a whole batch has none."""

    def model() -> nn.Module:
        made = gpt()
        made.accepts_loss_kwargs = accepts
        return made

    rows = texts()[4:12]
    for row in (rows[1], *rows[4:]):
        row["labels"] = torch.full_like(row["labels"], -100)
    given = {"train_dataset": rows, "train_sampling_strategy": "sequential", "max_steps": 2}
    given |= {"eval_dataset": rows[:4], "eval_strategy": "steps", "eval_steps": 1}
    given |= {"logging_nan_inf_filter": True}
    ours, plain = train_both(tmp_path, model, pipeline={**PIPELINE, "chunks": 4}, **given)
    assert_same(ours, plain)


def test_the_loss_of_speech_is_added_up_as_its_configuration_says(tmp_path):
    """For CTC: a sum over samples here, whatever labels they have."""
    config = transformers.Wav2Vec2Config(
        vocab_size=8,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        conv_dim=(8, 8),
        conv_stride=(4, 2),
        conv_kernel=(4, 2),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        activation_dropout=0.0,
        layerdrop=0.0,
        apply_spec_augment=False,
        ctc_loss_reduction="sum",
    )

    def model() -> nn.Module:
        torch.manual_seed(0)
        return transformers.Wav2Vec2ForCTC(config).to(torch.float64)

    torch.manual_seed(1)
    sounds = torch.randn(8, 160, dtype=torch.float64)
    rows = [
        {"input_values": sound, "labels": row["input_ids"][:5] % 7 + 1}
        for sound, row in zip(sounds, texts(), strict=False)
    ]
    rows[0]["labels"][2:] = -100
    # The loss turns cuDNN off for the process, which no two micro-batches can do at once.
    options = {**PIPELINE, "stages": {"wav2vec2.encoder.layers.1": 1}, "schedule": "sequential"}
    given = {"train_dataset": rows, "learning_rate": 1e-3, "pipeline": options}
    assert_same(*train_both(tmp_path, model, **given))


class Weighted(Trainer):
    """Its loss is no mean of means: classes have weights."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weight = torch.linspace(0.1, 2.0, 32, dtype=outputs.logits.dtype)
        loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), weight)
        return (loss, outputs) if return_outputs else loss


class PipelineWeighted(PipelineTrainerMixin, Weighted):
    pass


def test_a_compute_loss_of_ones_own_sees_the_whole_batch(tmp_path):
    ours, plain = train_both(tmp_path, kinds=(Weighted, PipelineWeighted))
    assert not ours._loss_is_models_own()
    assert_same(ours, plain)


def test_a_loss_function_of_ones_own_sees_the_whole_batch(tmp_path):
    def squares(outputs, labels, num_items_in_batch):
        counts = labels.ne(-100)
        return outputs.logits[counts].square().sum().sqrt() / num_items_in_batch

    assert_same(*train_both(tmp_path, compute_loss_func=squares))


def test_label_smoothing_shifts_the_labels_of_a_language_model(tmp_path):
    """The trainer finds the model's class behind the pipeline."""
    assert_same(*train_both(tmp_path, label_smoothing_factor=0.3))


class Doubled(Trainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs) * 2


def test_a_training_step_of_ones_own_is_called(tmp_path):
    class PipelineDoubled(PipelineTrainerMixin, Doubled):
        pass

    ours, plain = train_both(tmp_path, kinds=(Doubled, PipelineDoubled))
    assert_same(ours, plain)


def test_a_loss_reduction_of_ones_own_counts_where_the_trainer_counts_nothing(tmp_path):
    """A model whose loss is the mean over all labels but one class."""
    asked = []

    def counted(args: Any, kwargs: dict[str, Any], target: Any) -> Tensor:
        asked.append(kwargs["labels"])
        return (kwargs["labels"][:, 1:] != -100).sum()

    model = gpt()
    model.accepts_loss_kwargs = False
    ours = made(PipelineTrainer, tmp_path, model, pipeline={**PIPELINE, "loss_reduction": counted})
    ours.train()
    assert asked
    plain_model = gpt()
    plain_model.accepts_loss_kwargs = False
    plain = made(Trainer, tmp_path, plain_model)
    plain.train()
    assert_same(ours, plain)


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


@pytest.mark.slow
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


@pytest.mark.slow
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


# --- errors


def test_a_pipeline_and_options_are_refused(tmp_path):
    pipe = bp.Pipeline(bp.begin_blocks(gpt(), {"transformer.h.1": 1}), devices=stages(2), chunks=2)
    with pytest.raises(UsageError, match="pass the options to Pipeline"):
        made(PipelineTrainer, tmp_path, pipe, pipeline={"chunks": 2})


def test_options_that_are_no_mapping_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"expected a mapping of .*; write pipeline=\{'devices'"):
        made(PipelineTrainer, tmp_path, pipeline=["cpu", "cpu"])


def test_a_pipeline_in_the_plain_trainer_is_refused(tmp_path):
    """It would divide the loss of each micro-batch by the labels of the whole batch."""
    pipe = bp.Pipeline(
        bp.begin_blocks(gpt(), {"transformer.h.1": 1}), devices=["cpu"] * 2, chunks=2
    )
    with pytest.raises(UsageError, match="use blockpipe.integrations.transformers.PipelineTrainer"):
        made(Trainer, tmp_path, pipe, train_dataset=texts()).train()


def test_a_trainer_that_replaces_the_pipelines_model_is_refused(tmp_path):
    """As TRL's do for ``peft_config``."""

    class Replacing(Trainer):
        def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(gpt(), *args, **kwargs)

    class PipelineReplacing(PipelineTrainerMixin, Replacing):
        pass

    pipe = bp.Pipeline(bp.begin_blocks(gpt(), {"transformer.h.1": 1}), devices=stages(2), chunks=2)
    with pytest.raises(UsageError, match=r"Replacing, which has put .*pipeline=\{…\}"):
        made(PipelineReplacing, tmp_path, pipe)


def test_several_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Accelerator, "num_processes", property(lambda _: 2))
    with pytest.raises(UsageError, match="expected one process .* got 2 processes"):
        made(PipelineTrainer, tmp_path, pipeline=PIPELINE)


@pytest.mark.parametrize("optimizer", ["lomo", "galore_adamw_layerwise"])
def test_optimizers_that_step_within_the_backward_are_refused(tmp_path, optimizer):
    """They would step once for each micro-batch."""
    with pytest.raises(UsageError, match=f"got optim='{optimizer}', .* choose another optim"):
        made(PipelineTrainer, tmp_path, pipeline=PIPELINE, optim=optimizer)
