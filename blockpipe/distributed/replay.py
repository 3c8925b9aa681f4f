"""The module of a stage, which replays its part of the tape with the process's own parameters.

Modules that the tape calls are the user's own and run as always. Parameters keep the names that
they have in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from .._common.nested import leaves, map_leaves, tensors
from .._torch.modules import (
    buffers_of,
    children_of,
    has_hooks,
    hooks_of_all_modules,
    parameters_of,
    unsaved_buffers_of,
)
from .._torch.tensors import is_view
from ..crossing.recompute import RecomputedCall, RecomputeSpec, SealedCall
from ..devices.rng_streams import Source, torchs_of
from ..errors import RouteError
from ..stages.cursor import current_microbatch
from .cutting import Order, StageTape
from .microbatches.calls import StageCalls
from .microbatches.results_of_modules import check_plain, check_shapes
from .taping.tape import (
    REMEDY,
    Entry,
    Held,
    Meta,
    Outside,
    Reference,
    Slice,
    StageDevice,
    Tape,
    Value,
    check_is_one,
    plain_values,
    references,
)

Environment = list[Any]
_Reader = Callable[[Environment], Any]


class StageModule(nn.Module):
    """One stage of a model, for :class:`torch.distributed.pipelining.PipelineStage`.

    ``forward`` takes the tensors of the boundary before it (the first stage: the model's tensor
    arguments, see :meth:`arguments`), and returns a tuple of those of the boundary after it (the
    last stage: the tensors of the model's output, which :meth:`output` puts together).

    Args:
        model: the user's model, which shares the modules that the stage calls.
        tape: the tape of a forward.
        stage: this stage's part of the tape.
        names: all names of each parameter and buffer of the model, by its first name.
        others: first names of other tensors that this stage has.
        device: the stage's device.

    Attributes:
        leads_to_inputs: whether each result is made to depend on an input. torch's zero-bubble
            schedules find the parameters by the paths from results to inputs, and drop the
            gradients of those that lie on none.
        microbatch: the number of the next micro-batch.
        calls: how an engine has it called; ``None``: as it is.
        sources: the generators that the model draws from, where recomputation needs them.
        hands_on: whether the state of generators is the last tensor of each boundary.
        recomputable: the modules that can be recomputed, by path.
        recomputes: whether those are recomputed for which no mark says otherwise.
        makers: what makes each tensor that it returns, in words.
    """

    def __init__(
        self,
        model: nn.Module,
        tape: Tape,
        stage: StageTape,
        names: Mapping[str, list[str]],
        others: list[str],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.index = stage.index
        self.stage = stage.stage
        self.input_metas = stage.input_metas
        self.output_metas = stage.output_metas
        self.makers = _makers(stage)
        self._taken = tape.inputs
        self._stage = stage
        self._device = device
        self._size = len(tape.made)
        self._called = {path: model.get_submodule(path) for path in stage.modules}
        self._attach(model, names, others)
        if stage.result is not None:
            self.output_metas = [self._meta_of(r, tape) for r in _tensor_references(stage.result)]
        self.training = model.training
        self.leads_to_inputs = False
        self.microbatch = 0
        self.calls: StageCalls | None = None
        self.sources: list[Source] = []
        self.hands_on = False
        self.recomputable: dict[str, RecomputeSpec] = {}
        self.recomputes = False
        self._grad = tape.grad
        self._steps = [self._step(entry) for entry in stage.entries]
        self._drops = _drops(stage)
        self._result = self._reader(stage.result)

    # --- what it has

    def _attach(self, model: nn.Module, names: Mapping[str, list[str]], others: list[str]) -> None:
        """Register what the stage calls and reads, under the names that it has in the model."""
        for path in sorted(self._called, key=lambda p: p.count(".")):
            self._attach_module(model, path)
        for first in (*self._stage.held, *others):
            for name in names.get(first, [first]):
                path, _, key = name.rpartition(".")
                owner, own = model.get_submodule(path), self._container(path, model)
                if key in parameters_of(own) or key in buffers_of(own):
                    continue
                if key in parameters_of(owner):
                    parameters_of(own)[key] = parameters_of(owner)[key]
                else:
                    buffers_of(own)[key] = buffers_of(owner)[key]
                    unsaved_buffers_of(own).update({key} & unsaved_buffers_of(owner))

    def _attach_module(self, model: nn.Module, path: str) -> None:
        if not path:  # the model itself: its parts under their names
            for name, child in model.named_children():
                children_of(self)[name] = child
            for slots in (parameters_of, buffers_of):
                for key, tensor in slots(model).items():
                    slots(self)[key] = tensor
            unsaved_buffers_of(self).update(unsaved_buffers_of(model))
            return
        outer, _, name = path.rpartition(".")
        container = self._container(outer, model)
        children_of(container).setdefault(name, model.get_submodule(path))

    def _container(self, path: str, model: nn.Module) -> nn.Module:
        own: nn.Module = self
        for name in path.split(".") if path else ():
            inside = children_of(own).get(name)
            if inside is None:
                inside = children_of(own)[name] = nn.Module()
            own = inside
        return own

    def _meta_of(self, reference: Reference, tape: Tape) -> Meta:
        if isinstance(reference, Value):
            return tape.metas[-1][reference.index]
        tensor = reference.tensor if isinstance(reference, Outside) else self._tensor(reference)
        return Meta.of(tensor)

    def called(self) -> Iterator[nn.Module]:
        """Yield the modules of the user's that it calls, and those inside of them."""
        for module in self._called.values():
            yield from module.modules()

    def keeps(self) -> Iterator[tuple[int, str]]:
        """Yield the attributes that it sets beside those modules: a module's id, and a name."""
        for entry in self._stage.entries:
            if isinstance(entry.function, partial) and entry.function.func is setattr:
                module, name = entry.function.args
                yield id(module), name

    def _tensor(self, reference: Reference) -> Tensor:
        assert isinstance(reference, Held)
        path, _, key = reference.name.rpartition(".")
        found: Tensor = getattr(self.get_submodule(path), key)
        return found

    # --- what it does

    def arguments(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Return the tensors of the model's arguments that the stages use, in the first stage's
        order.

        Raises:
            RouteError: two arguments are different tensors, and were one when it was recorded.
        """
        found: dict[int, Tensor] = {}
        recorded = list(leaves(self._taken))
        given = leaves((args, dict(sorted(kwargs.items()))))
        for reference, leaf in zip(recorded, given, strict=True):
            if isinstance(reference, Value):
                check_is_one(found.setdefault(reference.index, leaf), leaf)
        return tuple(found[value] for value in self._stage.inputs)

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Run the stage. Hooks of all modules are for the user's, but for a stage with own ones."""
        if any(hooks_of_all_modules()) and not has_hooks(self):
            return self.forward(*given)
        found: tuple[Tensor, ...] = super().__call__(*given)
        return found

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Run the stage."""
        microbatch, self.microbatch = self.microbatch, self.microbatch + 1
        try:
            if self.calls is not None:
                return self.calls.run(self, microbatch, given)
            return self.run(given)
        except Exception as error:
            error.add_note(f"blockpipe: in stage {self.stage}, micro-batch {microbatch}")
            raise

    @property
    def is_last(self) -> bool:
        """Whether it is the last stage."""
        return self._stage.result is not None

    def hand_on(self, state: Meta) -> None:
        """Have the state of random generators as the last tensor of each boundary."""
        self.hands_on = True
        if self.index:
            self.input_metas = [*self.input_metas, state]
        if not self.is_last:
            self.output_metas = [*self.output_metas, state]
            self.makers = [*self.makers, "the random generators"]

    def run(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the tape, given the tensors of the boundary before."""
        environment: Environment = [None] * self._size
        taken = map(_received, given, self._stage.input_orders)
        for value, tensor in zip(self._stage.inputs, taken, strict=True):
            # A leaf that needs a gradient must not be written to, nor what its sender may keep.
            environment[value] = tensor.clone() if value in self._stage.written else tensor
        for step, dropped in zip(self._steps, self._drops, strict=True):
            step(environment)
            for value in dropped:
                environment[value] = None
        if self._stage.result is not None:
            results = list(tensors(self._result(environment)))
            seen: set[int] = set()
            found = [_own(t, id(t) in seen or _adds(seen, t, given)) for t in results]
        else:
            shared = self._stage.shared
            orders = zip(self._stage.outputs, self._stage.output_orders, strict=True)
            found = [_own(_sent(environment[v], order), v in shared) for v, order in orders]
        lead = next((t for t in given if t.requires_grad), None) if self.leads_to_inputs else None
        if lead is not None:
            found = [_Led.apply(t, lead) if t.requires_grad else t for t in found]
        return tuple(found)

    def output(self, results: tuple[Tensor, ...]) -> Any:
        """Put the model's output together from what the last stage returns."""
        values = iter(results)
        return map_leaves(
            lambda leaf: next(values) if isinstance(leaf, Reference) else leaf, self._stage.result
        )

    def _step(self, entry: Entry) -> Callable[[Environment], None]:
        args = [self._reader(arg) for arg in entry.args]
        kwargs = {name: self._reader(arg) for name, arg in entry.kwargs.items()}
        function = entry.function
        if entry.module is not None:
            module = self._called[entry.module]
            function = module.forward if entry.has_hooks else module
            if entry.has_hooks:  # as the module has it when it runs
                function = partial(_call_forward, module)
        assert function is not None
        results, name, where, shapes = entry.results, entry.name, entry.where, entry.shapes
        answer, plain = entry.answer, entry.plain

        def step(environment: Environment) -> None:
            result = self._call(
                entry,
                function,
                tuple([read(environment) for read in args]),
                {name: read(environment) for name, read in kwargs.items()},
            )
            if answer is not None and result != answer:
                raise RouteError(
                    f"expected {answer} from {name} ({where}), as when it was recorded, got "
                    f"{result}: the forward asks this about its arguments, and may take another "
                    f"way; pass micro-batches that are alike in this, or {REMEDY}"
                )
            found = [result] if isinstance(result, Tensor) else list(tensors(result))
            if len(found) != len(results):
                raise RouteError(
                    f"expected {len(results)} tensors from {name} ({where}), as when it was "
                    f"recorded, got {len(found)}; what a module returns may depend on data only "
                    "inside of tensors"
                )
            if plain and (got := plain_values(result)) != plain:
                check_plain(plain, got, f"{name} ({where})")
            if shapes is not None:
                check_shapes(shapes, found, f"{name} ({where})")
            for value, tensor in zip(results, found, strict=True):
                if value is not None:
                    environment[value] = tensor

        if entry.grad and entry.autocast is None:
            return step
        return partial(_in_state, step, entry, self._grad)

    def _call(
        self, entry: Entry, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Call a function or a module; one that is recomputed drops what it saves."""
        asked = self.recomputes if entry.checkpoint is None else entry.checkpoint
        spec = None
        if asked and self.calls is not None and torch.is_grad_enabled():
            spec = self.recomputable.get(entry.module or "")
        if spec is None or entry.module is None:
            return function(*args, **kwargs)
        call = SealedCall(function, args, kwargs, (), self.stage, current_microbatch() or 0)
        sources = self.sources or torchs_of(self._device)
        return RecomputedCall(spec, call, sources).run(args, kwargs)

    def _reader(self, argument: Any) -> _Reader:
        """A function that gets an argument's value."""
        if isinstance(argument, Value):
            return itemgetter(argument.index)
        if isinstance(argument, Held):
            path, _, key = argument.name.rpartition(".")
            return partial(_held, self.get_submodule(path), key)
        if isinstance(argument, Outside):
            outside = argument.tensor
            # Elsewhere it is copied each time: it may have been written to since.
            return lambda _: outside if outside.device == self._device else outside.to(self._device)
        if isinstance(argument, StageDevice):
            return lambda _: self._device
        if isinstance(argument, Slice):
            parts = [self._reader(part) for part in argument.parts]
            return lambda environment: slice(*[part(environment) for part in parts])
        if type(argument) is list:
            return _gather(list, [self._reader(item) for item in argument])
        if type(argument) is tuple:
            return _gather(tuple, [self._reader(item) for item in argument])
        if type(argument) is dict:
            readers = {key: self._reader(item) for key, item in argument.items()}
            return lambda environment: {k: read(environment) for k, read in readers.items()}
        if not any(True for _ in references(argument)):
            return lambda _: argument
        return lambda environment: map_leaves(
            lambda leaf: self._reader(leaf)(environment) if isinstance(leaf, Reference) else leaf,
            argument,
        )


class _Led(torch.autograd.Function):
    """A tensor as it is, which depends on another one that gets no gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, lead: Tensor) -> Tensor:
        """Return the tensor; no view, for the engine detaches it in place."""
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient as it is."""
        return gradients[0], None


def _gather(kind: Callable[[list[Any]], Any], readers: list[_Reader]) -> _Reader:
    return lambda environment: kind([read(environment) for read in readers])


def _held(module: nn.Module, key: str, _: Environment) -> Any:
    return getattr(module, key)


def _call_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module.forward(*args, **kwargs)


def _in_state(
    step: Callable[[Environment], None], entry: Entry, grad: bool, environment: Environment
) -> None:
    """Run an entry whose code was under ``no_grad``, or under another autocast."""
    with ExitStack() as stack:
        if not entry.grad:
            stack.enter_context(torch.set_grad_enabled(not grad))
        for kind, is_on, dtype in entry.autocast or ():
            stack.enter_context(torch.autocast(kind, dtype, enabled=is_on))
        step(environment)


def _drops(stage: StageTape) -> list[list[int]]:
    """Return, for each entry, the values that are not needed after it."""
    kept = set(stage.outputs)
    kept.update(r.index for r in references(stage.result) if isinstance(r, Value))
    found: list[list[int]] = [[] for _ in stage.entries]
    for at in range(len(stage.entries) - 1, -1, -1):
        entry = stage.entries[at]
        read = [r.index for r in references((entry.args, entry.kwargs)) if isinstance(r, Value)]
        for value in (*read, *(v for v in entry.results if v is not None)):
            if value not in kept:
                kept.add(value)
                found[at].append(value)
    return found


def _makers(stage: StageTape) -> list[str]:
    """What makes each tensor that a stage returns, in words."""
    found = {
        value: f"{entry.name} ({entry.where}) on stage {stage.stage}"
        for entry in stage.entries
        for value in entry.results
        if value is not None
    }
    before = f"what stage {stage.stage} was given"
    results = _tensor_references(stage.result) if stage.result is not None else ()
    returned = [r.index if isinstance(r, Value) else -1 for r in results]
    return [found.get(value, before) for value in stage.outputs or returned]


def _tensor_references(value: Any) -> Iterator[Reference]:
    return (r for r in references(value) if isinstance(r, Value | Held | Outside))


def _adds(seen: set[int], tensor: Tensor, given: tuple[Tensor, ...]) -> bool:
    """Note a result; returns whether it is an input, or a parameter."""
    seen.add(id(tensor))
    return tensor.is_leaf and (tensor.requires_grad or any(tensor is one for one in given))


def _received(tensor: Tensor, order: Order) -> Tensor:
    """A tensor with its dims as the forward has them, from one as it is sent."""
    return tensor if order is None else tensor.permute([order.index(d) for d in range(len(order))])


def _sent(tensor: Tensor, order: Order) -> Tensor:
    return tensor if order is None else tensor.permute(order)


def _own(tensor: Tensor, is_shared: bool) -> Tensor:
    """Return a contiguous tensor of its own, and no view, for the engine detaches it in place."""
    found = tensor.contiguous()
    return found.clone() if found is tensor and (is_shared or is_view(found)) else found
