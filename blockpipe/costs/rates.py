"""How long work takes on a device: a recording says what is done, rates say how fast.

Operations of a kind take some time for some arithmetic, or for some bytes: a :class:`Line` through
points that were measured, by :mod:`blockpipe.costs.probing`, or that are stated here for devices
that cannot be. A line has many points because a number a second would not do: small products do not
fill a device, and memory is slower than the caches in front of it.

The time that a product's arithmetic takes and that of its bytes are added. A roofline, which takes
the longer of both, was tried: on the CPU products of few rows, and convolutions of few channels,
came out at half of their time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .work import Operation, Work


@dataclass(frozen=True)
class Line:
    """Seconds over an amount of work, straight between points.

    Args:
        points: (amount, seconds), ascending; one at least. Less than the first takes as long as
            that. More than the last takes longer in proportion to what lies between the last two,
            or from nothing to the only one.
        per_byte: seconds for each byte besides, where the amount is arithmetic.

    Example:
        >>> line = Line(((1e6, 2e-6), (1e9, 1e-3)))
        >>> line.seconds(1e3), f"{line.seconds(2e9):.6f}"
        (2e-06, '0.001999')
    """

    points: tuple[tuple[float, float], ...]
    per_byte: float = 0.0

    def seconds(self, amount: float) -> float:
        """Return the time of an amount of work."""
        points = self.points
        at = bisect_right(points, (amount, float("inf")))
        if at == 0:
            return points[0][1]
        if at == len(points):
            return points[-1][1] + (amount - points[-1][0]) * self.per_unit
        (a, before), (b, after) = points[at - 1 : at + 1]
        return before + (amount - a) * (after - before) / (b - a)

    @property
    def per_unit(self) -> float:
        """Return the seconds for one more unit where there is much work."""
        (a, before), (b, after) = ((0.0, 0.0), *self.points)[-2:]
        return (after - before) / (b - a) if b > a else 0.0


def straight(fixed: float, per_second: float, per_byte: float = 0.0) -> Line:
    """Return a line of a fixed time and a rate."""
    return Line(((0.0, fixed), (per_second, fixed + 1.0)), per_byte)


@dataclass(frozen=True)
class Pair:
    """The lines of one kind of operation: its forward, and the backward for one operand's
    gradient."""

    forward: Line
    backward: Line


@dataclass
class Rates:
    """The speed of a device: how long each kind of operation takes on it.

    Args:
        source: where that is from, in words: ``"measured on cuda:0 (NVIDIA H100)"``.
        find: a kind's lines, and a dtype's for products; called once for each that is asked for.
    """

    source: str
    find: Callable[[str, str], Pair] = field(repr=False)
    _known: dict[tuple[str, str], Pair] = field(default_factory=dict, repr=False)

    def pair(self, kind: str, dtype: str = "") -> Pair:
        """Return the lines of a kind of operation."""
        known = self._known.get((kind, dtype))
        if known is None:
            known = self._known[kind, dtype] = self.find(kind, dtype)
        return known

    def forward(self, work: Work) -> float:
        """Return the seconds of a forward."""
        return sum(
            count * _seconds(self.pair(operation.kind, operation.dtype).forward, operation)
            for operation, count in work.forward.items()
        )

    def backward(self, work: Work) -> float:
        """Return the seconds of its backward."""
        return sum(
            count * _seconds(self.pair(operation.kind, operation.dtype).backward, operation)
            for operation, count in work.backward.items()
        )


def _seconds(line: Line, operation: Operation) -> float:
    if not operation.flops:
        return line.seconds(operation.bytes)
    return line.seconds(operation.flops) + line.per_byte * operation.bytes


def stated(source: str, flops: float, bytes_: float, operation: float) -> Rates:
    """Return rates that nobody measured.

    Args:
        source: in words.
        flops: a second.
        bytes_: a second, read and written.
        operation: seconds of one, whatever its size.
    """
    products, passes = straight(operation, flops, 1 / bytes_), straight(operation, bytes_)

    def find(kind: str, dtype: str) -> Pair:
        line = products if dtype else passes
        return Pair(line, line)

    return Rates(source, find)


# Round numbers, good to a factor of two or three.
STATED_CPU = stated("stated for one core of a CPU", 4e10, 1e10, 4e-6)
STATED_ACCELERATOR = stated("stated for an accelerator", 1e14, 1e12, 6e-6)
STATED_COPY = straight(1e-5, 2e10)  # PCIe, and a launch


def together(sources: Iterable[str]) -> str:
    """Return where several devices' rates are from, each once, in words."""
    return ", ".join(dict.fromkeys(sources))
