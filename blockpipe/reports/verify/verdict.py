"""Check a pipelined step against the plain loop, and locate the first module where they diverge.

The verdict is on a step that is not watched. Only if it differs, both runs are made again with
every module call watched (:mod:`blockpipe.reports.verify.divergence`). So watching cannot hide a
race from the verdict, and a correct model pays for two steps and one of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..._common.checks import expected, is_number
from ...errors import UsageError
from ...preparation.prepared import Prepared
from .divergence import CallWatch, Divergence, first_divergence
from .result import Outcome, Verification, compared, not_finite
from .run import Verifier
from .whole_batch import against_whole_batch

_TOLERANCE = 1e-5


def check_tolerances(rtol: object, atol: object) -> None:
    """Raise :class:`UsageError` if a tolerance is not a number from 0 up."""
    for name, value in (("rtol", 0.0 if rtol is None else rtol), ("atol", atol)):
        if not is_number(value) or not value >= 0:
            raise UsageError(expected("a number from 0 up", value, for_=name))


def verify(verifier: Verifier, *, rtol: float | None, atol: float, whole: bool) -> Verification:
    """Run both and compare them; locate a difference; compare with the whole batch if ``whole``."""
    with verifier.stricter():
        return _verify(verifier, _TOLERANCE if rtol is None else rtol, atol, whole=whole)


def _verify(verifier: Verifier, rtol: float, atol: float, *, whole: bool) -> Verification:
    prepared = verifier.prepared
    if prepared.compiled is not None and prepared.steps == 0:
        verifier.pipelined()  # it compiles, in one thread
    known: Any = None
    while known != (known := (prepared.sources, dict(prepared.loss_draws))):
        # A step that is the first one to draw, or has a new loss, changes how the next one runs.
        piped = verifier.pipelined()
    verifier.choose_reference()
    plain, _ = _on_one_device(verifier, None)
    result = Verification(
        compared(plain, piped, rtol, atol),
        verifier.exact,
        rtol,
        atol,
        verifier.described(),
        verifier.reference(),
        notes=list(verifier.notes),
    )
    result.notes += not_finite(plain)
    if not result.is_plain:
        result.first_difference = _located(verifier, result)
        if result.first_difference is None:
            result.notes.append(
                "no module call differs when watched: suspect a race, or code after the last call"
            )
    if whole and verifier.count > 1:
        found = against_whole_batch(verifier, piped)
        if isinstance(found, str):
            result.notes.append(f"not compared with the whole batch: {found}")
        else:
            result.whole = found
    return result


def _on_one_device(
    verifier: Verifier, watch: Callable[[nn.Module], CallWatch] | None
) -> tuple[Outcome, Any]:
    try:
        return verifier.plain(watch)
    except torch.OutOfMemoryError as error:
        error.add_note(
            f"blockpipe: the plain run of verify does not fit {verifier.device}; pass "
            "device='cpu', or device='stages' to compare with one uncut graph over the stages"
        )
        raise
    except Exception as error:
        error.add_note("blockpipe: in the plain run of verify, outside of the pipeline")
        raise


def _located(verifier: Verifier, result: Verification) -> Divergence | None:
    compiled = verifier.prepared.compiled
    opaque = [] if compiled is None else compiled.paths
    _, plain = _on_one_device(verifier, lambda model: CallWatch(model, opaque))
    piped = CallWatch(verifier.preparer.model, opaque)
    verifier.pipelined(piped)
    least = 0.0 if result.exact else result.rtol
    return first_divergence(plain, piped, lambda apart: apart > least) or _of_state(
        verifier.prepared, result
    )


def _of_state(prepared: Prepared, result: Verification) -> Divergence | None:
    """Return the first parameter gradient or buffer that differs, where every call agrees."""
    recording = prepared.recording
    stage_of = {n: h.stage for h in (*recording.parameters, *recording.buffers) for n in h.names}
    for kind in ("gradients", "buffers"):
        for found in result.differences:
            bad = found.verdict == "different" or (result.exact and found.verdict != "exact")
            if found.kind == kind and bad:
                path, _, name = found.name.rpartition(".")
                what = "the gradient of its" if kind == "gradients" else "its buffer"
                why = f"{what} {name!r} differs ({found.relative:.1e}), but all calls agree"
                phase = "backward" if kind == "gradients" else "forward"
                stage = stage_of.get(found.name)
                return Divergence(phase, path, None, stage, None, found.relative, why)
    return None
