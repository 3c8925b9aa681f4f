"""Skip connections by name: a tensor that one layer stashes and a later one pops.

A pipeline needs none of this: a tensor that goes from stage to stage in any way is noticed, and
copied once, straight to the stage that reads it. So a stash is an entry in a dictionary of the
forward under way. Those of torchgpipe's rules remain that find mistakes: names are declared, and
each is stashed once and popped once.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from ..._common.callsite import users_line
from ..._common.checks import expected
from ..._torch.modules import children_of
from ...errors import RecordingError, UsageError
from ...stages.cursor import current_cursor

__all__ = ["Namespace", "Skippable", "pop", "skippable", "stash", "verify_skippables"]

_KEPT = "torchgpipe.skip"


@dataclass(frozen=True, order=True)
class Namespace:
    """A namespace for skips of the same name; see :meth:`Skippable.isolate`. Copies are equal.

    Example:
        >>> import torch
        >>> from blockpipe.compat.torchgpipe.skip import Namespace, skippable, stash
        >>> @skippable(stash=["skip"])
        ... class Stash(torch.nn.Module):
        ...     def forward(self, x):
        ...         yield stash("skip", x)
        ...         return x
        >>> ns = Namespace()
        >>> list(Stash().isolate(ns).stashable()) == [(ns, "skip")]
        True
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)


Key = tuple[Namespace | None, str]


@dataclass(slots=True)  # not frozen: that takes longer to make, and each micro-batch makes some
class stash:  # noqa: N801 - torchgpipe's name
    """``yield stash(name, tensor)``: keep a tensor for the layer that pops it.

    Args:
        name: the name as declared with :func:`skippable`.
        tensor: the tensor to keep; ``None`` may be kept too.

    Source: ``torchgpipe.skip.stash``.

    Example:
        >>> import torch
        >>> from blockpipe.compat.torchgpipe.skip import skippable, stash
        >>> @skippable(stash=["skip"])
        ... class Stash(torch.nn.Module):
        ...     def forward(self, x):
        ...         yield stash("skip", x)
        ...         return x
        >>> Stash()(torch.ones(2))
        tensor([1., 1.])
    """

    name: str
    tensor: Tensor | None


@dataclass(slots=True)
class pop:  # noqa: N801 - torchgpipe's name
    """``tensor = yield pop(name)``: take the tensor that an earlier layer has stashed.

    Args:
        name: the name as declared with :func:`skippable`.

    Source: ``torchgpipe.skip.pop``.

    Example:
        >>> import torch
        >>> from blockpipe.compat.torchgpipe.skip import pop, skippable, stash
        >>> @skippable(stash=["skip"])
        ... class Stash(torch.nn.Module):
        ...     def forward(self, x):
        ...         yield stash("skip", x)
        ...         return 2 * x
        >>> @skippable(pop=["skip"])
        ... class Add(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x + (yield pop("skip"))
        >>> torch.nn.Sequential(Stash(), Add())(torch.ones(2))
        tensor([3., 3.])
    """

    name: str


class _InThread(threading.local):
    """The tensors that are stashed in forwards outside of a pipeline."""

    def __init__(self) -> None:
        self.kept: dict[Key, Tensor | None] = {}


_in_thread = _InThread()


