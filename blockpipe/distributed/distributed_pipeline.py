"""A pipeline whose stages are in processes of their own, with the calls of ``Pipeline``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._common.callsite import remembers_caller, users_line
from .._common.checks import expected
from .._common.nested import leaf_names, leaves, map_tensors, tensors
from .._common.text import dtype_text
from .._common.thread_state import autocast_states
from ..batches.batch_dims import BatchDims, dims_of_call
from ..batches.joining import join, output_dim
from ..batches.losses import checked_loss, computed_loss
from ..batches.microbatch import LossReduction, Microbatch, split, weights_of
from ..errors import RankError, UsageError, WeightsError
from ..execution.step_result import StepLoss, StepResult
from ..preparation.options import as_sample, check_loss
from ..recording.recording import Recording
from ..stages.plan import StagePlan
from ..weights.materialize import Init
from ..weights.sources import Weights
from .agreement import Agreement
from .build import CutForward, fill_own
from .engine import FOR_ANY_NUMBER, Engine, places, schedule_name, takes
from .failures import Failures
from .replicas import StageReplicas
from .tied import TiedParameters

_OUTPUTS = 1  # a process asks for them
_KEPT = 8  # kinds of micro-batches


class DistributedPipeline:
    """A marked model, one or several of whose stages run in this process.

    Every process makes one, of the same model and with the same options, and calls the same methods
    at the same time, with arguments of the same shapes. The values of a batch count in the process
    of the first stage, those of the target in that of the last one.

    Args:
        model: marked as for :class:`Pipeline`; on the meta device if ``weights`` or ``init`` is
            given: then each process has the values of its own stages only.
        sample: ``(args, kwargs)`` of a batch, or its only argument: shapes count.
        device: where this process's stages are; ``None``: the current accelerator of torch's
            process group, or the CPU.
        group: the processes of the pipeline; ``None``: all.
        mesh: instead of a group, a mesh of two dims: replicas, and the processes of each one's
            pipeline. Each replica is passed a share of the batch; the loss and the gradients are
            those of all shares together.
        chunks: as for :class:`Pipeline`.
        schedule: one of torch's: ``"gpipe"``, ``"1f1b"``, ``"looped-bfs"``, ``"interleaved"``
            (several stages a process), ``"zb-h1"``, ``"zb-v"`` or ``"dualpipe-v"`` (the backward
            in two parts; the last two have two stages a process, in a V).
        plan: as for :class:`Pipeline`.
        batch_dims: as for :class:`Pipeline`.
        loss_reduction: as for :class:`Pipeline`.
        weights: as for :class:`Pipeline`; each process reads its own stages' tensors.
        init: as for :class:`Pipeline`.

    Raises:
        RecordingError: the code between modules does what cannot be replayed.
        ScheduleError: the schedule does not take so many stages or micro-batches.
        RankError: another process failed, or has another model, other options or shapes.

    Source: ``torch.distributed.pipelining`` is the engine; the calls are :class:`Pipeline`'s.
    """

    @remembers_caller
    def __init__(
        self,
        model: nn.Module,
        *,
        sample: Any,
        device: Any = None,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        chunks: int = 1,
        schedule: str = "1f1b",
        plan: StagePlan | None = None,
        batch_dims: BatchDims = None,
        loss_reduction: LossReduction = "mean",
        weights: Weights | None = None,
        init: Init | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise UsageError(
                "expected a process group, got none "
                f"({users_line()}); call torch.distributed.init_process_group() first, in a script "
                "that torchrun starts"
            )
        self.module = model
        self.chunks = chunks
        self.schedule = schedule_name(schedule)
        self.batch_dims = batch_dims
        self.loss_reduction = loss_reduction
        self._replicas = None
        if mesh is not None:
            if mesh.ndim != 2 or group is not None:
                what = "a mesh of two dims and no group"
                fix = "make it by init_device_mesh(kind, (replicas, processes of a pipeline))"
                raise UsageError(expected(what, f"{mesh.ndim} dims", for_="mesh", fix=fix))
            group = mesh.get_group(1)
            self._replicas = StageReplicas(mesh.get_group(0))
        self._group = group
        self._device = _device_of(device)
        self._plan = plan
        self._agreement = Agreement(group, self._device)
        self._failures = Failures(group, self._device)
        self._cuts: dict[str, CutForward] = {}
        self._engines: dict[str, Engine] = {}
        self._step: _Step = _Step(None, asks_outputs=False)
        args, kwargs = as_sample(sample)
        with self._agreed(lambda: self._kind(args, kwargs, None)):
            first = self._split(args, kwargs, None)[0]
            cut = self._cut(first)
            self._places = places(self.schedule, cut.tape.route, dist.get_world_size(group))
            own = [k for k, place in enumerate(self._places) if place == dist.get_rank(group)]
            numbers = {cut.stages[k].stage for k in own}
            fill_own(model, cut.recording, numbers, self._device, weights, init)
            for k in own:
                cut.place(k)
            self._stages = [cut.module(k) for k in own]
            self._names = [list(cut.module(k).state_dict(keep_vars=True)) for k in _all(cut)]
            self._check_values()
            self._cut_first = cut
        parameters = dict(self.named_parameters())
        by_name = {name: parameters[name] for name in cut.tied() if name in parameters}
        self._tied = TiedParameters(cut.tied(), self._places, by_name, group)
        self._tied.broadcast()
        if self._replicas is not None:
            held = [*self.parameters(), *(b for stage in self._stages for b in stage.buffers())]
            self._replicas.broadcast(held)

    # --- what it has

    @property
    def recording(self) -> Recording:
        """The recording of the sample."""
        return self._cut_first.recording

    @property
    def device(self) -> torch.device:
        """The device of this process's stages."""
        return self._device

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this process's stages, by the names that the model has for
        them."""
        seen: set[int] = set()
        for stage in self._stages:
            for name, parameter in stage.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield self._first_name(parameter, name), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this process's stages: for an optimizer of this process."""
        return (parameter for _, parameter in self.named_parameters())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this process's stages."""
        for stage in self._stages:
            stage.zero_grad(set_to_none)

    def train(self, mode: bool = True) -> DistributedPipeline:
        """Put the model into training mode; the next step is recorded anew for it."""
        self.module.train(mode)
        return self

    def eval(self) -> DistributedPipeline:
        """Put the model into evaluation mode."""
        return self.train(False)

    def _first_name(self, parameter: Tensor, name: str) -> str:
        names = (n for n, p in self.module.named_parameters() if p is parameter)
        return next(names, name)

    # --- steps

    @remembers_caller
    def forward_backward(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> StepResult:
        """Run a step's forwards and backwards; gradients add up in ``.grad``.

        Args:
            *args: the model's arguments, for the whole batch.
            target: the second argument of ``loss_fn``.
            loss_fn: as for :meth:`Pipeline.forward_backward`; it runs in the last stage's process.
            return_outputs: whether this process wants the joined outputs.
            **kwargs: the model's keyword arguments.

        Returns:
            The batch's loss, in every process, and the outputs where they were asked for.

        Raises:
            RankError: another process failed before the step, or passed other shapes.
        """
        check_loss(loss_fn, target)
        with self._failures.told(), self._summing():
            return self._run(args, kwargs, target, loss_fn, return_outputs, backward=True)

    @remembers_caller
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward without gradients; return the joined outputs in every process.

        Raises:
            UsageError: gradients are on.
        """
        if torch.is_grad_enabled():
            raise UsageError(
                "expected a call without gradients, for a graph does not span processes, got one "
                f"with them ({users_line()}); call it under torch.no_grad(), or "
                "forward_backward(…)"
            )
        with self._failures.told():
            return self._run(args, kwargs, None, None, True, backward=False).outputs

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        loss_fn: Callable[..., Any] | None,
        return_outputs: bool,
        *,
        backward: bool,
    ) -> StepResult:
        asks = _OUTPUTS * return_outputs
        with self._agreed(lambda: self._kind(args, kwargs, loss_fn), asks) as asked:
            if any(t.requires_grad for t in tensors((args, kwargs))):
                raise UsageError(
                    "expected inputs that need no gradient, for it would not reach them, got one "
                    f"that does ({users_line()}); pass it detached"
                )
            microbatches = self._split(args, kwargs, target)
            runs = [(self._engine(part), part) for part in _runs(microbatches)]
            is_last = backward and runs[0][0].has_last
            weights = [1.0] * len(microbatches)
            if is_last:
                weights_of(microbatches, self.loss_reduction)  # for its errors
        self._failures.began = True
        if backward:
            weights = self._weights(microbatches, is_last=is_last)
        step = self._step = _Step(loss_fn if backward else _no_loss, bool(asked[0] & _OUTPUTS))
        at = 0
        for engine, part in runs:
            inputs = None
            if engine.first is not None:
                inputs = [
                    tuple(t.to(self._device) for t in engine.first.arguments(*m.args, **m.kwargs))
                    for m in part
                ]
            step.engine = engine
            targets = [(weights[at + k], self._moved(m.target)) for k, m in enumerate(part)]
            engine.run(inputs, targets, at, backward=backward)
            at += len(part)
        self._step = _Step(None, asks_outputs=False)
        loss = self._shared_loss(step)
        outputs = self._outputs(step, runs, weights) if step.asks_outputs else None
        return StepResult(loss, outputs if return_outputs else None)

    def _compute_loss(self, results: tuple[Tensor, ...], given: tuple[float, Any]) -> Tensor:
        """What the engine calls for each micro-batch, in the last stage's process."""
        step, (weight, target) = self._step, given
        assert step.engine is not None
        if step.asks_outputs:
            step.outputs.append(tuple(result.detach() for result in results))
        if step.loss_fn is _no_loss:
            return torch.zeros((), device=self._device)
        output = step.engine.last.output(results)
        step.microbatch += 1
        if not weight:  # it counts for nothing, also where its loss is no number
            nothing: Tensor = _Nothing.apply(*[r for r in results if r.requires_grad])
            return nothing
        try:
            loss = checked_loss(computed_loss(output, target, step.loss_fn)) * weight
        except Exception as error:
            error.add_note(f"blockpipe: in the loss of micro-batch {step.microbatch}")
            raise
        step.losses.append(loss.detach())
        total: Tensor = loss.sum()  # 0-d, and no view: the engine detaches it in place
        return total

    def _shared_loss(self, step: _Step) -> Tensor:
        """The batch's loss, from the last stage's process to all."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for part in step.losses:
            total += part.reshape(())
        self._broadcast(total, len(self._places) - 1)
        if self._replicas is not None and step.loss_fn is not _no_loss:
            total.fill_(self._replicas.total(total.item(), self._device))
        loss: Tensor = total.to(torch.get_default_dtype()).as_subclass(StepLoss)
        return loss

    def _outputs(
        self, step: _Step, runs: list[tuple[Engine, list[Microbatch]]], weights: list[float]
    ) -> Any:
        """The joined outputs, from the last stage's process to all."""
        results, given = [], iter(step.outputs)
        for engine, part in runs:
            for _ in part:
                metas = engine.last.output_metas
                if engine.has_last:
                    found = next(given)
                else:
                    found = tuple(meta.example(self._device).detach() for meta in metas)
                for tensor in found:
                    self._broadcast(tensor, len(self._places) - 1)
                results.append(engine.last.output(found))
        sizes = [m.size for _, part in runs for m in part]
        dim = output_dim(self.batch_dims, results, sizes)
        return join(results, sizes, weights, self._device, dim)[0]

    @contextlib.contextmanager
    def _summing(self) -> Iterator[None]:
        """Around a step: its gradients are summed over those processes that have the same
        parameters, and then added to those of before."""
        shared = self._tied.parameters if self._replicas is None else [*self.parameters()]
        before = [parameter.grad for parameter in shared]
        for parameter in shared:
            parameter.grad = None
        yield
        self._tied.sum_gradients()
        if self._replicas is not None:
            self._replicas.sum_gradients(shared, self._device)
        for parameter, earlier in zip(shared, before, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad

    def _weights(self, microbatches: list[Microbatch], *, is_last: bool) -> list[float]:
        """The weights of the micro-batches' losses in the batch of all replicas."""
        reduction = self.loss_reduction
        weights = weights_of(microbatches, reduction) if is_last else [1.0] * len(microbatches)
        if self._replicas is None or reduction == "sum":
            return weights
        own = float(sum(m.size for m in microbatches))
        if is_last and callable(reduction):
            own = float(sum(reduction(m.args, m.kwargs, m.target) for m in microbatches))
        share = own / self._replicas.total(own, self._device)
        return [weight * share for weight in weights]

    # --- between steps

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all stages so that their norm is at most ``max_norm``.

        A parameter that several processes have counts once. All processes call it together.

        Args:
            max_norm: the most that the norm may be.
            norm_type: which norm: ``2.0``, or ``inf`` for the largest absolute value.

        Returns:
            The norm of all gradients before, in every process.
        """
        own = [p.grad for p in self.parameters() if p.grad is not None]
        counted = [
            p.grad
            for p in self.parameters()
            if p.grad is not None and id(p) not in self._tied.copies
        ]
        norm = nn.utils.get_total_norm(counted, norm_type).to(self._device, torch.float64)
        if norm_type == float("inf"):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=self._group)
        else:
            norm = norm**norm_type
            dist.all_reduce(norm, group=self._group)
            norm = norm ** (1.0 / norm_type)
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in own:
            gradient.mul_(scale.to(gradient.device, gradient.dtype))
        return norm.to(torch.get_default_dtype())

    @torch.no_grad()
    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's state dict, on the CPU, in every process.

        The plain model, a :class:`Pipeline` and a pipeline with another number of stages load it.
        All processes call it together.
        """
        own = {}
        for stage in self._stages:
            own.update(stage.state_dict())
        found = {}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            home = next((k for k, names in enumerate(self._names) if name in names), None)
            if home is None or not isinstance(tensor, Tensor):
                found[name] = tensor.detach().cpu() if isinstance(tensor, Tensor) else tensor
                continue
            is_home = self._places[home] == dist.get_rank(self._group)
            value = own[name].detach() if is_home else torch.empty_like(tensor, device=self._device)
            value = value.contiguous()
            self._broadcast(value, home)
            found[name] = value.to("cpu", copy=True)
        return found

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the tensors of this process's stages from the whole model's state dict.

        Raises:
            WeightsError: names are missing, or there are others.
        """
        expected_names = self.module.state_dict(keep_vars=True).keys()
        differing = sorted(expected_names ^ state.keys())
        if differing:
            raise WeightsError(
                f"expected the names of {type(self.module).__name__}, got others: "
                f"{differing[:5]} ({users_line()}); pass a state_dict() of this model"
            )
        for stage in self._stages:
            for name, tensor in stage.state_dict(keep_vars=True).items():
                if isinstance(tensor, Tensor):
                    tensor.copy_(state[name])

    # --- how

    @contextlib.contextmanager
    def _agreed(self, kind: Callable[[], str], asks: int = 0) -> Iterator[list[int]]:
        """Around what processes do each for itself: at its end all hear whether one failed."""
        asked: list[int] = []
        what, failure = "", None
        try:
            what = kind()
            yield asked
        except Exception as error:
            failure = error
        asked.append(self._agreement.check(what, asks, failure))

    def _kind(self, args: Any, kwargs: Any, loss_fn: object) -> str:
        """What a step is, in words that are the same in every process."""
        named = _exact(args, kwargs)
        mode = "train" if self.module.training else "eval"
        loss = "own" if loss_fn is None else "given"
        return (
            f"{type(self.module).__name__}({named}), {mode}, gradients "
            f"{torch.is_grad_enabled()}, {self.chunks} chunks, schedule {self.schedule!r}, "
            f"loss {loss}, autocast {[kind for kind, on, _ in autocast_states() if on]}, "
            f"torch {torch.__version__}"
        )

    def _split(self, args: Any, kwargs: dict[str, Any], target: Any) -> list[Microbatch]:
        dims = dims_of_call(self.module, self.batch_dims, args, kwargs)
        return split(args, kwargs, target, self.chunks, dims)

    def _cut(self, microbatch: Microbatch) -> CutForward:
        """The cut forward of a micro-batch's kind; recorded once."""
        key = self._key(microbatch)
        if key not in self._cuts:
            for old in [*self._cuts][: max(0, len(self._cuts) - _KEPT + 1)]:
                del self._cuts[old]
            self._cuts[key] = CutForward(
                self.module, microbatch.args, microbatch.kwargs, self._plan, self._device
            )
        return self._cuts[key]

    def _key(self, microbatch: Microbatch) -> str:
        modes = "".join(str(int(module.training)) for module in self.module.modules())
        trained = "".join(str(int(p.requires_grad)) for p in self.module.parameters())
        named = _exact(microbatch.args, microbatch.kwargs)
        return f"{named} {modes} {trained} {torch.is_grad_enabled()} {autocast_states()}"

    def _engine(self, part: list[Microbatch]) -> Engine:
        """The engine for micro-batches of one kind; made once."""
        name = self.schedule
        if not takes(name, len(part), self._places) and takes(name, self.chunks, self._places):
            name = FOR_ANY_NUMBER[name]  # the rest of a batch that does not divide
        key = f"{self._key(part[0])} {len(part)} {name}"
        if key not in self._engines:
            for old in [*self._engines][: max(0, len(self._engines) - _KEPT + 1)]:
                del self._engines[old]
            cut = self._cut(part[0])
            if cut.tape.route != self._cut_first.tape.route:
                raise RankError(
                    f"expected the route of the sample, {self._cut_first.tape.route}, got "
                    f"{cut.tape.route} ({users_line()}); make a pipeline for each"
                )
            self._engines[key] = Engine(cut, name, len(part), self._group, self._compute_loss)
        return self._engines[key]

    def _moved(self, target: Any) -> Any:
        return map_tensors(lambda t: t.to(self._device), target)

    def _broadcast(self, tensor: Tensor, stage: int) -> None:
        home = self._places[stage]
        source = home if self._group is None else dist.get_global_rank(self._group, home)
        dist.broadcast(tensor, source, group=self._group)

    def _check_values(self) -> None:
        empty = [name for name, p in self.named_parameters() if p.is_meta]
        if empty:
            raise UsageError(
                expected(
                    "parameters with values",
                    empty[0],
                    for_="this process's stages",
                    fix="pass weights=… or init=…",
                )
            )


class _Step:
    """What one step collects in the last stage's process."""

    def __init__(self, loss_fn: Callable[..., Any] | None, asks_outputs: bool) -> None:
        self.loss_fn = loss_fn
        self.asks_outputs = asks_outputs
        self.engine: Engine | None = None
        self.microbatch = -1  # the last one whose loss was asked for
        self.losses: list[Tensor] = []
        self.outputs: list[tuple[Tensor, ...]] = []


class _Nothing(torch.autograd.Function):
    """A loss of zero, whose gradients are zero."""

    @staticmethod
    def forward(ctx: Any, *results: Tensor) -> Tensor:
        """Return zero."""
        ctx.shapes = [(r.shape, r.dtype, r.device) for r in results]
        return torch.zeros((), device=results[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Return zeros."""
        return tuple(torch.zeros(s, dtype=d, device=w) for s, d, w in ctx.shapes)


def _no_loss(*_: Any) -> None:
    """Stands for the loss of a call without one."""


def _exact(args: Any, kwargs: dict[str, Any]) -> str:
    """Arguments in words that are the same for two calls of one kind, and for no others."""
    given = (args, dict(sorted(kwargs.items())))
    names = leaf_names(given, "")
    return ", ".join(f"{n}: {_leaf(x)}" for n, x in zip(names, leaves(given), strict=True))


def _leaf(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{dtype_text(leaf.dtype)}{list(leaf.shape)}"
    is_plain = isinstance(leaf, bool | int | float | complex | str | bytes | None)
    return repr(leaf) if is_plain else type(leaf).__name__


def _all(cut: CutForward) -> range:
    return range(len(cut.stages))


def _runs(microbatches: list[Microbatch]) -> list[list[Microbatch]]:
    """Micro-batches of one size after the other: the larger ones come first."""
    found: list[list[Microbatch]] = []
    for microbatch in microbatches:
        if not found or found[-1][0].size != microbatch.size:
            found.append([])
        found[-1].append(microbatch)
    return found


def _device_of(device: Any) -> torch.device:
    if device is not None:
        return torch.device(device)
    if dist.get_backend() == "gloo" or not torch.accelerator.is_available():
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, torch.accelerator.current_device_index())
