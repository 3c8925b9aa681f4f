"""PopTorch's ``Options``, which define a step, and its options for IPUs alone.

An option without a meaning on these devices is accepted with one warning if the script's result is
the same without it, and refused with the reason if not. The tables are data, against which a test
checks the users' page.
"""

import enum
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Self

import torch

from ..._common.callsite import users_line, warn
from ..._common.checks import did_you_mean, is_integer
from ...errors import PlanError, UsageError
from .outputs import OutputMode
from .strategies import PipelinedExecution

_COMPILER = "there is no compiler whose result could be kept or described"
_MEMORY = "a GPU's kernels choose their workspace themselves"
_PRECISION = "numbers are what the tensors are; use torch.autocast, or model.half()"

ACCEPTED = {
    "Jit": "nothing is traced: the forward is Python at every step",
    "Precision": _PRECISION,
    "TensorLocations": "pass offload=True to trainingModel for activations in host memory",
    "_Popart": "PopART is not there",
    "appendToLocationExcludes": _COMPILER,
    "autoRoundNumIPUs": "any number of devices works",
    "broadcastBuffers": "copies get the model's buffers at each step",
    "connectionType": "devices are there from the start",
    "enableExecutableCaching": _COMPILER,
    "enableProfiling": "use model.pipeline.profile()",
    "enableStableNorm": "torch's norms are stable",
    "logCycleCount": "use model.pipeline.profile()",
    "logDir": _COMPILER,
    "maxRepeatLogs": "use blockpipe.set_log_level()",
    "modelName": _COMPILER,
    "relaxOptimizerAttributesChecks": "an optimizer's attributes are torch's",
    "setAvailableMemoryProportion": _MEMORY,
    "showCompilationProgressBar": "a long recording shows its progress by itself",
    "sourceLocationExcludes": _COMPILER,
    "syncPattern": "devices wait for each other where one needs the other's tensors",
    "useIpuId": "pass devices= to trainingModel",
    "useIpuModel": "without an accelerator the stages are on the CPU",
}
"""Options that are accepted with a warning, by name, and why they do nothing."""

ACCEPTED_IN_TRAINING = {
    "setConvolutionDithering": _MEMORY,
    "setMeanAccumulationAndReplicationReductionStrategy": (
        "each micro-batch's loss is weighed before its backward"
    ),
}
"""The same of ``Options.Training``."""

REFUSED = {
    "Distributed": (
        "every process has its own pipeline; all-reduce gradients between the steps, or use one "
        "process and replicationFactor"
    ),
    "anchorTensor": "return the tensor from the forward",
    "enableSyntheticData": "the results would be those of the real data; pass torch.randn batches",
    "inputReplicaGrouping": "every copy gets a share of its own of each input",
    "loadFromFile": "call the options' methods in the script",
    "updatableNamedBuffers": "buffers are the model's: write to them between two calls",
    "useOfflineIpuTarget": "there is nothing to compile without a device",
}
"""Options that would change the script's result, and what to do instead."""

REFUSED_IN_TRAINING = {
    "setAutomaticLossScaling": "train in bfloat16 by torch.autocast, which needs no scaling",
}
"""The same of ``Options.Training``."""


class ReductionType(enum.Enum):
    """The reduction of the gradients of micro-batches and copies to those of the step."""

    Mean = "mean"
    Sum = "sum"
    NoReduction = "none"


