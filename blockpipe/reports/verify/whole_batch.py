"""Check a pipelined step against the whole batch in one forward.

A step may equal the plain loop over micro-batches and still not be the one that the user means: the
batch is split on a wrong dim, the losses have wrong weights, or the loss depends on all samples at
once. Only a forward of the whole batch shows that, and only up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from ..._torch.modules import BatchNorm
from .result import Difference, Outcome, WholeBatch, compared

KINDS = ("outputs", "loss", "gradients", "input gradients")


class Runs(Protocol):
    """The runs of one step, each from the same state."""

    @property
    def draws(self) -> bool:
        """Whether the forward draws random numbers."""

    def all_modules(self) -> list[nn.Module]:
        """Return all modules of the model and the loss."""

    def anew(self) -> AbstractContextManager[None]:
        """While entered, use a recording of the model as it is now."""

    def pipelined(self) -> Outcome:
        """Run a step of the pipeline."""

    def whole(self) -> Outcome:
        """Run the step of the whole batch in one forward."""


def against_whole_batch(verifier: Runs, piped: Outcome) -> WholeBatch | str:
    """Return a comparison, or the reason why there is none.

    Args:
        verifier: runs the steps; it is left as it was.
        piped: the values of the pipelined step.
    """
    notes = []
    with ExitStack() as stack:
        if verifier.draws or any(map(_normalizes_batches, verifier.all_modules())):
            # Each micro-batch draws its own numbers and has its own statistics. Without either,
            # a difference is due to the split or the weights.
            stack.enter_context(_in_evaluation(verifier.all_modules()))
            try:
                stack.enter_context(verifier.anew())
                if verifier.draws:
                    return "the forward draws random numbers in evaluation mode too"
                piped = verifier.pipelined()
            except Exception as error:
                return f"in evaluation mode the step fails ({type(error).__name__}: {error})"
            notes.append(
                "compared in evaluation mode: random draws and batch norm differ by design"
            )
        try:
            whole = verifier.whole()
        except torch.OutOfMemoryError:
            return "the whole batch does not fit into memory"
        except Exception as error:
            return f"its forward fails ({type(error).__name__}: {error})"
    whole, piped = _rounded(whole), _rounded(piped)
    rtol = _tolerance([whole, piped])
    differences = [found for found in compared(whole, piped, rtol, 0.0) if found.kind in KINDS]
    cause = _cause(differences, whole, verifier)
    return WholeBatch(differences, rtol, cause, notes)


def _rounded(outcome: Outcome) -> Outcome:
    """Return the floating-point values alone: rounding may change an argmax."""
    kept = {
        kind: {
            name: value
            for name, value in named.items()
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        }
        for kind, named in outcome.values.items()
    }
    return Outcome(kept)


def _tolerance(outcomes: Iterable[Outcome]) -> float:
    """Return the square root of the coarsest precision.

    Sums over micro-batches round in another order; a wrong split or weight makes a larger
    difference.
    """
    coarsest = max(
        (
            torch.finfo(value.dtype).eps
            for outcome in outcomes
            for named in outcome.values.values()
            for value in named.values()
        ),
        default=0.0,
    )
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled():
        coarsest = max(coarsest, torch.finfo(torch.bfloat16).eps)
    return float(coarsest**0.5)


def _cause(differences: list[Difference], whole: Outcome, verifier: Runs) -> str | None:
    """Return the first thing to check."""
    bad = {found.kind for found in differences if found.verdict == "different"}
    if not bad:
        return None
    if any(_normalizes_batches(module) for module in verifier.all_modules()):
        return "batch norm without running statistics normalizes each micro-batch by its own"
    outputs = whole.values.get("outputs", {})
    numbers = {name for name, value in outputs.items() if value.dim() == 0}
    wide = [
        found
        for found in differences
        if found.kind == "outputs" and found.verdict == "different" and found.name not in numbers
    ]
    if wide:
        return (
            "batch_dims (is every argument split where its samples are?), or a layer that looks at "
            "several samples at once"
        )
    return (
        "loss_reduction (what is the loss a mean over? labels of -100 do not count), or a loss "
        "that needs the whole batch"
    )


def _normalizes_batches(module: nn.Module) -> bool:
    return isinstance(module, BatchNorm) and (module.training or module.running_mean is None)


@contextmanager
def _in_evaluation(modules: list[nn.Module]) -> Iterator[None]:
    before = [(module, module.training) for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, training in before:
            module.training = training
