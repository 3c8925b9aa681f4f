"""A model under PopTorch's options, each call of which is a whole training step, or inference.

A call numbers the blocks' stages, finds the devices, and passes its batch to a :class:`Pipeline` or
to several of them (:class:`Replicas`), which do all the work.
"""

import copy
from typing import Any

import torch
from torch import nn

from ..._common.callsite import remembers_caller, users_line, warn
from ..._common.nested import map_tensors
from ...batches.batch_dims import Role
from ...batches.microbatch import split
from ...devices.devices import default_devices
from ...errors import PlanError, UsageError
from ...pipeline import Pipeline
from ...recording.record import record
from ...replicas import Replicas
from ...stages.cursor import numbered_by
from .losses import loss_of, without_backward
from .options import Options, ReductionType
from .outputs import OutputMode, Part, chosen, together
from .strategies import Numbering

_TIMED = "measure a step by model.pipeline.profile()"
_NOT_COMPILED = "nothing is compiled: save model.state_dict()"
_MISSING = {
    "cycleCount": _TIMED,
    "getComputeLatency": _TIMED,
    "getHostIpuLatency": _TIMED,
    "getIpuHostLatency": _TIMED,
    "getLatency": _TIMED,
    "getPerfCounters": _TIMED,
    "getAnchoredTensor": "return the tensor from the forward",
    "getTensorNames": "return the tensor from the forward",
    "isAttachedToDevice": "leave it out: a call attaches to the devices itself",
    "compileAndExport": _NOT_COMPILED,
    "loadExecutable": _NOT_COMPILED,
    "save": _NOT_COMPILED,
    "rewrapParametersOf": "leave it out: parameters are the model's own",
    "unwrap": "leave it out: the model is its own",
}
"""The methods of PopTorch's models that these lack, and their replacements."""


def trainingModel(  # noqa: N802 - PopTorch's name
    model: nn.Module,
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **pipeline: Any,
) -> "PoplarExecutor":
    """Make a model each call of which is a training step: forward, backward, optimizer step.

    Args:
        model: a model that returns its loss: alone, as the only 0-d floating-point tensor among its
            outputs (``return out, loss``), or marked by :func:`identity_loss`.
        options: the options, which are copied now.
        optimizer: any of torch's optimizers; ``None`` is plain SGD with a learning rate of 0.01.
        **pipeline: options that PopTorch does not have: ``devices=``, one for each IPU, for all
            copies in a row, and options of :class:`Pipeline` such as ``checkpoint="except_last"``.

    Returns:
        A :class:`PoplarExecutor`.

    Raises:
        UsageError: an argument is not a module, options or an optimizer, or ``**pipeline`` has an
            option that ``options`` decide.

    Source: ``poptorch.trainingModel``.

    Example:
        >>> import torch
        >>> from blockpipe.compat import poptorch
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.body, self.head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
        ...         poptorch.BeginBlock(self.head, ipu_id=1)
        ...     def forward(self, x, y):
        ...         out = self.head(self.body(x))
        ...         return out, torch.nn.functional.mse_loss(out, y)
        >>> opts = poptorch.Options()
        >>> _ = opts.Training.gradientAccumulation(4)
        >>> net = Net()
        >>> training = poptorch.trainingModel(net, opts, torch.optim.SGD(net.parameters(), lr=0.1))
        >>> out, loss = training(torch.ones(8, 4), torch.ones(8, 1))
        >>> out.shape, loss.shape  # of the last micro-batch
        (torch.Size([2, 1]), torch.Size([]))
    """
    return PoplarExecutor(model, options, training=True, optimizer=optimizer, **pipeline)


def inferenceModel(  # noqa: N802 - PopTorch's name
    model: nn.Module, options: Options | None = None, **pipeline: Any
) -> "PoplarExecutor":
    """Make a model each call of which is a forward without gradients.

    A call has ``deviceIterations`` micro-batches in each copy. It does not change the model's mode,
    which a training model may share: call ``model.eval()`` before, and ``model.train()`` after.

    Args:
        model: the model.
        options: the options, which are copied now.
        **pipeline: as for :func:`trainingModel`.

    Returns:
        A :class:`PoplarExecutor`.

    Raises:
        UsageError: options with a gradient accumulation.

    Source: ``poptorch.inferenceModel``.

    Example:
        >>> import torch
        >>> from blockpipe.compat import poptorch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        >>> _ = poptorch.BeginBlock(net[1], ipu_id=1)
        >>> opts = poptorch.Options().deviceIterations(4)
        >>> poptorch.inferenceModel(net.eval(), opts)(torch.ones(8, 4)).shape
        torch.Size([8, 1])
    """
    return PoplarExecutor(model, options, training=False, **pipeline)


