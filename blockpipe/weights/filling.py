"""One model on its way from the meta device to values: what ``materialize`` does, step by step.

The ``Parameter`` objects stay: ``.data =`` on a meta parameter raises, but torch can swap the
contents of two tensors.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._common.callsite import warn
from .._torch.graph import share_hooks
from .._torch.modes import DispatchMode
from .._torch.modules import buffers_of, parameters_of
from .._torch.tensors import schema_of, storage_of, swap_contents
from ..errors import WeightsError
from ..recording.entries import TensorInfo
from .sources import Source
from .validation import like, slots_of


class Materializer:
    """One model on its way from meta to values."""

    def __init__(
        self, model: nn.Module, source: Source | None, devices: Sequence[torch.device]
    ) -> None:
        self.model = model
        self.source = source
        self.devices = devices
        self.slots = {name: slot for slot in slots_of(model).values() for name in slot[0].names}
        self.allocated: list[Tensor] = []
        self.loaded: dict[int, tuple[Tensor, str]] = {}  # and the name in the source
        self.empty: dict[int, tuple[Tensor, TensorInfo]] = {}
        self.lacking: list[str] = []  # what the source should have, for a message

    @contextmanager
    def or_nothing(self) -> Iterator[None]:
        """Free the memory if anything fails: memory without values must not pass for a model next
        time."""
        try:
            yield
        except BaseException as error:
            if self.loaded.keys() - {id(tensor) for tensor in self.allocated}:
                error.add_note(
                    "blockpipe: what had values before now holds a part of the checkpoint"
                )
            for tensor in self.allocated:
                _become(tensor, like(tensor, torch.device("meta")))
            raise

    def fill(self, held: TensorInfo, stages: Collection[int]) -> None:
        """Allocate a tensor on the first of these stages that reads it, and read its values."""
        stage = next((s for s in (held.stage, *held.also_read_on) if s in stages), None)
        if stage is None:
            return
        slot, tensor = self.slots[held.name]
        was_meta = tensor.is_meta
        if was_meta:
            _become(tensor, like(tensor, self.devices[stage]))
            self.allocated.append(tensor)
        name = None if self.source is None else slot.source_name(self.source.headers)
        if self.source is not None and name is not None:
            self.source.read(name, tensor)
            self.loaded[id(tensor)] = tensor, name
        elif was_meta and tensor.numel():
            self.empty[id(tensor)] = tensor, held
            if self.source is not None and slot.saved:
                self.lacking.append(_named(held))

    def initialize(self, init: Callable[[nn.Module], object], *, recurse: bool) -> None:
        """Call ``init`` where something was without values, and read again what ``init`` wrote
        over.

        Args:
            init: gives a module values.
            recurse: call it for what is above such tensors too, not for their owners alone: a
                model may initialize its parts' tensors from further up.
        """
        at_start = dict(self.empty)
        with _Writes() as writes:
            for path, module in _children_first(self.model):
                empty = [t for t in _held_by(module, recurse) if id(t) in at_start]
                if empty:
                    self._initialize(init, path, module, empty[0].device, writes)
        for tensor, name in self.loaded.values():
            if storage_of(tensor) in writes.storages and self.source is not None:
                self.source.read(name, tensor)

    def _initialize(
        self,
        init: Callable[[nn.Module], object],
        path: str,
        module: nn.Module,
        device: torch.device,
        writes: "_Writes",
    ) -> None:
        before = [(t, t.detach()) for t in _held_by(module, recurse=True) if not t.is_meta]
        slots = [(slots, dict(slots)) for part in module.modules() for slots in _slots(part)]
        try:
            with device:  # what it makes is made where the module is
                init(module)
            for now, then in slots:
                for key, old in then.items():
                    new = now.get(key)
                    # A function that puts another tensor in place: its values, in the old object.
                    if old is not None and new is not None and new is not old and not new.is_meta:
                        old.copy_(new)
                        now[key] = old
        except BaseException as error:
            error.add_note(f"blockpipe: in init= for {path or 'the model'} {type(module).__name__}")
            for now, then in slots:
                now.clear()
                now.update(then)
            raise
        for tensor, alias in before:
            if tensor.data_ptr() != alias.data_ptr():  # by `.data =`
                tensor.data = alias.copy_(tensor)
        self._note_written(writes)

    def _note_written(self, writes: "_Writes") -> None:
        for key, (tensor, _) in list(self.empty.items()):
            if storage_of(tensor) in writes.storages:
                del self.empty[key]

    def check(self, *, whole: bool) -> None:
        """Raise an error for tensors without values; in a whole model, for plain attributes too."""
        lines = [_named(held) for _, held in self.empty.values()]
        lines += [
            f"{f'{path}.{key}' if path else key!r}, which is neither a parameter nor a buffer"
            for path, module in self.model.named_modules()
            for key, value in module.__dict__.items()
            if whole and isinstance(value, Tensor) and value.is_meta
        ]
        if lines:
            raise WeightsError(
                f"every tensor of {type(self.model).__name__} needs values, but nothing gave "
                "any to\n  " + "\n  ".join(lines) + "\nInitialize them in a function and pass it "
                "as init=; register as a buffer what is none"
            )
        if self.lacking and self.source is not None:
            # A new head, or a checkpoint that is not whole: only the user knows.
            warn(
                f"a checkpoint holds every parameter and persistent buffer, but {self.source.what} "
                f"lacks\n  " + "\n  ".join(self.lacking) + "\nof "
                f"{type(self.model).__name__}; init= gave them values, untrained ones. Fetch the "
                "whole checkpoint, or ignore this warning if they are meant to be new"
            )


def _named(held: TensorInfo) -> str:
    names = " = ".join(map(repr, held.names))
    return f"{names} (stage {held.stage}, {held.dtype}{list(held.shape)})"


def _become(tensor: Tensor, other: Tensor) -> None:
    """Give a tensor another's memory, hooks and all staying with the object."""
    share_hooks(tensor, other)
    swap_contents(tensor, other)


class _Writes(DispatchMode):
    """A mode that notes which storages are written to. Version counters would not do: ``p.data``
    has its own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for number, argument in enumerate(schema_of(func).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[number] if number < len(args) else kwargs.get(argument.name)
                for tensor in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(tensor, Tensor):
                        self.storages.add(storage_of(tensor))
        return func(*args, **kwargs)


def _slots(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return parameters_of(module), buffers_of(module)


def _held_by(module: nn.Module, recurse: bool) -> Iterator[Tensor]:
    yield from module.parameters(recurse)
    yield from module.buffers(recurse)


def _children_first(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Yield modules in the order of ``Module.apply``, in which they are built."""
    order: list[tuple[str, nn.Module]] = []

    def visit(path: str, module: nn.Module, seen: set[int]) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        for name, child in module.named_children():
            visit(f"{path}.{name}" if path else name, child, seen)
        order.append((path, module))

    visit("", model, set())
    return order
