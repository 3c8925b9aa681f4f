"""What modules have beside attributes: the numbers of their hooks, to see those that a forward
registers for a while, and what TorchScript keeps.

A hook is a change of its module: micro-batches under way at once would run each other's.
"""

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from .._torch.modules import hooks_of_all_modules
from .._torch.scripted import in_script, names_in_script, set_in_script
from .holders import Holder

REMEDY = (
    "register hooks around the whole step, or those of one module on the stage that calls it, and "
    "remove them there"
)

_OF_ALL = "the hooks of all modules (register_module_forward_hook and its like)"
_Counts = dict[Any, int]

_CONTAINERS = (list, dict, tuple)
_PLAIN = (int, float, complex, str, bool, type(None))


def is_of_hooks(owner: Any, key: Any) -> bool:
    """Return whether a change is one of a number of hooks, given whose it is, and its name."""
    return owner is _OF_ALL or (isinstance(owner, nn.Module) and str(key).endswith("_hooks"))


class HooksOf(Holder):
    """The numbers of hooks of one module."""

    def now(self) -> list[tuple[str, int]]:
        return [(k, len(v or ())) for k, v in vars(self.owner).items() if k.endswith("_hooks")]


class HooksOfAll(Holder):
    """The numbers of hooks that every module calls."""

    def __init__(self) -> None:
        super().__init__(_OF_ALL)

    def now(self) -> list[tuple[int, int]]:
        return [*enumerate(map(len, hooks_of_all_modules()))]


class ScriptHolder(Holder):
    """The attributes of a module that ``torch.jit.script`` or ``torch.jit.trace`` has made.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names = names_in_script(module)
        self._latest: dict[str, Any] = {}
        super().__init__(module)

    def now(self) -> list[tuple[str, Any]]:
        return [(name, self._of(name)) for name in self._names]

    def _of(self, name: str) -> Any:
        """Return an attribute: of a container, the copy that was made first, as long as they are
        alike."""
        value = in_script(self.owner, name)
        if isinstance(value, _CONTAINERS):
            first = self._latest.setdefault(name, value)
            if not _is_alike(first, value):
                self._latest[name] = value
            return self._latest[name]
        return value

    def put(self, key: str, value: Any) -> None:
        set_in_script(self.owner, key, value)


def _is_alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return _is_alike([*one.items()], [*other.items()])
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_alike, one, other))
    return one is other or (isinstance(one, _PLAIN) and bool(one == other))


class HookCounts:
    """Watch the numbers of hooks of some modules, and of those that every module calls.

    Args:
        modules: the modules. They may be many: all of them are looked through only after something
            has registered a hook, and otherwise those that have any.
    """

    def __init__(self, modules: Collection[nn.Module]) -> None:
        holders: list[Holder] = [HooksOfAll(), *map(HooksOf, modules)]
        self._counts: list[tuple[Holder, _Counts]] = [(h, dict(h.before)) for h in holders]
        self._registered = RemovableHandle.next_id
        self._busy = self._with_hooks()

    def _with_hooks(self) -> list[int]:
        return [i for i, (_, counts) in enumerate(self._counts) if any(counts.values())]

    def changes(self) -> Iterator[tuple[Holder, Any, int, int]]:
        """Yield what has changed since the last time: whose hooks, their name, and how many there
        were and are."""
        is_any_new = self._registered != RemovableHandle.next_id
        if not (is_any_new or self._busy):
            return
        self._registered = RemovableHandle.next_id
        found = [*self._found(range(len(self._counts)) if is_any_new else self._busy)]
        self._busy = self._with_hooks() if found else self._busy
        yield from found

    def _found(self, indices: Collection[int]) -> Iterator[tuple[Holder, Any, int, int]]:
        for index in indices:
            holder, before = self._counts[index]
            now = dict(holder.now())
            if now != before:
                self._counts[index] = holder, now
                for name in now.keys() | before.keys():
                    then, count = before.get(name, 0), now.get(name, 0)
                    if then != count:
                        yield holder, name, then, count