# The options decide these, so they must not be passed as well.
_DECIDED = {
    "batch_dims": "the batch is dimension 0 of every tensor",
    "chunks": "call options.Training.gradientAccumulation(n)",
    "loss_reduction": "call options.Training.accumulationAndReplicationReductionType(…)",
    "schedule": "call options.setExecutionStrategy(…)",
}


class PoplarExecutor:
    """The model that :func:`trainingModel` and :func:`inferenceModel` return.

    Other methods and attributes are the model's own (``state_dict``, ``train``, ``eval``). Its
    parameters are trained in place, so nothing has to be copied back.

    Args:
        model: the user's model.
        options: PopTorch's options; ``None``: the default ones.
        training: whether a call is a training step.
        optimizer: the optimizer of a training step; ``None``: SGD with a learning rate of 0.01.
        devices: the devices of the IPUs; ``None``: every accelerator, or the CPU.
        **pipeline: options of :class:`blockpipe.Pipeline`.

    Attributes:
        model: the user's model.
        options: a copy of the options, as they were when this was made.

    Source: ``poptorch.PoplarExecutor``.

    Example:
        >>> import torch
        >>> from blockpipe.compat import poptorch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        >>> _ = poptorch.BeginBlock(net[1], ipu_id=1)
        >>> model = poptorch.inferenceModel(net.eval())
        >>> isinstance(model, poptorch.PoplarExecutor), model(torch.ones(2, 4)).shape
        (True, torch.Size([2, 1]))
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options | None = None,
        *,
        training: bool,
        optimizer: torch.optim.Optimizer | None = None,
        devices: Any = None,
        **pipeline: Any,
    ) -> None:
        _check(model, options, optimizer, pipeline)
        self.model = model
        self.options = copy.deepcopy(options) if options is not None else Options()
        self._training = training
        if not training and self.options.Training.gradient_accumulation > 1:
            raise UsageError(
                "expected no gradient accumulation for inference, got gradientAccumulation("
                f"{self.options.Training.gradient_accumulation}) ({users_line()}); give it options "
                "of its own, with deviceIterations(n) for n micro-batches"
            )
        self._optimizer = optimizer
        if training and optimizer is None:
            self._optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self._given = devices
        self._pipeline_options = pipeline
        self._numbering = Numbering(self.options.strategy)
        self._runner: Pipeline | Replicas | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in _MISSING and not hasattr(self.model, name):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}; {_MISSING[name]}"
            )
        return getattr(self.model, name)

    def __repr__(self) -> str:
        runs = f"{self.options}, not called yet" if self._runner is None else str(self.pipeline)
        return f"{type(self).__name__}({type(self.model).__name__}): {runs}"

    @remembers_caller
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a training step, or inference.

        Args:
            *args: the model's arguments. Dim 0 of every tensor has the samples of all iterations,
                copies and micro-batches, and need not be a multiple of their number.
            **kwargs: the model's keyword arguments.

        Returns:
            The forward's results that ``outputMode`` selects, on the CPU and without graphs. Rows
            of several micro-batches are concatenated; 0-d tensors of several become one row.
        """
        mode, trains = self.options.output_mode, self._training
        if mode is OutputMode.Default:
            mode = OutputMode.Final if trains else OutputMode.All
        with numbered_by(self._numbering):
            runner = self._prepared(args, kwargs)
            parts = (
                self._train(runner, args, kwargs) if trains else self._infer(runner, args, kwargs)
            )
        result = together(chosen(parts, mode, self.options.output_return_period))
        return map_tensors(without_backward, result) if trains else result

    def _train(self, runner: Pipeline | Replicas, args: Any, kwargs: Any) -> list[Part]:
        assert self._optimizer is not None
        parts, batches = [], [(args, kwargs)]
        if self.options.device_iterations > 1:
            each = split(args, kwargs, None, self.options.device_iterations)
            batches = [(batch.args, batch.kwargs) for batch in each]
        for own, named in batches:
            self._optimizer.zero_grad()
            result = runner.forward_backward(*own, loss_fn=loss_of, return_outputs=True, **named)
            self._optimizer.step()
            parts += self._parts(runner, result.outputs)
        return parts

    def _infer(self, runner: Pipeline | Replicas, args: Any, kwargs: Any) -> list[Part]:
        with torch.no_grad():
            return self._parts(runner, runner(*args, **kwargs))

    def _parts(self, runner: Pipeline | Replicas, outputs: list[Any]) -> list[Part]:
        if isinstance(runner, Replicas):
            return [(copy, result) for copy, own in enumerate(outputs) for result in own]
        copies = self.options.replication_factor  # that one pipeline stands for
        return [(at * copies // len(outputs), result) for at, result in enumerate(outputs)]

    # --- what runs it

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of the first copy, for its summary, profile and timeline.

        Stages that the strategy lists by name are known only in calls of this model.

        Raises:
            UsageError: the model has not been called yet.
        """
        runner = self._runner
        if runner is None:
            raise UsageError(
                f"expected a model that has been called, got one that has not ({users_line()}); "
                "call it, or compile(*args)"
            )
        return runner.pipes[0] if isinstance(runner, Replicas) else runner

    def _prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pipeline | Replicas:
        if self._runner is None:
            self._runner = self._made(args, kwargs)
        return self._runner

    def _made(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pipeline | Replicas:
        """Make the runner, on devices for the stages that a first recording finds."""
        options, training = self.options, self.options.Training
        each = training.gradient_accumulation if self._training else options.device_iterations
        whole = each * options.replication_factor
        parts = whole * options.device_iterations if self._training else whole
        sample = split(args, kwargs, None, parts)[0]
        with torch.set_grad_enabled(self._training):
            stages = record(self.model, sample.args, sample.kwargs).num_stages
        ipus = [self._numbering.ipus.get(stage, stage) for stage in range(stages)]
        groups = self._groups(ipus)
        reduction = training.accumulation_and_replication_reduction_type
        given = {
            "chunks": whole if len(groups) == 1 else each,
            "schedule": options.strategy.schedule,
            "loss_reduction": "sum" if reduction is ReductionType.Sum else "mean",
            "batch_dims": {Role.OUTPUT: None},  # which of them come back, the output mode says
            **self._pipeline_options,
        }
        if len(groups) > 1:
            return Replicas(self.model, groups, **given)
        return Pipeline(self.model, devices=groups[0], **given)

    def _groups(self, ipus: list[int]) -> list[list[Any]]:
        """Return the devices of each copy's stages, by the IPUs that the stages name."""
        copies, size = self.options.replication_factor, max(ipus) + 1
        devices = self._given if self._given is not None else default_devices()
        if devices is None:  # on the CPU a number is a thread
            return [[f"cpu:{ipu}" for ipu in ipus]] * copies
        if len(devices) < size:
            raise PlanError(
                f"expected a device for each of the {size} IPUs that blocks name, got "
                f"{len(devices)} ({users_line()}); use fewer IPUs, or pass devices=, in which one "
                "may come several times"
            )
        if len(devices) < copies * size:
            warn(
                f"replicationFactor({copies}) wants {copies * size} devices, and there are "
                f"{len(devices)}: one pipeline runs the others' shares as further micro-batches"
            )
            copies = 1
        return [[devices[copy * size + ipu] for ipu in ipus] for copy in range(copies)]

    # --- other methods that scripts call

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: N802
        """Use this optimizer from the next call on.

        It is not needed after a change in place, such as a scheduler's step.

        Raises:
            UsageError: it is not an optimizer, or this is a model for inference.
        """
        if not self._training:
            raise UsageError(
                f"expected a training model, got one for inference ({users_line()}); make it by "
                "trainingModel(model, options, optimizer)"
            )
        _check_optimizer(optimizer)
        self._optimizer = optimizer

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Find the stages and devices for these arguments, without a step.

        Args:
            *args: the model's arguments, as for a call.
            **kwargs: the model's keyword arguments.
        """
        with numbered_by(self._numbering):
            self._prepared(args, kwargs)

    def isCompiled(self) -> bool:  # noqa: N802
        """Whether stages and devices are known."""
        return self._runner is not None

    def destroy(self) -> None:
        """Move the model back to its old device, and end the threads. The next call starts anew."""
        if self._runner is not None:
            self._runner.unplace()
            self._runner.close()
        self._runner = None

    def detachFromDevice(self) -> None:  # noqa: N802
        """Do the same as :meth:`destroy`."""
        self.destroy()

    def attachToDevice(self) -> None:  # noqa: N802
        """Do nothing: a call attaches to the devices itself."""

    def copyWeightsToHost(self) -> None:  # noqa: N802
        """Do nothing: the weights are the model's own."""

    def copyWeightsToDevice(self) -> None:  # noqa: N802
        """Nothing: the weights are the model's own."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        """Load ``state_dict`` into the model, by its own method and as ``strict`` as asked for."""
        return self.model.load_state_dict(state_dict, strict)


def _check(model: object, options: object, optimizer: object, pipeline: dict[str, Any]) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"expected an nn.Module, got {type(model).__name__} ({users_line()}); pass the model"
        )
    if options is not None and not isinstance(options, Options):
        raise UsageError(
            f"expected Options, got {type(options).__name__} ({users_line()}); pass "
            "poptorch.Options(), and the optimizer as optimizer="
        )
    if optimizer is not None:
        _check_optimizer(optimizer)
    for name in pipeline.keys() & _DECIDED.keys():
        raise UsageError(
            f"expected options of Pipeline that poptorch.Options does not decide, got {name}= "
            f"({users_line()}); {_DECIDED[name]}"
        )


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"expected an optimizer of torch.optim, got {type(optimizer).__name__} "
            f"({users_line()}); pass torch.optim.SGD(model.parameters(), lr=…), for example"
        )
