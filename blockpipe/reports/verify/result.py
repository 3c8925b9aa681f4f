"""The result of a verification: the differences, and where the runs diverge."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..._common.nested import leaf_names, leaves
from ..._common.text import text_table
from ...errors import VerificationError
from .divergence import Divergence

Verdict = Literal["exact", "within tolerance", "different"]
KINDS = ("outputs", "loss", "gradients", "input gradients", "buffers")


@dataclass
class Difference:
    """The difference between two values.

    Attributes:
        kind: ``"outputs"``, ``"loss"``, ``"gradients"``, ``"input gradients"`` or ``"buffers"``.
        name: the name of the parameter, the buffer or the output.
        verdict: ``"exact"`` (to the bit), ``"within tolerance"`` or ``"different"``.
        relative: the norm of the difference over that of the plain run's value; for a gradient,
            over the norm of all gradients.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4)
        >>> x, y = torch.ones(8, 4), torch.zeros(8, 2)
        >>> found = pipe.verify(x, target=y, loss_fn=torch.nn.functional.mse_loss)
        >>> [one for one in found.differences if one.kind == "loss"]
        [Difference(kind='loss', name='loss', verdict='exact', relative=0.0)]
    """

    kind: str
    name: str
    verdict: Verdict
    relative: float


@dataclass
class WholeBatch:
    """A comparison of a pipelined step with the whole batch in one forward.

    Attributes:
        differences: the differences of outputs, loss and gradients.
        rtol: the relative tolerance; a sum over micro-batches rounds in another order.
        cause: the first thing to check where a difference exceeds it.
        notes: further notes.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4)
        >>> x, y = torch.ones(8, 4), torch.zeros(8, 2)
        >>> whole = pipe.verify(x, target=y, loss_fn=torch.nn.functional.mse_loss).whole
        >>> whole.ok, whole.cause
        (True, None)
    """

    differences: list[Difference]
    rtol: float
    cause: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything is within the tolerance."""
        return all(found.verdict != "different" for found in self.differences)

    def __str__(self) -> str:
        worst = max(self.differences, key=_badness, default=None)
        if worst is None:
            return "nothing to compare"
        if self.ok:
            return f"agrees (worst: {worst.kind}, {worst.relative:.1e}; rtol={self.rtol:.0e})"
        bad: dict[str, Difference] = {}
        for found in self.differences:
            known = bad.get(found.kind)
            if found.verdict == "different" and (known is None or known.relative < found.relative):
                bad[found.kind] = found
        apart = ", ".join(f"{kind} {found.relative:.1e}" for kind, found in bad.items())
        return f"{apart} apart (rtol={self.rtol:.0e}): check {self.cause}"


@dataclass(repr=False)
class Verification:
    """The result of :meth:`Pipeline.verify`: true if the step is right; printed, it is a table.

    Attributes:
        differences: one entry for each value that was compared.
        exact: whether equality to the bit is promised here: all stages are on the CPU, and no
            module is compiled.
        rtol: the relative tolerance.
        atol: the absolute tolerance of a difference's norm.
        schedule: a description of the pipelined run.
        reference: a description of the run that it was compared with.
        first_difference: the place where the runs diverge; ``None`` where they do not, or where it
            cannot be seen.
        notes: further notes.
        whole: the comparison with the whole batch in one forward; ``None`` where it was not asked
            for, where it is not possible (a note says why), or with one micro-batch only.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4)
        >>> x, y = torch.ones(8, 4), torch.zeros(8, 2)
        >>> found = pipe.verify(x, target=y, loss_fn=torch.nn.functional.mse_loss)
        >>> bool(found), {difference.verdict for difference in found.differences}
        (True, {'exact'})
    """

    differences: list[Difference]
    exact: bool
    rtol: float
    atol: float
    schedule: str
    reference: str
    first_difference: Divergence | None = None
    notes: list[str] = field(default_factory=list)
    whole: WholeBatch | None = None

    @property
    def verdict(self) -> Verdict:
        """The verdict on the worst difference."""
        found = {difference.verdict for difference in self.differences}
        if "different" in found:
            return "different"
        return "within tolerance" if "within tolerance" in found else "exact"

    @property
    def ok(self) -> bool:
        """Whether the pipelined step equals the plain one, and the whole batch's if compared.

        It has to equal the plain one to the bit where that is promised, elsewhere within the
        tolerance; and the whole batch's within a tolerance of its own.
        """
        return self.is_plain and (self.whole is None or self.whole.ok)

    @property
    def is_plain(self) -> bool:
        """Whether the step equals the plain loop's over the same micro-batches."""
        return self.verdict == "exact" or (self.verdict != "different" and not self.exact)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def worst(self) -> dict[str, Difference]:
        """The largest difference of each kind."""
        found: dict[str, Difference] = {}
        for difference in self.differences:
            known = found.get(difference.kind)
            if known is None or _badness(difference) > _badness(known):
                found[difference.kind] = difference
        return found

    def raise_if_different(self) -> None:
        """Do nothing if the result is ``ok``.

        Raises:
            VerificationError: it is not; the message is this table.
        """
        if not self.ok:
            raise VerificationError(f"the pipelined step differs from the plain one\n{self}")

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        divergence = self.first_difference
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "exact": self.exact,
            "rtol": self.rtol,
            "atol": self.atol,
            "schedule": self.schedule,
            "reference": self.reference,
            "differences": [_data(d) for d in self.differences],
            "first_difference": None if divergence is None else _data(divergence),
            "notes": list(self.notes),
            "whole": self._whole_data(),
        }

    def _whole_data(self) -> dict[str, Any] | None:
        if self.whole is None:
            return None
        return {
            "ok": self.whole.ok,
            "rtol": self.whole.rtol,
            "cause": self.whole.cause,
            "differences": [_data(d) for d in self.whole.differences],
            "notes": list(self.whole.notes),
        }

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        rows = []
        for kind, worst in self.worst.items():
            verdicts = [d.verdict for d in self.differences if d.kind == kind]
            counts = [verdicts.count(v) for v in ("exact", "within tolerance", "different")]
            where = worst.name if worst.verdict != "exact" else "-"
            rows.append([kind, *map(str, counts), f"{worst.relative:.1e}", where])
        head = ["", "Exact", "Within tolerance", "Different", "Worst", "Where"]
        promise = "equality to the bit is promised here" if self.exact else "to rounding"
        lines = [
            text_table(head, rows, left=1),
            "",
            f"{'ok' if self.is_plain else 'NOT ok'}: {self.verdict} ({promise}; "
            f"rtol={self.rtol:g}, atol={self.atol:g})",
            f"pipelined: {self.schedule}",
            f"reference: {self.reference}",
        ]
        if self.first_difference is not None:
            lines.append(f"first difference: {self.first_difference}")
        notes = list(self.notes)
        if self.whole is not None:
            lines.append(f"whole batch in one forward: {self.whole}")
            notes += self.whole.notes
        return "\n".join(lines + [f"note: {note}" for note in notes])


