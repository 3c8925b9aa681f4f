"""Find where two runs of a model diverge, from a few numbers for every module call's result.

To keep all results of one run and compare them with the other's would need the memory of all
micro-batches' activations at once. A *sketch* of a tensor is enough: a checksum of its bits, which
any change changes, and its inner products with some fixed rows of signs, whose differences say how
far apart two tensors are (exactly, in expectation).

Source: Alon, Matias and Szegedy, "The space complexity of approximating the frequency moments"
(1996).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._common.modules import OwnHook, is_within
from ..._common.nested import tensors
from ..._torch.modes import is_transformed, without_torch_functions
from ..._torch.modules import is_compiled
from ...crossing.interception import active_mode
from ...crossing.tags import TAG
from ...devices.ownership import copying
from ...stages.cursor import current_microbatch, current_stage, is_recomputing

_ROWS = 16
_ODD = 0x9E3779B97F4A7C15 - 2**64  # of the golden ratio: scatters the bits of an index


class Sketch(NamedTuple):
    """The numbers that are kept of a tensor."""

    shape: tuple[int, ...]
    checksum: int
    products: tuple[float, ...]
    norm: float

    def apart(self, other: Sketch) -> float:
        """Return an estimated distance, relative to the first's norm; 0 if all bits are equal."""
        if self.shape != other.shape:
            return math.inf
        if self.checksum == other.checksum:
            return 0.0
        squares = [(a - b) ** 2 for a, b in zip(self.products, other.products, strict=True)]
        distance = math.sqrt(sum(squares) / len(squares))
        found = distance / self.norm if self.norm else math.inf
        # The bits differ, so the answer is above 0, even if sums lose it or are not a number.
        return max(found, 5e-324) if not math.isnan(found) else math.inf


def sketch(tensor: Tensor) -> Sketch:
    """Return a tensor's sketch, which is the same on every device for the same values."""
    with torch.no_grad(), copying(), torch.autocast("cpu", enabled=False):
        values = tensor.detach()
        if values.layout is not torch.strided:
            values = values.to_dense()
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        flat = values.reshape(-1).cpu().double() + 0.0  # no negative zeros
        index = (torch.arange(flat.numel()) + 1) * _ODD
        index ^= index >> 29
        bits = index * _ODD
        checksum = int((flat.view(torch.int64) * (2 * bits + 1)).sum())
        products = tuple(
            float(flat @ (1.0 - 2.0 * (bits >> (20 + row) & 1).double())) for row in range(_ROWS)
        )
        return Sketch(tuple(tensor.shape), checksum, products, float(flat.norm()))


class CallKey(NamedTuple):
    """A module call of one micro-batch."""

    microbatch: int
    path: str
    call: int


@dataclass
class SeenCall:
    """The observations of a module call."""

    stage: int | None
    given: list[Sketch]
    result: list[Sketch] = field(default_factory=list)
    gradients: dict[int, Sketch] = field(default_factory=dict)  # by result, of those made in it
    from_stages: set[int] = field(default_factory=set)  # the other stages of its arguments
    reads: set[CallKey] = field(default_factory=set)  # the calls that made its arguments


@dataclass
class Divergence:
    """The first place where a pipelined run differs from the plain one.

    Attributes:
        phase: ``"forward"``, ``"recomputation"`` or ``"backward"``.
        path: the module's path; ``""`` is the model's own code, between its modules' calls.
        call: the number of its call; ``None`` where a parameter or buffer differs, and no call.
        stage: the stage that it ran on.
        microbatch: the micro-batch; ``None`` where it is not known.
        apart: an estimate of the distance, relative to the norm in the plain run.
        why: a sentence that says what still agrees, and where to look.

    Example:
        >>> from blockpipe.reports import Divergence
        >>> why = "its arguments still agree"
        >>> print(Divergence("forward", "1", 0, stage=1, microbatch=2, apart=1e-3, why=why))
        forward of micro-batch 2, '1' (call 0) on stage 1: its arguments still agree
    """

    phase: str
    path: str
    call: int | None
    stage: int | None
    microbatch: int | None
    apart: float
    why: str

    def __str__(self) -> str:
        of = "" if self.microbatch is None else f" of micro-batch {self.microbatch}"
        call = "" if self.call is None else f" (call {self.call})"
        stage = "" if self.stage is None else f" on stage {self.stage}"
        name = shown(self.path)
        return f"{self.phase}{of}, {name}{call}{stage}: {self.why}"


def shown(path: str) -> str:
    """Return a module's path for a sentence."""
    return repr(path) if path else "the model itself"


