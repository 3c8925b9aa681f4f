"""A step over processes against the plain loop, which the first stage's process runs alone.

Every other process has its own stages as ever: the tensors to compare come one at a time to the
process that compares.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..._common.nested import leaves
from ...devices.rng_streams import Source, preserve_rng
from ...execution.step_result import StepResult
from ...reports.verify.reference_loop import ReferenceLoop
from ...reports.verify.result import Outcome, Verification, compared, not_finite
from ...restoring.preserved import PreservedModel
from ..stage_places import StagePlaces
from ..stage_values import StageValues

_CPU = torch.device("cpu")


class StageVerifier:
    """Gathers what a step results in, and the model that it began with.

    Args:
        model: the user's.
        values: of this process's stages.
        places: where stages are.
        sources: the generators that the forward draws from.
    """

    def __init__(
        self,
        model: nn.Module,
        values: StageValues,
        places: StagePlaces,
        sources: Sequence[Source],
    ) -> None:
        self._model = model
        self._values = values
        self._places = places
        self._sources = [*sources]

    def pipelined(self, step: Callable[[], StepResult]) -> Outcome:
        """Run the pipeline's step, leave the model as it was, and return what resulted."""
        outcome = Outcome()
        with PreservedModel([self._model], self._sources).run():
            result = step()
            outcome.put("outputs", _named(result.outputs))
            outcome.put("loss", [("loss", result.loss)])
            gradients = [
                (name, self._values.gathered_gradient(name, parameter))
                for name, parameter in self._model.named_parameters()
                if parameter.requires_grad
            ]
            outcome.put("gradients", gradients)
            buffers = self._model.named_buffers()
            outcome.put("buffers", [(n, self._values.gathered_one(n, b)) for n, b in buffers])
        return outcome

    def whole_model(self) -> nn.Module | None:
        """Return a copy of the whole model on the host, in the first stage's process."""
        memo: dict[int, Any] = {}
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            value: Any = self._values.gathered_one(name, tensor)
            if isinstance(tensor, nn.Parameter):
                value = nn.Parameter(value, tensor.requires_grad)
            if self._places.is_own(0):
                memo[id(tensor)] = value
        return copy.deepcopy(self._model, memo) if self._places.is_own(0) else None


def plain_outcome(loop: ReferenceLoop, model: nn.Module, sources: Sequence[Source]) -> Outcome:
    """Run the plain loop on a model without gradients, on the host, and return what results.

    Args:
        loop: the loop.
        model: as :meth:`StageVerifier.whole_model` returns it.
        sources: the generators that the loop draws from; they are left as they were.
    """
    with preserve_rng([*sources]):
        outputs, loss = loop.run(model, _CPU)
    outcome = Outcome()
    outcome.put("outputs", _named(outputs))
    if loss is not None:
        outcome.put("loss", [("loss", loss)])
    trained = [(n, p.grad) for n, p in model.named_parameters() if p.requires_grad]
    outcome.put("gradients", trained)
    outcome.put("buffers", [(n, b.detach()) for n, b in model.named_buffers()])
    return outcome


def verdict(
    plain: Outcome, piped: Outcome, rtol: float | None, atol: float, schedule: str
) -> Verification:
    """Compare a step over processes with the plain one; sums of several processes round."""
    rtol = 1e-5 if rtol is None else rtol  # for single precision, as in one process
    reference = "the plain loop on the host of the first stage's process"
    differences = compared(plain, piped, rtol, atol)
    notes = not_finite(plain)
    return Verification(differences, False, rtol, atol, schedule, reference, notes=notes)


def _named(outputs: Any) -> list[tuple[str, Any]]:
    found = [*leaves(outputs)]
    names = ["output"] if len(found) == 1 else [f"output {number}" for number in range(len(found))]
    plain = [v.detach().cpu() if isinstance(v, Tensor) else v for v in found]
    return [*zip(names, plain, strict=True)]