def _data(found: object) -> dict[str, Any]:
    """Return it as JSON can express it: an infinite distance becomes ``None``."""
    return {name: None if value == math.inf else value for name, value in vars(found).items()}


def _badness(difference: Difference) -> tuple[int, float]:
    order = ("exact", "within tolerance", "different")
    return order.index(difference.verdict), difference.relative


@dataclass
class Outcome:
    """The values that a run resulted in, by kind and name."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)

    def put(self, kind: str, named: Iterable[tuple[str, Any]]) -> None:
        """Add the values of a kind."""
        self.values.setdefault(kind, {}).update(named)


def named_outputs(outputs: Any) -> list[tuple[str, Any]]:
    """Return the values of a model's output, without graphs, with where they are in it."""
    named = zip(leaf_names(outputs), leaves(outputs), strict=True)
    return [(name, v.detach() if isinstance(v, Tensor) else v) for name, v in named]


def compared(plain: Outcome, piped: Outcome, rtol: float, atol: float) -> list[Difference]:
    """Return the differences between all values of two runs."""
    found = []
    gradients = plain.values.get("gradients", {}).values()
    norm = math.hypot(*(_norm(_on_host(g)) for g in gradients if g is not None))
    for kind in KINDS:
        ours, theirs = plain.values.get(kind, {}), piped.values.get(kind, {})
        for name in {**ours, **theirs}:
            there = name in ours and name in theirs
            scale = norm if kind == "gradients" else None
            found.append(
                _difference(kind, name, ours[name], theirs[name], scale, rtol, atol)
                if there
                else Difference(kind, name, "different", math.inf)
            )
    return found


def _difference(
    kind: str, name: str, a: Any, b: Any, scale: float | None, rtol: float, atol: float
) -> Difference:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        same = a is b or (type(a) is type(b) and not isinstance(a, Tensor) and _equal(a, b))
        return Difference(kind, name, "exact" if same else "different", 0.0 if same else math.inf)
    if a.shape != b.shape or a.dtype != b.dtype:
        return Difference(kind, name, "different", math.inf)
    a, b = _on_host(a), _on_host(b)
    if bool(((a == b) | ((a != a) & (b != b))).all()):
        return Difference(kind, name, "exact", 0.0)
    rounds = a.is_floating_point() or a.is_complex()
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    finite = torch.isfinite(a) & torch.isfinite(b)
    same = (a == b) | ((a != a) & (b != b))
    if not bool((finite | same).all()):  # infinite in one of them
        return Difference(kind, name, "different", math.inf)
    distance = _norm(torch.where(finite, a - b, 0.0))
    scale = _norm(a) if scale is None else scale
    relative = distance / scale if scale else math.inf
    within = rounds and distance <= atol + rtol * scale
    return Difference(kind, name, "within tolerance" if within else "different", relative)


def _norm(tensor: Tensor) -> float:
    """Return the norm of a tensor's finite elements."""
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    return float(torch.where(torch.isfinite(wide), wide, 0.0).norm())


def _on_host(tensor: Tensor) -> Tensor:
    return (tensor if tensor.layout is torch.strided else tensor.to_dense()).detach().cpu()


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) or bool(a != a and b != b)
    except (RuntimeError, ValueError, TypeError):
        return True  # values that cannot be compared are not results


def not_finite(outcome: Outcome) -> list[str]:
    """Return a note on the values of the plain run that are not finite, if there are any."""
    found = [
        f"{kind} {name}"
        for kind, named in outcome.values.items()
        for name, value in named.items()
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and not bool(torch.isfinite(_on_host(value)).all())
    ]
    return [f"not finite in the plain run: {', '.join(found[:3])}"] if found else []
