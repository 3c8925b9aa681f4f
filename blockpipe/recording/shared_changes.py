"""Find temporary changes of a forward that several hops see: modules' attributes, the switches of
torch and of the process.

Micro-batches under way at once would make such changes for each other. The search runs at each
module call and operation, because a change that is undone before the forward ends
(``functional_call``, ``sdpa_kernel``) leaves no trace afterwards.
"""

import locale
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._common.callsite import users_line
from .._common.libraries import is_users
from .._common.modules import STATE
from .._common.threads.thread_state import autocast_states
from .._torch.modes import is_in_forward_mode
from .._torch.modules import COMPILED_CALL, SLOTS, caches_parametrizations, slots_of
from ..restoring.process_state import process_state
from .calls import hops_by_path
from .entries import SharedChange, TensorInfo
from .outside.outside_state import OWN_MODULE
from .plain_values.places import in_words
from .reads import NamesRead
from .recording import Recording

_UNSET = object()
_INTERCEPTED = ("forward", STATE, COMPILED_CALL)  # Blockpipe's, during a recording
_SETS_REQUIRES_GRAD = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]

_CACHED = "torch.nn.utils.parametrize.cached()"  # one cache for all micro-batches
# One level for all threads. Its tangents stay behind where a tensor crosses.
_FORWARD_MODE = "the level of forward-mode AD"
# Where a text goes matters only to who reads it, so that two stages may keep a library quiet.
_OUT, _ERR = "sys.stdout", "sys.stderr"
# The list is of each that has one, so that one of two would have the other's warnings.
_WARNED = "where warnings go (warnings.catch_warnings(record=True))"
# They choose among kernels of the same numbers, to rounding, and on the CPU they choose nothing.
_CUDNN, _CUDNN_TRIES = "torch.backends.cudnn.enabled", "torch.backends.cudnn.benchmark"
# Nothing while cuDNN is off, as a loss for CTC has it, whose context sets all that is said of it.
_OF_CUDNN = ("torch.backends.cudnn.allow_tf32", "torch.backends.cudnn.deterministic")
_SWITCHES: dict[str, Callable[[], object]] = {  # the process's
    "torch.backends.cuda.flash_sdp_enabled()": torch.backends.cuda.flash_sdp_enabled,
    "torch.backends.cuda.mem_efficient_sdp_enabled()": (
        torch.backends.cuda.mem_efficient_sdp_enabled
    ),
    "torch.backends.cuda.math_sdp_enabled()": torch.backends.cuda.math_sdp_enabled,
    "torch.backends.cuda.cudnn_sdp_enabled()": torch.backends.cuda.cudnn_sdp_enabled,
    "torch.backends.cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (
        lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (
        lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "torch.backends.cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
    _CUDNN: lambda: torch.backends.cudnn.enabled,
    _CUDNN_TRIES: lambda: torch.backends.cudnn.benchmark,
    "torch.backends.cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "torch.is_deterministic_algorithms_warn_only_enabled()": (
        torch.is_deterministic_algorithms_warn_only_enabled
    ),
    "torch.backends.mkldnn.enabled": lambda: torch.backends.mkldnn.enabled,
    "torch.backends.mkldnn.deterministic": lambda: torch.backends.mkldnn.deterministic,
    "torch.backends.mkldnn.allow_tf32": lambda: torch.backends.mkldnn.allow_tf32,
    "torch.backends.mha.get_fastpath_enabled()": torch.backends.mha.get_fastpath_enabled,
    "torch.backends.opt_einsum.enabled": lambda: torch.backends.opt_einsum.enabled,
    "torch.backends.opt_einsum.strategy": lambda: torch.backends.opt_einsum.strategy,
    "torch.get_num_threads()": torch.get_num_threads,
    "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.is_anomaly_enabled()": torch.is_anomaly_enabled,
    "os.getcwd()": os.getcwd,
    "locale.setlocale(locale.LC_ALL)": partial(locale.setlocale, locale.LC_ALL),
    _OUT: lambda: sys.stdout,
    _ERR: lambda: sys.stderr,
    _WARNED: lambda: getattr(warnings, "_showwarnmsg_impl", None),
    _CACHED: caches_parametrizations,
    _FORWARD_MODE: is_in_forward_mode,
}
_HARMLESS_ON_ONE_HOP = (_OUT, _ERR, _WARNED, _CUDNN, _CUDNN_TRIES, _FORWARD_MODE)
_LOCAL = f"keep it in a local variable, {OWN_MODULE}"
_DETACH = "detach tensors that must get no gradient instead"
_LEAVE_OUT = "leave it out, because the results are the same without the cache"
_ON_ONE_STAGE = "compute everything that has tangents on one stage"
# Each process makes them in the order of its own threads, and the n-th meets the others' n-th.
_ORDER, _TOGETHER = "the order of collectives", "make all of them on one stage"
_REMEDIES = {_CACHED: _LEAVE_OUT, _FORWARD_MODE: _ON_ONE_STAGE}
_LEAVE = "enter it by 'with'"  # where the next micro-batch would begin with it
_AROUND = "change it around the whole step instead"


