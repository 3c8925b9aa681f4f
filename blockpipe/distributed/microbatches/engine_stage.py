"""torch's stage of a pipeline, as the engine here drives it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from ..._common.text import dtype_text
from ...errors import RouteError
from ...schedules.schedule import Kind
from ..taping.tape import REMEDY, Meta
from .hooked_steps import HookedSteps
from .no_gradient import no_gradient, without_missing

_OF_GROUPS = "params", "intermediates", "grads"


def check_results(
    results: tuple[Tensor, ...],
    metas: Sequence[Meta],
    makers: Sequence[str],
    *,
    leaves: bool = True,
) -> None:
    """Raise :class:`RouteError` for a result that its receiver does not expect.

    Args:
        results: the tensors that go to another stage.
        metas: their shapes and dtypes, as the processes know them.
        makers: what makes each, in words.
        leaves: whether that one is in another process, which has room for these shapes and dtypes
            only.
    """
    for tensor, meta, maker in zip(results, metas, makers, strict=True):
        needs_grad = tensor.requires_grad and torch.is_grad_enabled()
        fits = tensor.shape == meta.shape and tensor.dtype == meta.dtype
        if (fits or not leaves) and (meta.requires_grad or not needs_grad):
            continue
        had, got = _in_words(meta), _in_words(Meta.of(tensor))
        raise RouteError(
            f"expected a result of {had} from {maker}, as when it was recorded, got {got}; other "
            "stages take it as it was recorded, so what depends on data must stay on one stage: "
            f"{REMEDY}"
        )


def in_one_pass(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one group for all parameters, if the second part of a backward would go through a node
    for several groups.

    torch computes the gradients of one group after the other, and a node frees what it has saved
    when it has run. From where a layer is used the second time, the way to its first use leads
    through what is between, which may be another group's: a layer that a stage uses twice, say.

    Args:
        groups: torch's, each with its parameters, the nodes that the part begins at, and the
            gradients.
    """
    if len(groups) < 2 or all(len(group["intermediates"]) == 1 for group in groups):
        return groups
    joined = {name: [m for group in groups for m in group[name]] for name in _OF_GROUPS}
    return [{**joined, "params": {*joined["params"]}}]


@contextmanager
def hooks_once(groups: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Around the second part of a backward: have what the hooks on tensors return count once.

    The part for the weights begins at nodes that the part for the inputs has gone through, with the
    gradients that they were given there, to which the hooks of their tensors were applied. They are
    called again; but the nodes are given those gradients.

    Args:
        groups: torch's, each with the nodes, and the gradients.
    """
    handles = []
    for group in groups:
        for node, gradients in zip(group["intermediates"], group.get("grads", ()), strict=False):
            handles.append(node.register_prehook(partial(_given, gradients)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _given(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
    return gradients


def _in_words(meta: Meta) -> str:
    needs = " that needs a gradient" if meta.requires_grad else ""
    return f"{dtype_text(meta.dtype)}{list(meta.shape)}{needs}"


class StageObserver(Protocol):
    """Observes what the stages of this process do."""

    def begins(self) -> None:
        """An action begins."""

    def ends(self, kind: Kind, stage: int, microbatch: int) -> None:
        """The action is over."""


class StageSumming(Protocol):
    """Sums gradients when they are complete."""

    def completed(self, stage: int) -> None:
        """A backward of a stage is over."""


class EngineStage(PipelineStage):
    """A stage that tells an observer when it works, and that runs without a backward as well.

    Attributes:
        first: the number of the first micro-batch; torch counts from 0 in each of its steps.
        observer: hears of each action; ``None``: nobody does.
        sums: hears of each backward that is complete; ``None``: nobody does.
        steps: sees to it that no hook steps too early; ``None``: there are no hooks.
    """

    first = 0
    steps: HookedSteps | None = None
    observer: StageObserver | None = None
    sums: StageSumming | None = None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a forward."""
        result = self._observed("F", fwd_chunk_id, super().forward_one_chunk, args, kwargs)
        if self.steps is not None:
            self.steps.waiting += 1
        if not self.is_last:
            module: Any = self.submod
            ranks, index = self.stage_index_to_group_rank, self.stage_index
            leaves = ranks[index] != ranks[index + 1]
            check_results(result, module.output_metas, module.makers, leaves=leaves)
        return result

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a backward, or its first part."""
        result = self._observed("B", bwd_chunk_id, super().backward_one_chunk, args, kwargs)
        if kwargs.get("full_backward", True):
            self._completed()
        return result

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the second part of a backward."""
        run = super().backward_weight_one_chunk
        result = self._observed("W", bwd_chunk_id, run, args, kwargs)
        self._completed()
        return result

    def _completed(self) -> None:
        if self.steps is not None:
            self.steps.after_backward()
        if self.sums is not None:
            self.sums.completed(self.stage_index)

    # Where an input gets no gradient, torch sends zeros.

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Get what sends the gradients of the inputs."""
        if self.has_backward and not self.is_first:
            # The first part of a backward returns what autograd has: parts of other tensors, too.
            self.bwd_cache[bwd_chunk_id] = tuple(
                None if gradient is None else gradient.contiguous()
                for gradient in self._said(self.bwd_cache[bwd_chunk_id])
            )
        return super().get_bwd_send_ops(bwd_chunk_id)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run a backward, or a part of it, from those outputs that have got a gradient."""
        if bwd_kwargs.get("output_grads") is not None:
            found = without_missing(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"])
            bwd_kwargs["stage_output"], bwd_kwargs["output_grads"] = found
        groups = bwd_kwargs.get("param_groups") or []
        if backward_type == "weight":
            groups = bwd_kwargs["param_groups"] = in_one_pass(groups)
        with hooks_once(groups):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def _said(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs as they are sent: with a word for each that is not there."""
        module: Any = self.submod
        return tuple(
            no_gradient(meta.example(), self.device)
            if gradient is None and meta.requires_grad
            else gradient
            for gradient, meta in zip(gradients, module.input_metas, strict=True)
        )

    # Of two neighbours in one process, torch hands the gradient over also where there is none.

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return the gradients for the stage before, which is in this process."""
        own: Any = super()
        return self._said(own.get_local_bwd_output(mb_index)) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take the gradients of the stage after, which is in this process."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _observed(self, kind: Kind, chunk: int, run: Any, args: Any, kwargs: Any) -> Any:
        observer = self.observer
        if observer is None or not (kind == "F" or self.has_backward):
            return _with_own_errors(run, chunk, *args, **kwargs)
        observer.begins()
        result = _with_own_errors(run, chunk, *args, **kwargs)
        observer.ends(kind, self.stage_index, self.first + chunk)
        return result


def _with_own_errors(run: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method of torch's stage. What fails in the user's code is raised as it is, and not
    inside of the error that torch makes of it."""
    try:
        return run(*args, **kwargs)
    except RuntimeError as error:
        own = error.__cause__
        if own is None or not _is_raised_by_torch(error):
            raise
    raise own


def _is_raised_by_torch(error: Exception) -> bool:
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    name = "" if last is None else str(last.tb_frame.f_globals.get("__name__"))
    return name.startswith(PipelineStage.__module__.rpartition(".")[0])