class TrainingOptions:
    """The options for training alone, ``Options().Training``."""

    def __init__(self) -> None:
        self.gradient_accumulation = 1
        self.accumulation_and_replication_reduction_type = ReductionType.Mean

    def gradientAccumulation(self, gradient_accumulation: int) -> Self:  # noqa: N802
        """Set the number of micro-batches of a step in each copy.

        Args:
            gradient_accumulation: a positive integer; with few micro-batches, stages are idle
                longer.

        Returns:
            These options.

        Raises:
            PlanError: it is not a positive integer.
        """
        self.gradient_accumulation = _from_one("gradientAccumulation", gradient_accumulation)
        return self

    def accumulationAndReplicationReductionType(  # noqa: N802
        self, reduction_type: ReductionType
    ) -> Self:
        """Make gradients the mean over micro-batches and copies, or their sum.

        This is independent of the model's own reduction over a micro-batch.

        Args:
            reduction_type: ``ReductionType.Mean``, under which uneven parts count by their samples,
                or ``ReductionType.Sum``.

        Returns:
            These options.

        Raises:
            UsageError: it is neither ``ReductionType.Mean`` nor ``ReductionType.Sum``.
        """
        if reduction_type not in (ReductionType.Mean, ReductionType.Sum):
            raise UsageError(
                f"expected ReductionType.Mean or ReductionType.Sum, got {reduction_type!r} "
                f"({users_line()}); without a reduction there is no gradient for the optimizer"
            )
        self.accumulation_and_replication_reduction_type = reduction_type
        return self

    accumulationReductionType = accumulationAndReplicationReductionType  # noqa: N815 - its old name

    def __getattr__(self, name: str) -> Any:
        return _elsewhere(self, "Training", name, ACCEPTED_IN_TRAINING, REFUSED_IN_TRAINING)


class Options:
    """The options of a run: copies, micro-batches, strategy, and the results of a call.

    Every method changes one option and returns these options.

    Source: ``poptorch.Options``.

    Example:
        >>> from blockpipe.compat import poptorch
        >>> opts = poptorch.Options().replicationFactor(2)
        >>> opts.Training.gradientAccumulation(3).gradient_accumulation
        3
        >>> opts
        Options(replicationFactor=2, gradientAccumulation=3)
    """

    def __init__(self) -> None:
        self.Training = TrainingOptions()
        self.replication_factor = 1
        self.device_iterations = 1
        self.output_mode = OutputMode.Default
        self.output_return_period = 1
        self.strategy = PipelinedExecution()

    def replicationFactor(self, replication_factor: int) -> Self:  # noqa: N802
        """Set the number of copies of the pipeline that share each batch.

        Each copy is on devices of its own. If there are not enough devices, one pipeline runs the
        others' shares as further micro-batches, and a warning says so.

        Args:
            replication_factor: a positive integer.

        Raises:
            PlanError: it is not a positive integer.
        """
        self.replication_factor = _from_one("replicationFactor", replication_factor)
        return self

    def deviceIterations(self, device_iterations: int) -> Self:  # noqa: N802
        """Set the number of batches of a call; in training, each has a step of the optimizer.

        Args:
            device_iterations: a positive integer.

        Raises:
            PlanError: it is not a positive integer.
        """
        self.device_iterations = _from_one("deviceIterations", device_iterations)
        return self

    def setExecutionStrategy(self, strategy: PipelinedExecution) -> Self:  # noqa: N802
        """Set the stages, and whether they overlap.

        Args:
            strategy: a :class:`PipelinedExecution` or :class:`ShardedExecution`.

        Raises:
            UsageError: it is not a strategy.
        """
        if not isinstance(strategy, PipelinedExecution):
            raise UsageError(
                "expected PipelinedExecution(…) or ShardedExecution(…), got "
                f"{type(strategy).__name__} ({users_line()}); pass one of them, with its brackets"
            )
        self.strategy = strategy
        return self

    def outputMode(  # noqa: N802
        self, output_mode: OutputMode, output_return_period: int | None = None
    ) -> Self:
        """Choose the micro-batches whose results a call returns.

        Args:
            output_mode: see :class:`OutputMode`.
            output_return_period: n, for ``OutputMode.EveryN``.

        Raises:
            UsageError: it is not an :class:`OutputMode`.
            PlanError: ``EveryN`` is passed without a positive period.
        """
        if not isinstance(output_mode, OutputMode):
            raise UsageError(
                f"expected an OutputMode, got {output_mode!r} ({users_line()}); pass "
                "OutputMode.All, Final, Sum, EveryN or Default"
            )
        if output_mode is OutputMode.EveryN:
            self.output_return_period = _from_one("output_return_period", output_return_period)
        self.output_mode = output_mode
        return self

    def anchorMode(  # noqa: N802
        self, anchor_mode: OutputMode, anchor_return_period: int | None = None
    ) -> Self:
        """Do the same as :meth:`outputMode`, under its old name.

        Args:
            anchor_mode: its ``output_mode``.
            anchor_return_period: its ``output_return_period``.
        """
        return self.outputMode(anchor_mode, anchor_return_period)

    def randomSeed(self, random_seed: int) -> Self:  # noqa: N802
        """Call ``torch.manual_seed(random_seed)`` at once."""
        torch.manual_seed(random_seed)
        return self

    @property
    def chunks(self) -> int:
        """The number of micro-batches of one training step, in all copies."""
        return self.Training.gradient_accumulation * self.replication_factor

    def __getattr__(self, name: str) -> Any:
        return _elsewhere(self, "Options", name, ACCEPTED, REFUSED)

    def __repr__(self) -> str:
        said = {
            "replicationFactor": (self.replication_factor, 1),
            "deviceIterations": (self.device_iterations, 1),
            "gradientAccumulation": (self.Training.gradient_accumulation, 1),
            "outputMode": (self.output_mode, OutputMode.Default),
            "setExecutionStrategy": (self.strategy, None),
        }
        if not self.strategy.stages and type(self.strategy) is PipelinedExecution:
            said["setExecutionStrategy"] = (None, None)
        changed = [f"{name}={value}" for name, (value, usual) in said.items() if value != usual]
        return f"Options({', '.join(changed)})"