class CallWatch:
    """Takes a sketch of every module call of a step.

    Args:
        model: the model whose modules are watched, except for scripted modules, and for modules
            inside of compiled ones: they run without Python.
        opaque: the paths of further modules whose inside is not watched.
    """

    def __init__(self, model: nn.Module, opaque: Sequence[str] = ()) -> None:
        self.seen: dict[CallKey, SeenCall] = {}  # in the order in which calls ended
        self.again: list[tuple[str, int | None, list[Sketch]]] = []  # recomputed: path, stage
        self._model = model
        self._opaque = set(opaque)
        self._counts: dict[tuple[int, str], int] = {}
        self._under_way: dict[int, list[SeenCall]] = {}
        self._made: dict[int, dict[int, tuple[Any, CallKey]]] = {}  # by micro-batch and node

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While entered, note calls."""
        handles = []
        try:
            for path, module in self._visible():
                before, after = OwnHook(self._begin, path), OwnHook(self._end, path)
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(module.register_forward_hook(after))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._made.clear()

    def _visible(self) -> Iterator[tuple[str, nn.Module]]:
        closed: list[str] = []
        for path, module in self._model.named_modules():
            if any(is_within(path, outer) for outer in closed):
                continue
            is_script = isinstance(module, torch.jit.ScriptModule)
            if path in self._opaque or is_compiled(module) or is_script:
                closed.append(path)
            if not is_script:  # scripted modules take no hooks
                yield path, module

    # --- forward

    def _begin(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        m = current_microbatch()
        if m is None or is_recomputing() or torch.compiler.is_compiling():
            return
        mode = active_mode()
        with without_torch_functions():
            given = [t for t in tensors((args, kwargs)) if _has_values(t)]
            if mode is not None:  # an operation here would read the newest values
                given = [mode.run.newest(t) for t in given]
            stage = current_stage()
            seen = SeenCall(stage, [sketch(t) for t in given])
            made = self._made.setdefault(m, {})
            for tensor in given:
                tag = getattr(tensor, TAG, None)
                if tag is not None and tag.stage != stage:
                    seen.from_stages.add(tag.stage)
                if id(tensor.grad_fn) in made:
                    seen.reads.add(made[id(tensor.grad_fn)][1])
        self._under_way.setdefault(m, []).append(seen)

    def _end(self, path: str, module: nn.Module, args: Any, result: Any) -> None:
        m = current_microbatch()
        if torch.compiler.is_compiling():
            return
        with without_torch_functions():
            found = [t for t in tensors(result) if _has_values(t)]
            sketches = [sketch(t) for t in found]
            if is_recomputing():
                self.again.append((path, current_stage(), sketches))
                return
            if m is None:
                return  # torch.utils.checkpoint runs it again in a backward
            call = self._counts.get((m, path), 0)
            self._counts[m, path] = call + 1
            seen = self._under_way[m].pop()
            seen.stage, seen.result = current_stage(), sketches
            key = CallKey(m, path, call)
            self.seen[key] = seen
            made = self._made.setdefault(m, {})
            for index, tensor in enumerate(found):
                node = tensor.grad_fn
                # The node of a tensor that an inner call made belongs to that call.
                if node is not None and id(node) not in made:
                    made[id(node)] = node, key
                    node.register_prehook(
                        partial(_note_gradient, seen.gradients, index, tensor.output_nr)
                    )

    def calls(self, microbatch: int) -> list[CallKey]:
        """Return the calls of a micro-batch, in the order in which they ended."""
        return [key for key in self.seen if key.microbatch == microbatch]


def _note_gradient(
    gradients: dict[int, Sketch], index: int, output: int, arriving: tuple[Tensor | None, ...]
) -> None:
    # In a backward of two parts a node may run twice, on the same gradient.
    gradient = arriving[output]
    if gradient is not None and index not in gradients:
        gradients[index] = sketch(gradient)


def _has_values(tensor: Tensor) -> bool:
    return not is_transformed(tensor) and not tensor.is_meta


# --- where they diverge

Differs = Callable[[float], bool]


def first_divergence(plain: CallWatch, piped: CallWatch, differs: Differs) -> Divergence | None:
    """Return the first module call, in execution order, that differs from the plain run's.

    Args:
        plain: the watch on the plain run.
        piped: the watch on the pipelined run.
        differs: ``(distance) -> bool``: whether a distance counts as a difference.
    """
    return (
        _in_forward(plain, piped, differs)
        or _in_recomputation(plain, piped, differs)
        or _in_backward(plain, piped, differs)
    )


def _apart(a: Sequence[Sketch], b: Sequence[Sketch]) -> float:
    if len(a) != len(b):
        return math.inf
    return max((x.apart(y) for x, y in zip(a, b, strict=True)), default=0.0)


def _in_forward(plain: CallWatch, piped: CallWatch, differs: Differs) -> Divergence | None:
    order = sorted(plain.seen, key=lambda key: key.microbatch)  # stable
    before: CallKey | None = None
    for key in order:
        expected, found = plain.seen[key], piped.seen.get(key)
        if found is None:
            why = "the plain run calls it, but the pipeline does not"
            return Divergence("forward", key.path, key.call, None, key.microbatch, math.inf, why)
        apart = _apart(expected.result, found.result)
        if differs(apart):
            given = differs(_apart(expected.given, found.given))
            why = _why_forward(key, before, found, apart, given=given)
            return Divergence(
                "forward", key.path, key.call, found.stage, key.microbatch, apart, why
            )
        if before is None or before.microbatch == key.microbatch:
            before = key
    extra = next((key for key in piped.seen if key not in plain.seen), None)
    if extra is None:
        return None
    stage = piped.seen[extra].stage
    why = "the pipeline calls it, but the plain run does not"
    return Divergence("forward", extra.path, extra.call, stage, extra.microbatch, math.inf, why)


def _why_forward(
    key: CallKey, before: CallKey | None, found: SeenCall, apart: float, *, given: bool
) -> str:
    after = "" if before is None else f" after {shown(before.path)}"
    if given:
        return (
            f"its arguments differ already, and so does its result ({apart:.1e}), but every call "
            f"before it agrees: look at the code between the calls{after}, and at the way of the "
            f"arguments to stage {found.stage}"
        )
    way = ""
    if found.from_stages:
        stages = ", ".join(map(str, sorted(found.from_stages)))
        way = f", or on the way of its arguments from stage {stages}"
    what = "in its own code" if not key.path else "in it"
    return f"its result differs ({apart:.1e}), its arguments agree: they diverge {what}{way}"


def _in_recomputation(plain: CallWatch, piped: CallWatch, differs: Differs) -> Divergence | None:
    results: dict[str, list[list[Sketch]]] = {}
    for key, seen in plain.seen.items():
        results.setdefault(key.path, []).append(seen.result)
    for path, stage, result in piped.again:
        apart = min((_apart(known, result) for known in results.get(path, [])), default=0.0)
        if differs(apart):
            why = (
                f"recomputed, it returns something else ({apart:.1e}) than in any forward: it "
                "reads values that have changed since"
            )
            return Divergence("recomputation", path, None, stage, None, apart, why)
    return None


def _in_backward(plain: CallWatch, piped: CallWatch, differs: Differs) -> Divergence | None:
    for m in sorted({key.microbatch for key in plain.seen}):
        calls = plain.calls(m)
        for key in reversed(calls):
            expected, found = plain.seen[key].gradients, piped.seen[key].gradients
            pairs = ((one, found.get(index)) for index, one in expected.items())
            apart = max((math.inf if b is None else a.apart(b) for a, b in pairs), default=0.0)
            if differs(apart):
                return _backward_divergence(plain, piped, key, calls, apart)
    return None


def _backward_divergence(
    plain: CallWatch, piped: CallWatch, key: CallKey, calls: list[CallKey], apart: float
) -> Divergence:
    """Return which call sent the gradient that differs at a call's result."""
    readers = [k for k in calls if key in plain.seen[k].reads]
    inner = [k for k in readers if not any(_is_inside(o, k) for o in readers)]
    here, m = piped.seen[key].stage, key.microbatch
    if not inner:
        why = (
            f"the gradient of its result differs ({apart:.1e}), those of all calls after it agree: "
            "look at the code that reads the result"
        )
        return Divergence("backward", key.path, key.call, here, m, apart, why)
    reader = inner[-1]
    stage = piped.seen[reader].stage
    others = ", ".join(shown(k.path) for k in inner[:-1])
    why = (
        f"the gradient of its result agrees, but the one that it sends on, to the result of "
        f"{shown(key.path)} on stage {here}, does not ({apart:.1e}): they diverge in its backward"
    )
    why += f", or on the way from stage {stage} to stage {here}" if stage != here else ""
    why += f", or in that of {others}, which read the same result" if others else ""
    return Divergence("backward", reader.path, reader.call, stage, m, apart, why)


def _is_inside(inner: CallKey, outer: CallKey) -> bool:
    return inner.path != outer.path and inner.path.startswith(
        f"{outer.path}." if outer.path else ""
    )
