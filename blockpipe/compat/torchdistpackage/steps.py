"""``forward_backward``: a step, or an evaluation, from functions for a stage's forward.

A script passes functions anew at each step, mostly closures of its loop. A pipeline wants one model
that stays. So the modules that the functions use are put into one, whose forward calls the
functions of the step at hand; it is kept at the first of these modules, with its pipeline.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..._common.callsite import remembers_caller, users_line
from ..._common.checks import expected, is_integer
from ...errors import PlanError, UsageError
from ...pipeline import Pipeline
from ...stages.marks import Block
from .backward import Backward, through
from .ranks import as_rank, current_ranks
from .topology import refuse_processes, tpc

Forward = Callable[[Any], Any]
_KEPT = "_torchdistpackage_steps"


@dataclass
class _Stage:
    """What one rank passes: its functions and inputs."""

    forward: Forward
    backward: Backward | None
    inputs: list[Tensor]


@remembers_caller
def forward_backward(
    optimizer: torch.optim.Optimizer | None,
    fwd_fn: Forward,
    bwd_fn: Backward | None,
    inputs: Tensor | Sequence[Tensor] | None,
    num_microbatches: int = 1,
    forward_only: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    scatter_gather_tensors: bool = False,
    **pipeline: Any,
) -> Any:
    """Run the forwards and backwards of a step, pipelined, or only the forwards.

    Gradients add up in ``.grad``: their sum over the micro-batches, as there. Divide the loss by
    ``num_microbatches`` for the mean.

    Args:
        optimizer: its gradients are set to ``None`` first; ``None``: nothing is.
        fwd_fn: a micro-batch's forward. It is called with the tensor, or with a list if there are
            several: the output of the stage before, then the stage's own inputs. The last stage
            returns the loss, one element. The modules that it uses are found among its variables.
        bwd_fn: ``(output, gradient)``, which runs a backward of the output of ``fwd_fn``; for the
            loss, which it is called for alone unless under :func:`launch`, the gradient is
            ``None``. What it leaves as the output's gradient is handed on, so that it may scale.
            ``None``: the usual backward.
        inputs: the batch, as a tensor or several; each is split on dim 0. Under :func:`launch`
            those of this rank, and none for a stage that has only the output of the one before.
        num_microbatches: the number of parts; a batch that does not divide makes uneven ones.
        forward_only: whether to evaluate: without gradients and without ``bwd_fn``.
        dtype: of no effect: a tensor that is handed on keeps its own.
        scatter_gather_tensors: of no effect.
        **pipeline: what torchdistpackage has no word for: options of :class:`~blockpipe.Pipeline`,
            such as ``checkpoint="except_last"`` or ``schedule="gpipe"``.

    Returns:
        In training the mean of the micro-batches' losses, 0-d; in evaluation the outputs of the
        whole batch; both without a graph. Under :func:`launch` the last rank has it, and the
        others ``None``.

    Raises:
        PlanError: the number of micro-batches is not a positive integer.
        UsageError: no inputs for the first stage; no module among the variables of ``fwd_fn``; a
            last stage without a loss; several processes.

    Source: ``torchdistpackage.parallel.pipeline_sched.forward_backward``, which returns the loss or
    outputs of the last micro-batch only, and drops the rows that do not divide.

    Example:
        >>> import torch
        >>> from blockpipe.compat.torchdistpackage import forward_backward, partition_uniform, tpc
        >>> tpc.setup_process_groups([("pipe", 2)])
        >>> layers = [torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)]
        >>> model = torch.nn.Sequential(*partition_uniform(layers))
        >>> def fwd_fn(inputs):
        ...     return torch.nn.functional.mse_loss(model(inputs[0]), inputs[1])
        >>> batch = [torch.ones(8, 4), torch.ones(8, 1)]
        >>> loss = forward_backward(None, fwd_fn, None, batch, num_microbatches=4)
        >>> loss.shape, layers[0].weight.grad.shape
        (torch.Size([]), torch.Size([8, 4]))
    """
    refuse_processes()
    if not is_integer(num_microbatches, 1):
        raise PlanError(expected("a positive integer", num_microbatches, for_="num_microbatches"))
    if optimizer is not None:
        optimizer.zero_grad()
    own = _Stage(fwd_fn, None if forward_only else bwd_fn, _as_list(inputs))
    if tpc.is_first_in_pipeline_group() and not own.inputs:
        raise UsageError(expected("the batch, as a tensor or several,", inputs, for_="inputs"))

    def run(stages: list[_Stage]) -> Any:
        pipe = _pipeline_of(stages, forward_only, pipeline)
        pipe.chunks = num_microbatches
        batch = [tensor for stage in stages for tensor in stage.inputs]
        if forward_only:
            with torch.no_grad():
                return pipe(*batch)
        parts = min(num_microbatches, len(batch[0]))
        return pipe.forward_backward(*batch, loss_fn=_loss).loss / parts

    ranks = current_ranks()
    if ranks is None:
        return run([own])
    name = "forward_backward" if not forward_only else "forward_backward(forward_only=True)"
    result = ranks.meet(name, own, run)
    return result if tpc.is_last_in_pipeline_group() else None


@remembers_caller
def forward_eval(
    fwd_fn: Forward,
    inputs: Tensor | Sequence[Tensor] | None,
    dtype: torch.dtype = torch.bfloat16,
    **pipeline: Any,
) -> Any:
    """Run the forward of a batch, without gradients, as one micro-batch.

    Args:
        fwd_fn: as for :func:`forward_backward`.
        inputs: as for :func:`forward_backward`.
        dtype: of no effect.
        **pipeline: as for :func:`forward_backward`; ``num_microbatches=4`` lets stages overlap.

    Returns:
        The last stage's output; under :func:`launch` the other ranks have ``None``.

    Source: ``torchdistpackage.parallel.pipeline_sched.forward_eval``.

    Example:
        >>> import torch
        >>> from blockpipe.compat.torchdistpackage import forward_eval
        >>> model = torch.nn.Linear(4, 2)
        >>> forward_eval(lambda x: model(x), torch.ones(8, 4)).shape
        torch.Size([8, 2])
    """
    given = {"num_microbatches": 1, **pipeline}
    return forward_backward(None, fwd_fn, None, inputs, forward_only=True, dtype=dtype, **given)


def _as_list(inputs: Tensor | Sequence[Tensor] | None) -> list[Tensor]:
    if inputs is None:
        return []
    return [inputs] if isinstance(inputs, Tensor) else list(inputs)


def _loss(output: Any) -> Tensor:
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    raise UsageError(
        expected(
            "a loss of one element from the last stage's fwd_fn",
            output,
            fix="outside of launch(main, stages) the process is the first stage and the last one: "
            "pass inputs and targets, and compute the loss in fwd_fn",
        )
    )


class _Step(nn.Module):
    """A model whose forward calls the functions of the step at hand.

    Args:
        modules: those that the functions use.
        now: whose ``stages`` are the step's.
    """

    def __init__(self, modules: Sequence[nn.Module], now: "_Now") -> None:
        super().__init__()
        self.used = nn.ModuleList(modules)
        self.now = now

    def forward(self, *inputs: Tensor) -> Any:
        stages = self.now.stages
        if len(stages) == 1:
            return self._run(stages[0], None, [*inputs], is_last=True)
        handed_on: list[Any] = []
        output: Any = None
        for rank, stage in enumerate(stages):
            own, inputs = inputs[: len(stage.inputs)], inputs[len(stage.inputs) :]
            with Block(rank), as_rank(rank):
                is_last = rank == len(stages) - 1
                output = self._run(stage, rank, [*handed_on, *own], is_last=is_last)
            handed_on = [*output] if isinstance(output, tuple | list) else [output]
        return output

    def _run(self, stage: _Stage, rank: int | None, given: list[Any], *, is_last: bool) -> Any:
        output = stage.forward(given[0] if len(given) == 1 else given)
        if stage.backward is None:
            return output
        return through(output, stage.backward, rank, is_loss=is_last)


class _Now:
    """The functions and inputs of the step at hand."""

    def __init__(self, stages: list[_Stage]) -> None:
        self.stages = stages


class _Steps(dict[Any, tuple[_Now, Pipeline]]):
    """The pipelines that are kept at a module; its copies and pickles have none."""

    def __deepcopy__(self, memo: Any) -> "_Steps":
        return _Steps()

    def __reduce__(self) -> Any:
        return _Steps, ()


def _pipeline_of(stages: list[_Stage], forward_only: bool, options: dict[str, Any]) -> Pipeline:
    """Return the pipeline for these functions, made for their code once."""
    modules = list({id(m): m for stage in stages for m in _modules_of(stage.forward)}.values())
    if not modules:
        raise UsageError(
            "expected a module among the variables of fwd_fn, got none "
            f"({users_line()}); call the model in it by a variable of the script"
        )
    devices = [*options.get("devices", tpc.stage_devices())]
    key = (
        tuple((_code_of(stage.forward), stage.backward is None) for stage in stages),
        tuple(map(id, modules)),
        forward_only,
        tuple(map(str, devices)),
        repr(options),
    )
    kept: _Steps = modules[0].__dict__.setdefault(_KEPT, _Steps())
    if key not in kept:
        now = _Now(stages)
        reduction = "mean" if forward_only else "sum"
        given = {"loss_reduction": reduction, **options, "devices": devices, "chunks": 2}
        kept[key] = now, Pipeline(_Step(modules, now), **given)
    now, pipe = kept[key]
    now.stages = stages
    return pipe


def _code_of(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__code__", type(function))


def _modules_of(function: Any) -> Iterator[nn.Module]:
    """Iterate over the modules among a function's variables, and those of the functions in its
    file that it names."""
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            yield value
        elif isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            yield value.__self__
        elif isinstance(value, MethodType):
            waiting += [value.__func__, *getattr(value.__self__, "__dict__", {}).values()]
        elif isinstance(value, partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, FunctionType) and value.__module__ == _file_of(function):
            waiting += _variables_of(value)


def _file_of(function: Any) -> str | None:
    """Return the name of the module that a function was written in."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__module__", None)


def _variables_of(function: FunctionType) -> Iterator[Any]:
    known = function.__globals__
    yield from (known[name] for name in _names_in(function.__code__) if name in known)
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a variable without a value so far
            yield cell.cell_contents


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