class Skippable(nn.Module):
    """A module that stashes and pops; :func:`skippable` makes classes of it.

    Args:
        *args: the decorated class's arguments.
        **kwargs: its keyword arguments.

    The instance of the decorated class is ``module``, so that in a ``state_dict`` its names have
    that in front, as in torchgpipe.

    Raises:
        RecordingError: in a call, a name is not declared, was not stashed before, or is declared
            and not used. A ``RuntimeError``, as in torchgpipe.

    Example:
        >>> import torch
        >>> from blockpipe.compat.torchgpipe.skip import Skippable, skippable, stash
        >>> @skippable(stash=["skip"])
        ... class Stash(torch.nn.Module):
        ...     def forward(self, x):
        ...         yield stash("skip", x)
        ...         return x
        >>> issubclass(Stash, Skippable), list(Stash().stashable())
        (True, [(None, 'skip')])
    """

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]]
    poppable_names: ClassVar[frozenset[str]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace] = {}

    def isolate(self, ns: Namespace, *, only: str | Iterable[str] | None = None) -> Self:
        """Put skips into a namespace: names may be used again in another one.

        Args:
            ns: the namespace.
            only: the names that are put there; ``None`` puts all of them.

        Returns:
            The same module.
        """
        chosen = {only} if isinstance(only, str) else only
        names = self.stashable_names | self.poppable_names if chosen is None else set(chosen)
        self.namespaces.update(dict.fromkeys(names, ns))
        return self

    def stashable(self) -> Iterator[Key]:
        """Yield the skips that it stashes, with their namespaces."""
        yield from ((self.namespaces.get(name), name) for name in sorted(self.stashable_names))

    def poppable(self) -> Iterator[Key]:
        """Yield the skips that it pops, with their namespaces."""
        yield from ((self.namespaces.get(name), name) for name in sorted(self.poppable_names))

    def forward(self, input: Any) -> Any:
        """Run the decorated class's forward, and carry out the commands that it yields.

        Args:
            input: its one argument.

        Returns:
            Its result.
        """
        output, used = self.module(input), set[str]()
        # The abstract class is asked last: that is slow.
        if isinstance(output, GeneratorType) or (
            not isinstance(output, Tensor) and isinstance(output, Generator)
        ):
            output = self._drive(output, used)
        if len(used) < len(self.stashable_names) + len(self.poppable_names):
            self._check_used("stash", self.stashable_names, used)
            self._check_used("pop", self.poppable_names, used)
        return output

    def _drive(self, commands: Generator[object, Tensor | None, Any], used: set[str]) -> Any:
        cursor = current_cursor()
        kept: dict[Key, Tensor | None] = (
            _in_thread.kept if cursor is None else cursor.kept.setdefault(_KEPT, {})
        )
        answer: Tensor | None = None
        while True:
            try:
                command = commands.send(answer)
            except StopIteration as end:
                return end.value
            answer = None
            if isinstance(command, stash):
                if command.name not in self.stashable_names:
                    raise self._undeclared(command.name, "stash", self.stashable_names)
                kept[self.namespaces.get(command.name), command.name] = command.tensor
            elif isinstance(command, pop):
                if command.name not in self.poppable_names:
                    raise self._undeclared(command.name, "pop", self.poppable_names)
                key = (self.namespaces.get(command.name), command.name)
                if key not in kept:
                    raise self._not_stashed(command.name)
                answer = kept.pop(key)
            else:
                raise UsageError(
                    expected("stash(…) or pop(…)", command, for_=f"a yield of {self._name}")
                )
            used.add(command.name)

    def _undeclared(self, name: str, verb: str, declared: frozenset[str]) -> RecordingError:
        return RecordingError(
            f"expected {self._name} to {verb} {_listed(declared) or 'nothing'}, got {name!r} "
            f"({users_line()}); declare it: @skippable({verb}=[{name!r}])"
        )

    def _check_used(self, verb: str, declared: frozenset[str], used: set[str]) -> None:
        if left := declared - used:
            raise RecordingError(
                f"expected {self._name} to {verb} {_listed(left)}, as declared, but it did not "
                f"({users_line()}); yield {verb}(…) in its forward, or declare less"
            )

    def _not_stashed(self, name: str) -> RecordingError:
        return RecordingError(
            f"expected {name!r} to be stashed before {self._name} pops it, but it was not "
            f"({users_line()}); stash it in an earlier layer"
        )

    @property
    def _name(self) -> str:
        return self.module_cls.__name__

    def extra_repr(self) -> str:
        """Return the names that it stashes and pops."""
        both = {"stash": self.stashable_names, "pop": self.poppable_names}
        return ", ".join(f"{verb}={sorted(names)}" for verb, names in both.items() if names)


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Decorate a module's class whose forward stashes or pops tensors.

    Args:
        stash: the names that it stashes.
        pop: the names that it pops.

    Returns:
        A decorator, which returns a subclass of :class:`Skippable`.

    Source: ``torchgpipe.skip.skippable``. In Blockpipe a forward may also hand a tensor on in any
    other way that does not mix micro-batches, such as an argument.

    Example:
        >>> import torch
        >>> from blockpipe.compat.torchgpipe import GPipe
        >>> from blockpipe.compat.torchgpipe.skip import pop, skippable, stash
        >>> @skippable(stash=["x"])
        ... class First(torch.nn.Linear):
        ...     def forward(self, input):
        ...         yield stash("x", input)
        ...         return super().forward(input)
        >>> @skippable(pop=["x"])
        ... class Last(torch.nn.Linear):
        ...     def forward(self, input):
        ...         skip = yield pop("x")
        ...         return super().forward(input) + skip
        >>> net = torch.nn.Sequential(First(4, 4), torch.nn.ReLU(), Last(4, 4))
        >>> GPipe(net, balance=[1, 1, 1], devices=["cpu"] * 3, chunks=2)(torch.ones(4, 4)).shape
        torch.Size([4, 4])
    """
    stashes, pops = frozenset(stash), frozenset(pop)

    def decorate(module_cls: type[nn.Module]) -> type[Skippable]:
        return type(
            module_cls.__name__,
            (Skippable,),
            {
                "module_cls": module_cls,
                "stashable_names": stashes,
                "poppable_names": pops,
                "__doc__": module_cls.__doc__,
                "__module__": module_cls.__module__,
                "__qualname__": module_cls.__qualname__,
            },
        )

    return decorate


def verify_skippables(module: nn.Sequential) -> None:
    """Check that each skip is stashed once, and popped once by a later layer.

    ``GPipe`` checks this when it is made.

    Args:
        module: the module to check, with the sequential modules inside of it.

    Raises:
        UsageError: names do not match; all of them are in one error. A ``TypeError``, as in
            torchgpipe.

    Source: ``torchgpipe.skip.verify_skippables``.

    Example:
        >>> import torch
        >>> from blockpipe.compat.torchgpipe.skip import skippable, verify_skippables
        >>> First = skippable(stash=["x"])(torch.nn.Linear)
        >>> verify_skippables(torch.nn.Sequential(First(4, 4)))
        Traceback (most recent call last):
        blockpipe.errors.UsageError: expected each skip to be stashed once and popped once: ...
    """
    problems = list(_mismatches(dict(_skippables(module, ""))))
    if problems:
        raise UsageError(
            f"expected each skip to be stashed once and popped once: {'; '.join(problems)} "
            f"({users_line()}); layers that use a name again need a namespace: "
            "layer.isolate(Namespace())"
        )


def _skippables(module: nn.Module, prefix: str) -> Iterator[tuple[str, Skippable]]:
    for name, child in children_of(module).items():
        if isinstance(child, Skippable):
            yield prefix + name, child
        elif isinstance(child, nn.Sequential):
            yield from _skippables(child, f"{prefix}{name}.")


def _mismatches(layers: dict[str, Skippable]) -> Iterator[str]:
    stashed: dict[Key, str] = {}
    popped: dict[Key, str] = {}
    for path, layer in layers.items():
        own = set(layer.stashable()) & set(layer.poppable())
        for key in sorted(own, key=str):
            yield f"{key[1]!r} is both stashed and popped by {path!r}"
        for key in layer.poppable():
            if key in popped:
                yield f"{key[1]!r} is popped by {popped[key]!r} and again by {path!r}"
            elif key not in own and key not in stashed:
                yield f"{key[1]!r} is popped by {path!r}, and stashed by no layer before it"
            popped.setdefault(key, path)
        for key in layer.stashable():
            if key in stashed:
                yield f"{key[1]!r} is stashed by {stashed[key]!r} and again by {path!r}"
            stashed.setdefault(key, path)
    for (namespace, name), path in stashed.items():
        if (namespace, name) not in popped:
            yield f"{name!r} is stashed by {path!r}, and popped by no layer"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
