"""A pipeline in each process, with a share of every batch, and one gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..._common.callsite import remembers_caller, users_line
from ..._common.checks import expected
from ..._torch.modes import untraced
from ...batches.batch_dims import BatchDims, dims_of_call
from ...batches.class_weights import reduction_for
from ...batches.losses import WeightedLoss
from ...batches.microbatch import LossReduction, split, weights_of
from ...devices.devices import is_on_meta
from ...devices.observer import Observer
from ...devices.rng_streams import current, derived, host_sources, moved, restore, torchs_of
from ...errors import UsageError
from ...execution.step_result import StepLoss, StepResult
from ...preparation.options import check_loss
from ...preparation.prepared import Prepared
from ..agreement import Agreement, Kind
from ..kinds import kind_of_step, kind_of_values
from ..rank_failures.failures import Failures
from ..replicas import StageReplicas
from .sparse_gradients import added
from .stage_sums import StageSums

_TIMEOUT = 600.0  # seconds, as DistributedPipeline has it

Observes = Callable[[Prepared, int], Observer]


class OnePipeline(Protocol):
    """What is needed of a :class:`Pipeline`."""

    module: nn.Module

    @property
    def chunks(self) -> int: ...
    @property
    def devices(self) -> Sequence[torch.device]: ...
    @property
    def batch_dims(self) -> BatchDims: ...
    @property
    def loss_reduction(self) -> LossReduction: ...
    def forward_backward(self, *args: Any, **kwargs: Any) -> StepResult: ...
    def observed_by(self, observes: Observes) -> AbstractContextManager[None]: ...


class ReplicatedPipeline:
    """A :class:`Pipeline` in each of several processes, each with a share of every batch.

    Every process makes one, and calls :meth:`forward_backward` at the same time. Parameters and
    buffers begin as the first process has them. Each stage's gradients are summed as soon as its
    last backward is over, while earlier stages still run; then they are those of all shares.

    Args:
        pipe: with all of its stages on devices of this process; its model has values.
        group: the processes; ``None``: all.
        mesh: instead of a group, a mesh of one dim.
        timeout: seconds for which no process may go on while one of them waits, as for
            :class:`DistributedPipeline`.

    Raises:
        UsageError: no process group, a mesh of several dims, or a model on the meta device.
        RankError: another process failed, or has another model.

    Each process draws random numbers of its own: the first one those of its generators, each other
    one those that follow from them and from its rank. So processes with one seed have different
    dropout, and the same one in each run. After a step that has drawn, generators go on from a
    state that follows from the one before it, which is the same in processes with one seed.

    Example:
        One process; under ``torchrun``, ``init_process_group()`` needs no arguments, and each
        process gives its own devices and its own share of the batch.

        >>> import torch, blockpipe as bp
        >>> import torch.distributed as dist
        >>> from blockpipe.distributed import ReplicatedPipeline
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> pipe = ReplicatedPipeline(bp.Pipeline(net, devices=["cpu", "cpu"], chunks=4))
        >>> x, y = torch.ones(8, 4), torch.zeros(8, 2)
        >>> result = pipe.forward_backward(x, target=y, loss_fn=torch.nn.functional.mse_loss)
        >>> result.loss.shape, net[0].weight.grad.shape
        (torch.Size([]), torch.Size([4, 4]))
        >>> dist.destroy_process_group()

    Source: ``torch.nn.parallel.DistributedDataParallel``.
    """

    @remembers_caller
    def __init__(
        self,
        pipe: OnePipeline,
        *,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        timeout: float = _TIMEOUT,
    ) -> None:
        if not dist.is_initialized() or is_on_meta(pipe.module):
            raise UsageError(
                "expected a process group and a model with values "
                f"({users_line()}); call torch.distributed.init_process_group() and "
                "blockpipe.materialize(model, …) first"
            )
        if mesh is not None:
            if mesh.ndim != 1 or group is not None:
                fix = "pass mesh['replicas'] of a larger one"
                raise UsageError(
                    expected("a mesh of one dim and no group", mesh, for_="mesh", fix=fix)
                )
            group = mesh.get_group()
        self.pipe = pipe
        self.sums: StageSums | None = None
        given = group or dist.group.WORLD
        assert given is not None  # there is one where torch is initialized
        everyone = _own_group(given)
        self._replicas = StageReplicas(everyone)
        self._device = torch.device("cpu")
        if dist.get_backend(everyone) != "gloo":
            self._device = pipe.devices[0]
        members = dist.get_process_group_ranks(everyone)
        self._failures = Failures([everyone], members, self._device, timeout)
        self._agreement = Agreement(everyone, None, self._device, self._failures)
        with self._failures.told(), torch.no_grad():
            self._agreement.check(kind_of_values(pipe.module))
            self._failures.began = True
            self._replicas.broadcast([*pipe.module.parameters(), *pipe.module.buffers()])

    @untraced
    @remembers_caller
    def forward_backward(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> StepResult:
        """As :meth:`Pipeline.forward_backward`, of this process's share of the batch.

        Args:
            *args: as for :meth:`Pipeline.forward_backward`.
            target: as for :meth:`Pipeline.forward_backward`.
            loss_fn: as for :meth:`Pipeline.forward_backward`.
            return_outputs: as for :meth:`Pipeline.forward_backward`.
            **kwargs: the model's keyword arguments.

        Returns:
            The loss of all shares, in every process, and the outputs of this process's share.

        Raises:
            Exception: the step's own, in the process in which it failed.
            RankError: the step has failed in another process, or that has ended or hangs. If it
                was an error, the next step works. ``.grad`` may then hold part of the step.
        """
        check_loss(loss_fn, target)
        self._replicas.check_loss(loss_fn)
        with self._failures.told():
            reduction = reduction_for(loss_fn, self.pipe.loss_reduction)
            with self._agreement.at_end(lambda: self._kind(args, kwargs, loss_fn)):
                self._replicas.check_hooks(self.pipe.module.named_parameters())
                own = self._counted(args, kwargs, target, reduction)
            self._failures.began = True
            weight = 1.0
            if reduction != "sum":
                weight = own / self._replicas.total(own, self._device)
            given = {"loss_fn": WeightedLoss(loss_fn, weight), "return_outputs": return_outputs}
            result = self._step(args, {"target": target, **given, **kwargs})
            total = self._replicas.total(result.loss.item(), self._device)
        shared: Tensor = torch.tensor(total, dtype=result.loss.dtype, device=result.loss.device)
        return StepResult(shared.as_subclass(StepLoss), result.outputs)

    def _kind(self, args: Any, kwargs: dict[str, Any], loss_fn: object) -> Kind:
        """What all processes do alike; shares may have other shapes."""
        options = {"loss": loss_fn or "the model's", "loss_reduction": self.pipe.loss_reduction}
        kind = kind_of_step(self.pipe.module, args, kwargs, options, self.pipe.chunks)
        return Kind(kind.common)

    def _counted(
        self, args: Any, kwargs: dict[str, Any], target: Any, reduction: LossReduction
    ) -> float:
        """What this process's share counts in the loss of the whole batch."""
        if reduction == "sum":
            return 1.0
        dims = dims_of_call(self.pipe.module, self.pipe.batch_dims, args, kwargs, target)
        parts = split(args, kwargs, target, self.pipe.chunks, dims)
        weights_of(parts, reduction)  # for its errors
        if callable(reduction):
            return float(sum(reduction(part.args, part.kwargs, part.target) for part in parts))
        return float(sum(part.size for part in parts))

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepResult:
        """Run the pipeline's step, sum its gradients, and find out whether it failed anywhere."""
        failure, failed = None, True
        with self._gradients_of_before():
            self.sums = None
            with self.pipe.observed_by(self._observes):
                try:
                    with self._failures.progress.computing("a step"), self._drawing():
                        result = self.pipe.forward_backward(*args, **kwargs)
                    failed = False
                except Exception as error:
                    failure = error
                finally:
                    if self.sums is not None:
                        self.sums.end(failed=failed)
            if self.sums is not None:
                self.sums.finish()
            elif any(parameter.requires_grad for parameter in self.pipe.module.parameters()):
                self._replicas.agree(0, failed=True, device=self._device)  # others wait for this
            self._agreement.end(failure)
        return result

    @contextmanager
    def _gradients_of_before(self) -> Iterator[None]:
        """While entered, gradients begin anew; at the end they are added to those of before."""
        parameters = [*self.pipe.module.parameters()]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        finally:  # also where the step has failed
            for parameter, earlier in zip(parameters, before, strict=True):
                if earlier is not None:
                    now = parameter.grad
                    parameter.grad = earlier if now is None else added(earlier, now)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Draw this process's own numbers; a step that fails counts as if it had not drawn."""
        torchs = [source for device in self.pipe.devices for source in torchs_of(device)]
        sources = [*host_sources(), *dict.fromkeys(torchs)]
        before = current(sources)
        begin = before
        if not self._replicas.is_first:
            what = f"copy {self._replicas.number}"
            begin = {source: derived(source, state, what) for source, state in before.items()}
        after = before
        try:
            restore(begin)
            yield
            drew = moved(begin)
            next_step = {s: derived(s, before[s], "the next step") for s in drew}
            after = {**before, **next_step}
        finally:
            restore(after)

    def _observes(self, prepared: Prepared, microbatches: int) -> Observer:
        whose = (self.pipe.module, self._replicas, prepared, microbatches, self._device)
        self.sums = StageSums(*whose, self._failures.progress)
        return self.sums


def _own_group(given: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make another group of the same processes: threads of ours make its collectives, while the
    model's code may make some of the user's."""
    members, backend = dist.get_process_group_ranks(given), dist.get_backend(given)
    made = dist.new_group(members, backend=backend, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)  # this process is one of them
    return made
