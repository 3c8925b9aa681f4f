"""One model on its way from the meta device to values: what ``materialize`` does, step by step.

The ``Parameter`` objects stay: ``.data =`` on a meta parameter raises, but torch can swap the
contents of two tensors.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import WeightsError
from .fitting import like, slots_of
from .recording import Held
from .weights import Source


class Filling:
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
        self.empty: dict[int, tuple[Tensor, Held]] = {}

    @contextmanager
    def or_nothing(self) -> Iterator[None]:
        """Whatever fails: memory without values must not pass for a model next time."""
        try:
            yield
        except BaseException:
            for tensor in self.allocated:
                _become(tensor, like(tensor, torch.device("meta")))
            raise

    def fill(self, held: Held, stages: Collection[int]) -> None:
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

    def initialize(self, init: Callable[[nn.Module], object]) -> None:
        """Call ``init`` where something is without values, and read again what it wrote over."""
        with _Writes() as writes:
            for path, module in _children_first(self.model):
                own = [t for t in _own(module) if id(t) in self.empty]
                if own:
                    self._initialize(init, path, module, own, writes)
        for tensor, name in self.loaded.values():
            if _storage(tensor) in writes.storages and self.source is not None:
                self.source.read(name, tensor)

    def _initialize(
        self,
        init: Callable[[nn.Module], object],
        path: str,
        module: nn.Module,
        own: list[Tensor],
        writes: "_Writes",
    ) -> None:
        before = [(tensor, tensor.detach()) for tensor in own]
        slots = [(slots, dict(slots)) for slots in _slots(module)]
        try:
            with own[0].device:  # what it makes is made where the module is
                init(module)
        except Exception as error:
            error.add_note(f"blockpipe: in init= for {path or 'the model'} {type(module).__name__}")
            raise
        for now, then in slots:
            for key, old in then.items():
                new = now.get(key)
                # A function that puts another tensor in place: its values, in the old object.
                if old is not None and new is not None and new is not old and not new.is_meta:
                    old.copy_(new)
                    now[key] = old
        for tensor, alias in before:
            if tensor.data_ptr() != alias.data_ptr():  # by `.data =`
                tensor.data = alias.copy_(tensor)
        self._note_written(writes)

    def _note_written(self, writes: "_Writes") -> None:
        for key, (tensor, _) in list(self.empty.items()):
            if _storage(tensor) in writes.storages:
                del self.empty[key]

    def check(self, *, whole: bool) -> None:
        """Raise for what is without values; in a whole model, for plain attributes too."""
        lines = [
            f"{' = '.join(map(repr, held.names))} (stage {held.stage}, "
            f"{held.dtype}{list(held.shape)})"
            for _, held in self.empty.values()
        ]
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


def _become(tensor: Tensor, other: Tensor) -> None:
    """Give a tensor another's memory, hooks and all staying with the object."""
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(tensor, hooks):
            setattr(other, hooks, getattr(tensor, hooks))
    # torch.utils.swap_tensors is this and a refusal where there are weak references, for whoever
    # keys by them what was true of the old contents. An LSTM has some to its own parameters.
    torch._C._swap_tensor_impl(tensor, other)


class _Writes(TorchDispatchMode):
    """Notes which storages are written to. Version counters would not do: ``p.data`` has its
    own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[number] if number < len(args) else kwargs.get(argument.name)
                for tensor in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(tensor, Tensor):
                        self.storages.add(_storage(tensor))
        return func(*args, **kwargs)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _slots(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


def _own(module: nn.Module) -> Iterator[Tensor]:
    for slots in _slots(module):
        yield from (tensor for tensor in slots.values() if tensor is not None)


def _children_first(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules in the order of ``Module.apply``, which is the order they are built in."""
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