def _from_one(name: str, number: object) -> int:
    if not is_integer(number, 1):
        raise PlanError(
            f"expected a whole number from 1 on, got {name}({number!r}) ({users_line()}); pass 1 "
            "for none of it"
        )
    return number


class _Accepted:
    """A group of options without a meaning here."""

    def __init__(self, group: str, why: str) -> None:
        self._group, self._why = group, why

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _accepting(self, f"{self._group}.{name}", self._why)


def _accepting(options: Any, name: str, why: str) -> Callable[..., Any]:
    def accept(*args: Any, **kwargs: Any) -> Any:
        warn(f"{name} does nothing here: {why}")
        return options

    return accept


def _elsewhere(
    options: Any, group: str, name: str, accepted: Mapping[str, str], refused: Mapping[str, str]
) -> Any:
    """Return a method for an option that has no meaning here.

    Raises:
        UsageError: the option is refused.
        AttributeError: there is no such option.
    """
    if name in accepted:
        if name in ("Jit", "Precision", "TensorLocations", "_Popart"):
            return _Accepted(name, accepted[name])
        return _accepting(options, name, accepted[name])
    if name in refused:
        _refuse(f"{group}.{name}", refused[name])
    own = [known for known in dir(type(options)) if not known.startswith("_")]
    hint = did_you_mean(name, [*own, *accepted, *refused], otherwise="")
    if group == "Options" and hasattr(TrainingOptions, name):
        hint = f"it is one of Training: Options().Training.{name}(…)"
    elif group == "Training" and (hasattr(Options, name) or name in ACCEPTED or name in REFUSED):
        hint = f"it is no option of training alone: call Options().{name}(…) on a line of its own"
    text = f"{type(options).__name__!r} object has no attribute {name!r}"
    raise AttributeError(f"{text}; {hint}" if hint else text)


def _refuse(name: str, remedy: str) -> NoReturn:
    raise UsageError(
        f"{name} cannot be done on these devices, and the script would do something else without "
        f"it ({users_line()}); {remedy}"
    )