@dataclass
class _Lent:
    """A tensor of a module, in whose place others are for a while. Both are alive, so that no
    others have their ids."""

    module: nn.Module
    tensor: Tensor
    on: set[int]  # the hops
    where: str  # the first line
    since: int = 0  # the hop on which it was replaced last


class SharedChanges:
    """Watch one forward for such changes.

    Args:
        model: the model, in its state before the forward.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._attributes = {path: _attributes(module) for path, module in model.named_modules()}
        self._slots = {path: _slots(module) for path, module in model.named_modules()}
        self._switches, self._process = _switches(), process_state()
        self._autocast = autocast_states()
        self.changes_process = False
        self._changed: dict[tuple[str, str], Tensor | None] = {}  # by path and name
        self._calls = Counter[str]()
        self._at_first: set[tuple[str, str]] = set()  # the ones changed in a module's first call
        self._toggled: dict[int, str] = {}  # id of a parameter: the line
        self._switched: dict[str, tuple[set[int], str]] = {}  # the hops, and the first line
        self._collectives: dict[int, str] = {}  # by hop, the first line
        self._lent: dict[tuple[int, int], _Lent] = {}  # by the ids of a module and a tensor

    def at_call(self, path: str, module: nn.Module) -> None:
        """Compare a module, when it is called, with its state before the forward."""
        if path in self._slots:
            self._compare(path, self._attributes[path], _attributes(module))
            self._compare(path, self._slots[path], _slots(module))
            self._calls[path] += 1
            if self._calls[path] == 2:
                self._at_first |= {key for key in self._changed if key[0] == path}

    def _compare(self, path: str, before: dict[str, Any], now: dict[str, Any]) -> None:
        for name in before.keys() | now.keys():
            then = before.get(name, _UNSET)
            if _differ(then, now.get(name, _UNSET)):
                held = then if isinstance(then, Tensor) else None
                self._changed.setdefault((path, name), held)

    def at_operation(self, hop: int) -> None:
        """Note the switches under which an operation runs."""
        self.changes_process = self.changes_process or process_state() != self._process
        now = _switches()
        if now == self._switches:
            return
        of_none = () if now[_CUDNN] else _OF_CUDNN
        for name, value in now.items():
            if value != self._switches[name] and name not in of_none:
                self._switched.setdefault(name, (set(), users_line()))[0].add(hop)

    def at_collective(self, hop: int) -> None:
        """Note an operation that several processes make together."""
        self._collectives.setdefault(max(hop, 0), users_line())

    @property
    def toggles(self) -> bool:
        """Whether any parameter has begun, or ceased, to need a gradient."""
        return bool(self._toggled)

    def at_function(self, function: object, args: tuple[Any, ...]) -> None:
        """Note a torch function that changes whether a parameter gets a gradient."""
        if function in _SETS_REQUIRES_GRAD and args[0].is_leaf:
            asked = args[1] if len(args) > 1 else True
            if args[0].requires_grad != asked:
                self._toggled.setdefault(id(args[0]), users_line())

    def swaps(
        self, module: nn.Module, then: Mapping[str, Tensor], now: Mapping[str, Tensor], hop: int
    ) -> None:
        """Note that a module is given other tensors for a while, or its own ones back.

        Args:
            module: the module.
            then: its tensors before.
            now: the tensors that it has instead, by the same names.
            hop: the hop.
        """
        for name, tensor in then.items():
            back = self._lent.get((id(module), id(now[name])))
            if back is not None:
                back.on.update(range(back.since, hop + 1))
            elif now[name] is not tensor:
                lent = _Lent(module, tensor, {hop}, users_line())
                lent = self._lent.setdefault((id(module), id(tensor)), lent)
                lent.since = hop

    @property
    def switches(self) -> bool:
        """Whether operations ran under other switches than those around the forward."""
        return self.changes_process or bool(self._switched)

    def set_by_libraries(self, result: Recording) -> Iterator[tuple[nn.Module, str, set[int], str]]:
        """Yield the attributes of libraries' modules that a call has changed, each with the module,
        the name, and the hops and the first line of its calls; called when the forward is over."""
        hops = hops_by_path(result.calls, starts=True)
        where = {c.path: c.where for c in reversed(result.calls) if c.hop is not None}  # the first
        modules = dict(self._model.named_modules())
        for path, module in modules.items():
            # Changes that were not undone. Parameters and buffers that stay replaced are state.
            if path in self._attributes:
                self._compare(path, self._attributes[path], _attributes(module))
        for path, name in self._changed:
            if path in hops and path in modules and not is_users(type(modules[path]).__module__):
                yield modules[path], name, hops[path], where[path]

    def found(
        self,
        result: Recording,
        held: Mapping[int, TensorInfo],
        reads: NamesRead,
        read_on: Callable[[Tensor], set[int]],
    ) -> Iterator[SharedChange]:
        """Yield the changes that several hops see; called after :meth:`set_by_libraries`.

        Args:
            result: the recording, with its hops and calls.
            held: the parameters and buffers by id, with the hops that read them.
            reads: the names that the user's code reads.
            read_on: returns the hops that read a tensor.
        """
        result.changes_process = self.changes_process
        result.changing = {f"{path}.{name}" for path, name in self._changed}
        result.changing |= set(self._rebound())
        modules = dict(self._model.named_modules())
        # Changes are looked for where calls start. Within one call that spans hops, OutsideState
        # compares what is set and read.
        hops = hops_by_path(result.calls, starts=True)
        where = {c.path: c.where for c in reversed(result.calls) if c.hop is not None}  # the first
        for (path, name), tensor in sorted(self._changed.items(), key=lambda item: item[0]):
            readers = set(held[id(tensor)].hops) if id(tensor) in held else set()
            seen = sorted(hops.get(path, set()) | readers)
            if tensor is None and reads.is_unread(name, type(modules[path])):
                continue
            if len(seen) > 1 and path in hops:
                remedy = _LOCAL if tensor is None else OWN_MODULE
                what = f"{path}.{name}"
                settles = (path, name) in self._at_first and not isinstance(tensor, nn.Parameter)
                change = SharedChange(what, f"calls {path!r}", seen, where[path], remedy, settles)
                change.place = id(modules[path]), name
                yield change
        for key, line in self._toggled.items():
            if key in held and len(held[key].hops) > 1:
                name = held[key].name
                yield SharedChange(
                    f"{name}.requires_grad", f"reads {name!r}", held[key].hops, line, _DETACH
                )
        yield from self._shared_when_lent(result, read_on)
        if len({result.hops[hop].stage for hop in self._collectives}) > 1:
            line = next(iter(self._collectives.values()))
            of_hops = sorted(self._collectives)
            yield SharedChange(_ORDER, "makes them", of_hops, line, _TOGETHER)
        if len(result.hops) > 1:
            if autocast_states() != self._autocast:
                on_all = [*range(len(result.hops))]
                yield SharedChange("autocast", "leaves it so", on_all, users_line(), _LEAVE)
            for name, (on, line) in self._switched.items():
                if name in (_OUT, _ERR) and reads.is_unread("getvalue"):
                    continue
                if name not in _HARMLESS_ON_ONE_HOP or len(on) > 1:
                    remedy = _REMEDIES.get(name, _AROUND)
                    yield SharedChange(name, "runs under it", sorted(on), line, remedy)

    def _shared_when_lent(
        self, result: Recording, read_on: Callable[[Tensor], set[int]]
    ) -> Iterator[SharedChange]:
        """Yield the modules that have other tensors for a while, and that another stage uses."""
        paths = {id(module): path for path, module in self._model.named_modules()}
        found = set[int]()
        for (module, _), lent in self._lent.items():
            hops = lent.on | read_on(lent.tensor)
            stages = {result.hops[min(hop, len(result.hops) - 1)].stage for hop in hops}
            if len(stages) > 1 and module not in found:
                found.add(module)
                what = f"the parameters of {in_words(lent.module, None, paths)} for a while"
                yield SharedChange(what, "uses them", sorted(hops), lent.where, OWN_MODULE)

    def _rebound(self) -> Iterator[str]:
        """Yield the names of parameters and buffers that the forward has replaced."""
        for path, module in self._model.named_modules():
            now, before = _slots(module), self._slots.get(path, {})
            for name, value in before.items():
                if isinstance(value, Tensor) and now.get(name) is not value:
                    yield f"{path}.{name}" if path else name


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's plain attributes."""
    outside = (*_INTERCEPTED, *SLOTS)
    return {name: value for name, value in vars(module).items() if name not in outside}


def _slots(module: nn.Module) -> dict[str, Any]:
    """Return a module's parameters, buffers and submodules."""
    return {name: value for slots in slots_of(module) for name, value in slots.items()}


def _switches() -> dict[str, object]:
    return {name: _or_none(look) for name, look in _SWITCHES.items()}


def _or_none(look: Callable[[], object]) -> object:
    try:
        return look()
    except (RuntimeError, OSError):  # set by torch's other way to set it; a directory that is gone
        return None


def _differ(then: object, now: object) -> bool:
    plain = (bool, int, float, str)
    return then is not now and not (
        type(then) is type(now) and isinstance(then, plain) and then == now
    )
