"""Hugging Face's ``Trainer``, with a pipeline in the place of the model.

The trainer keeps the plain model, which callbacks see, which is saved, and whose parameters are
optimized. The pipeline takes the place of ``DataParallel``, as the *wrapped* model that runs. To
pass the pipeline as the model itself was no alternative, because ``Trainer`` looks at the model's
class for its labels, its loss and the way to save it.

A model's own loss is computed for each micro-batch, in ``forward_backward``. A loss of the user
(``compute_loss``, ``compute_loss_func``, label smoothing) is computed once, on the joined outputs,
because it is not known how the values of an arbitrary function for the micro-batches add up.
"""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import convert_to_fp32, send_to_device
from torch import Tensor, nn
from transformers import Trainer
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import find_batch_size

from .._common.callsite import users_line
from .._common.checks import expected
from ..batches.losses import own_loss
from ..batches.microbatch import LossReduction
from ..errors import UsageError
from ..pipeline import Pipeline
from ..stages.marks import begin_blocks

__all__ = ["PipelineTrainer", "PipelineTrainerMixin"]


# No trainer has arguments of these names.
_OPTIONS = ("devices", "chunks", "schedule", "stages")


class PipelineTrainerMixin(Trainer):  # type: ignore[misc]  # which has no types
    """A mixin with which any trainer that derives from ``Trainer`` runs its model as a pipeline.

    Write it before that trainer: ``class PipelineSFTTrainer(PipelineTrainerMixin, SFTTrainer)``.

    Args:
        model: the model, marked or not, or a :class:`Pipeline`. Anything else that the trainer
            takes in its place (``None`` with ``model_init``, a name) works too.
        *args: the trainer's arguments.
        pipeline: options of :class:`Pipeline` (``devices``, ``chunks``, ``schedule``, ``plan`` …),
            and ``stages``, the blocks to mark, as for :func:`begin_blocks`. It must not be given
            together with a :class:`Pipeline`.
        **kwargs: the trainer's keyword arguments.

    ``trainer.model`` is the plain model, ``trainer.pipe`` its pipeline. ``num_items_in_batch`` is
    shared out among the micro-batches by the labels that they have; ``loss_reduction`` is set
    accordingly, unless it is ``"sum"``. One process runs all devices.

    Raises:
        UsageError: there are both a pipeline and options, or options next to ``pipeline``; the
            trainer is written before this class; the trainer has replaced the model; there are
            several processes, DeepSpeed or FSDP; the optimizer steps within the backward.

    Example:
        >>> from transformers import Seq2SeqTrainer
        >>> from blockpipe.integrations.transformers import PipelineTrainerMixin
        >>> class PipelineSeq2SeqTrainer(PipelineTrainerMixin, Seq2SeqTrainer):
        ...     pass
        >>> [cls.__name__ for cls in PipelineSeq2SeqTrainer.__mro__[1:4]]
        ['PipelineTrainerMixin', 'Seq2SeqTrainer', 'Trainer']
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        before = cls.__mro__[: cls.__mro__.index(PipelineTrainerMixin)]
        for base in before:
            if issubclass(base, Trainer) and not issubclass(base, PipelineTrainerMixin):
                raise UsageError(
                    f"expected PipelineTrainerMixin before {base.__name__}, got it behind that in "
                    f"{cls.__name__} ({users_line()}); write class {cls.__name__}"
                    f"(PipelineTrainerMixin, {base.__name__})"
                )

    def __init__(
        self,
        model: Any = None,
        *args: Any,
        pipeline: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        given = model if isinstance(model, Pipeline) else None
        if misplaced := [name for name in _OPTIONS if name in kwargs]:
            raise UsageError(
                f"expected the options of the pipeline in pipeline={{…}}, got {misplaced[0]}= "
                f"beside it ({users_line()}); write pipeline={{{misplaced[0]!r}: …}}"
            )
        if given is not None and pipeline is not None:
            raise UsageError(
                "expected a Pipeline or pipeline={…}, got both "
                f"({users_line()}); pass the options to Pipeline"
            )
        if not isinstance(pipeline, Mapping | None):
            fix = "write pipeline={'devices': […], 'chunks': 8, 'stages': {…}}"
            raise UsageError(
                expected("a mapping of a Pipeline's options", pipeline, for_="pipeline", fix=fix)
            )
        self._pipeline_options = dict(pipeline or {})
        self._pipelined: PipelinedModel | None = None
        super().__init__(model if given is None else given.module, *args, **kwargs)
        if given is not None and given.module is not self.model:
            raise UsageError(
                f"expected a trainer that keeps the pipeline's model, got {type(self).__name__}, "
                f"which has put {type(self.model).__name__} in its place ({users_line()}); pass "
                "the model and pipeline={…}, so that the pipeline is made of the new one"
            )
        self._pipelined = self._made(given)

    @property
    def pipe(self) -> Pipeline:
        """The pipeline that runs the model."""
        assert self._pipelined is not None
        return self._pipelined.pipe

    # --- where Trainer places and wraps the model

    def create_accelerator_and_postprocess(self) -> None:
        """As the trainer's; the process has one pipeline, and not a copy for each device."""
        super().create_accelerator_and_postprocess()
        found = [
            name
            for name, is_on in {
                f"{self.accelerator.num_processes} processes": self.accelerator.num_processes > 1,
                "DeepSpeed": self.is_deepspeed_enabled,
                "FSDP": self.is_fsdp_enabled,
            }.items()
            if is_on
        ]
        if found:
            raise UsageError(
                f"expected one process with all devices, got {' and '.join(found)} "
                f"({users_line()}); start the script with python, and name the devices in "
                "pipeline={'devices': […]}"
            )
        optimizer = str(getattr(self.args.optim, "value", self.args.optim))
        if "lomo" in optimizer or "layerwise" in optimizer:
            raise UsageError(
                f"expected an optimizer that steps after the backward, got optim={optimizer!r}, "
                "which changes a parameter when its gradient arrives, and that is once for each "
                f"micro-batch ({users_line()}); choose another optim"
            )
        if self.args.n_gpu > 1:  # as Trainer does for a model on several devices
            self.args.__dict__.update(_n_gpu=1)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: the pipeline places the model."""

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the model that runs, of the trainer's present model (``model_init`` makes new
        ones)."""
        if self._pipelined is None or self._pipelined.module is not self.model:
            self._pipelined = self._made(None)
        return self._pipelined

    def _made(self, pipe: Pipeline | None) -> "PipelinedModel":
        options = dict(self._pipeline_options)
        if stages := options.pop("stages", None):
            begin_blocks(self.model, stages)
        pipe = Pipeline(self.model, **options) if pipe is None else pipe
        if self.args.torch_compile:
            pipe.compile(backend=self.args.torch_compile_backend, mode=self.args.torch_compile_mode)
        return PipelinedModel(pipe, self.accelerator, self.args.device, _shifts_labels(self.model))

    # --- a step

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """As the trainer's: the model's own loss by ``forward_backward``, any other on the joined
        outputs."""
        if not self._loss_is_models_own():
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss
        assert isinstance(model, PipelinedModel)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        is_scaled = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        if is_scaled:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        if (says := getattr(self, "loss_is_scaled_for_ga", None)) is not None:
            is_scaled = says
        share = 1.0 if is_scaled else 1.0 / self.current_gradient_accumulation_steps
        with self.compute_loss_context_manager():
            return model.forward_backward(inputs, share)

    def _loss_is_models_own(self) -> bool:
        """Whether nothing is between the trainer's loop and the model's own loss."""
        return (
            type(self).compute_loss is Trainer.compute_loss
            and super().training_step.__func__ is Trainer.training_step
            and self.compute_loss_func is None
            and self.label_smoother is None
        )


