"""Hugging Face's ``Trainer`` on a pipeline: the weights are those of its own plain run."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("accelerate")

import transformers
from accelerate import Accelerator
from transformers import (
    GPT2ForSequenceClassification,
    Trainer,
)

import blockpipe as bp
from blockpipe.errors import UsageError
from blockpipe.integrations.transformers import PipelineTrainer, PipelineTrainerMixin

from ..stage_devices import stages
from .trainers import PIPELINE, assert_same, gpt, made, texts, train_both


def classes() -> list[dict[str, Tensor]]:
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"][0] % 2} for row in texts()]


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
    # Before 5.0 this forward took no further arguments, and the trainer passed no number.
    assert ours.model_accepts_loss_kwargs is (int(transformers.__version__.split(".")[0]) >= 5)
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
    options = {**PIPELINE, "stages": {"wav2vec2.encoder.layers.1": 1}}
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


# --- errors


def test_a_pipeline_and_options_are_refused(tmp_path):
    pipe = bp.Pipeline(bp.begin_blocks(gpt(), {"transformer.h.1": 1}), devices=stages(2), chunks=2)
    with pytest.raises(UsageError, match="pass the options to Pipeline"):
        made(PipelineTrainer, tmp_path, pipe, pipeline={"chunks": 2})


def test_options_beside_the_pipelines_are_refused():
    """They would go to the trainer, which does not know them."""
    with pytest.raises(UsageError, match=r"got devices= beside it .*pipeline=\{'devices': …\}"):
        PipelineTrainer(gpt(), devices=["cpu"] * 2)


def test_the_mixin_stands_before_the_trainer():
    """Or else that trainer would get `pipeline=`, and fail on it."""

    class Other(transformers.Trainer):
        pass

    with pytest.raises(UsageError, match=r"write class Wrong\(PipelineTrainerMixin, Other\)"):

        class Wrong(Other, PipelineTrainerMixin):
            pass

    class Right(PipelineTrainerMixin, Other):
        pass

    class Derived(Right):
        pass


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


@pytest.mark.slow  # importing trl takes seconds
def test_a_pipeline_in_one_of_trls_trainers_names_the_mixin(tmp_path):
    """They ask the model for its configuration first."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    pipe = bp.Pipeline(bp.begin_blocks(gpt(), {"transformer.h.1": 1}), devices=stages(2), chunks=2)
    with pytest.raises(AttributeError, match=r"'config'; this trainer takes.*PipelineTrainerMixin"):
        trl.SFTTrainer(
            pipe,
            trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[]),
            train_dataset=datasets.Dataset.from_list([{"input_ids": [1, 2, 3]}]),
        )


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