class PipelineTrainer(PipelineTrainerMixin):
    """``Trainer``, with a pipeline in the place of the model.

    See :class:`PipelineTrainerMixin` for the arguments that ``Trainer`` does not have.

    Example:
        >>> import tempfile, torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
        >>> from blockpipe.integrations.transformers import PipelineTrainer
        >>> model = GPT2LMHeadModel(GPT2Config(
        ...     n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16,
        ...     bos_token_id=0, eos_token_id=0))
        >>> ids = torch.randint(0, 32, (8, 6))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     trainer = PipelineTrainer(
        ...         model,
        ...         TrainingArguments(directory, max_steps=2, disable_tqdm=True, use_cpu=True),
        ...         train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        ...         pipeline={
        ...             "devices": ["cpu"] * 2, "chunks": 4, "stages": {"transformer.h.1": 1}},
        ...     )
        ...     out = trainer.train()
        {...}
        >>> out.global_step
        2
    """


class PipelinedModel(nn.DataParallel[nn.Module]):
    """The model that a trainer's loop runs: the plain model's parameters, and the pipeline's calls.

    It is a ``DataParallel`` in name only, so that Accelerate and libraries on top of it can unwrap
    it; no method of that class runs.

    Args:
        pipe: the pipeline.
        accelerator: the trainer's accelerator, which decides on mixed precision.
        device: the trainer's device, which has its inputs, outputs and losses.
        shifts: whether the model's loss does not use the first label of each row.
    """

    def __init__(
        self, pipe: Pipeline, accelerator: Any, device: torch.device, shifts: bool
    ) -> None:
        nn.Module.__init__(self)
        self.module = pipe.module
        self.__dict__["pipe"] = pipe  # no child: its parameters are those of `module`
        self.pipe: Pipeline
        self._accelerator = accelerator
        self._device = device
        self._shifts = shifts
        self._weights = pipe.loss_reduction = _reduction(pipe, shifts)
        pipe.module.register_forward_pre_hook(_add_items, with_kwargs=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipelined forward; return outputs on the trainer's device, in float32 where
        they come from mixed precision."""
        with self._accelerator.autocast():
            output = self.pipe(*args, **self._by_rows(kwargs))
        if self._accelerator.native_amp:
            output = convert_to_fp32(output)
        return send_to_device(output, self._device)

    def forward_backward(self, inputs: Mapping[str, Any], share: float) -> Tensor:
        """Run a step of the model's own loss; return the loss.

        Args:
            inputs: the model's.
            share: the factor of the loss and the gradients.
        """
        scaler = self._accelerator.scaler

        def loss_of(output: Any) -> Any:
            loss = own_loss(output) * share
            return loss if scaler is None else scaler.scale(loss)

        with self._accelerator.autocast():
            result = self.pipe.forward_backward(**self._by_rows(inputs), loss_fn=loss_of)
        loss = result.loss if scaler is None else result.loss / scaler.get_scale()
        return loss.to(self._device)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Dtypes only: the stages have devices of their own."""
        for dtype in (*args, *kwargs.values()):
            if isinstance(dtype, torch.dtype):
                self.pipe.to(dtype)
        return self

    def _by_rows(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs with each sample's part of ``num_items_in_batch`` in its place.

        A micro-batch adds up those of its own samples (:func:`_add_items`): the sum of its losses
        is divided by them, and weighted by them, which leaves the whole batch's number. Losses that
        are means independently of the number, and a router's auxiliary loss, are weighted rightly.
        """
        inputs = dict(inputs)
        items = inputs.get("num_items_in_batch")
        counts = _labels_that_count(inputs, self._shifts)
        if self._weights == "mean":  # over samples: a model for CTC, which asks for no number
            inputs.pop("num_items_in_batch", None)
        if counts is None or not isinstance(self._weights, _Weights):
            return inputs
        counts = counts.to("cpu", torch.float32)  # looked at there, for each micro-batch
        self._weights.nothing_counts = not counts.any()
        if items is None:
            return inputs
        if self._weights.nothing_counts:
            counts = torch.ones_like(counts)
        inputs["num_items_in_batch"] = counts * (float(items) / counts.sum())
        return inputs


def _reduction(pipe: Pipeline, shifts: bool) -> LossReduction:
    """Return the rule by which the losses of micro-batches add up to the batch's."""
    given, model = pipe.loss_reduction, pipe.module
    if given == "sum" or isinstance(given, _Weights):
        return given
    if given == "mean" and type(model).__name__.endswith("ForCTC"):  # over samples, not labels
        return str(getattr(model.config, "ctc_loss_reduction", "mean"))
    return _Weights(None if given == "mean" else given, shifts)


class _Weights:
    """The weight of a micro-batch's loss: its items, or else the labels that count in it.

    Args:
        given: the user's ``loss_reduction``, if that is a function.
        shifts: whether the model's loss does not use the first label of each row.

    Attributes:
        nothing_counts: whether the batch has no label that counts; then samples do.
    """

    def __init__(self, given: Any, shifts: bool) -> None:
        self.given = given
        self.shifts = shifts
        self.nothing_counts = False

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Any:
        items = kwargs.get("num_items_in_batch")
        if isinstance(items, Tensor) and items.dim():
            return items.sum()
        if self.given is not None:
            return self.given(args, kwargs, target)
        counts = None if self.nothing_counts else _labels_that_count(kwargs, self.shifts)
        return find_batch_size((args, kwargs)) if counts is None else counts.sum()


def _add_items(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the model the sum of its samples' items: a hook of the model's."""
    items = kwargs.get("num_items_in_batch")
    if isinstance(items, Tensor) and items.dim():
        kwargs = {**kwargs, "num_items_in_batch": items.sum()}
    return args, kwargs


def _shifts_labels(model: nn.Module) -> bool:
    """Return whether the model's loss compares each label with the output before it."""
    if callable(base := getattr(model, "get_base_model", None)):  # of peft
        model = base()
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return False
    is_language_model = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    loss_type = getattr(model, "loss_type", None)
    return is_language_model or LOSS_MAPPING.get(loss_type) is ForCausalLMLoss


def _labels_that_count(inputs: Mapping[str, Any], shifts: bool) -> Tensor | None:
    """Return how many labels of each sample count in the loss, as ``Trainer`` counts them;
    ``None``: there are no labels, or they are no tensor."""
    labels = inputs.get("shift_labels")
    if labels is None:
        labels = inputs.get("labels")
        if isinstance(labels, Tensor) and labels.dim() > 1 and shifts:
            labels = labels[..., 1:]
    if not isinstance(labels, Tensor) or not labels.dim():
        return None
    return labels.ne(-100).reshape(len(labels), -1).sum(1)
