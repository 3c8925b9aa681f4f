"""Members of objects, found without running any of the user's code: attributes, entries, variables.

So no property, no ``__getattr__`` and no ``__getattribute__`` is called.
"""

import builtins
import enum
import sys
import types
from collections import deque, namedtuple
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...._common.libraries import is_users
from ...._common.threads.thread_state import ours
from ...._torch.modules import SLOTS, children_of
from ...._torch.scripted import in_script, names_in_script
from ....restoring.model_state import slot_members

UNKNOWN: Any = object()  # not known

ALL: Any = object()  # the key of a whole container

WHOLE = (  # who sets them sets all attributes, or all that a call does
    *("__class__", "__dict__", "__bases__"),
    *("__code__", "__defaults__", "__kwdefaults__"),
)

BY_ARGUMENT: Any = object()  # the key of a dictionary's entry that only a call tells

BY_NAME: Any = object()  # the owner of what is read by its name: any object

NEEDS_GRADIENT = "requires_grad"
TRAINS = (NEEDS_GRADIENT, f"{NEEDS_GRADIENT}_")  # names of what sets it
_OF_TENSORS = (NEEDS_GRADIENT, "shape", "dtype", "device", "ndim")  # torch's that are known
_FIELD = type(namedtuple("_Fields", "first").first)  # type: ignore[attr-defined]
_OF_ENUMS = {id(vars(enum.Enum)[name]): f"_{name}_" for name in ("name", "value")}
_NAMES = ("__name__", "__qualname__")  # of classes and functions


class Registered(NamedTuple):
    """The key of which members a module has in one of torch's tables.

    Attributes:
        slots: the table's name.
    """

    slots: str

    def __str__(self) -> str:
        return self.slots.removeprefix("_")


class Names:
    """The global variables of a module.

    Args:
        names: the module's namespace.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names


class ClassNames(dict[str, Any]):
    """The attributes of a class, as ``vars(kind)`` gives them.

    Args:
        kind: the class.
    """

    def __init__(self, kind: type) -> None:
        super().__init__(vars(kind))
        self.kind = kind


def whose(value: Any, objects: Mapping[int, Any], lasting: Container[int]) -> Any:
    """Return whose attributes a value is or has: a class, the variables of a module, or an object,
    for the dictionary that its attributes are in. Of several objects with one ``__dict__`` it is
    always the same one; anything else comes back as it is.

    Args:
        value: the dictionary, or an object.
        objects: objects by the ids of such dictionaries.
        lasting: the ids of what outlives the forward.
    """
    value = objects.get(id(value), value)
    if isinstance(value, ClassNames):
        return value.kind
    if type(value) is dict:
        module = sys.modules.get(value.get("__name__", ""))
        return Names(value) if module is not None and vars(module) is value else value
    space = own_attributes(value)
    is_anothers = id(space) in lasting and id(value) not in lasting
    return objects.get(id(space), space if is_anothers else value)


def owners_of(owner: Any, key: Any, *, lasts: bool = True) -> Iterator[Any]:
    """Return the objects that a read may be about: an object, and the class of the attribute, of a
    class also its metaclass.

    Args:
        owner: the object.
        key: the name that is read of it.
        lasts: whether it outlives the forward; else only classes of the user's do.
    """
    yield from [owner] if lasts else []
    if isinstance(key, str) and not isinstance(owner, Names | types.CellType | dict):
        bases = owner.__mro__[1:] if isinstance(owner, type) else ()
        for base in (*bases, *type(owner).__mro__):
            yield from [base] if lasts or is_users(base.__module__) else []
            if key in vars(base):
                return


def makes_new(kind: type) -> bool:
    """Return whether each call of a class makes another object: it has no code of its own that
    may give one for all."""
    is_plain = attribute_in(kind, "__new__") is vars(object)["__new__"]
    return is_plain and attribute_in(type(kind), "__call__") is vars(type)["__call__"]


def is_one_of(value: Any, those: Iterable[Any]) -> bool:
    """Return whether a value is one of some objects, whatever it says it is equal to."""
    return any(value is one for one in those)


def attribute_in(owner: Any, name: Any) -> Any:
    """Return what ``owner.name`` is: of a mapping, a method, if it has one of that name."""
    is_method = isinstance(owner, Mapping) and hasattr(type(owner), str(name))
    if not is_method or isinstance(owner, nn.Module) or name in own_attributes(owner):
        return member_of(owner, name)
    return _attribute(owner, name)


def _is_field(owner: Any, key: Any) -> bool:
    numpy = sys.modules.get("numpy")
    is_records = numpy is not None and isinstance(owner, numpy.recarray)
    return is_records and isinstance(key, str) and key in (owner.dtype.names or ())


def member_of(owner: Any, key: Any) -> Any:
    """Return an entry, a variable, or an attribute. A method of a mapping is none: its entries may
    have such names."""
    if owner is UNKNOWN or key is UNKNOWN:
        return UNKNOWN
    if isinstance(owner, Tensor):
        with ours():  # no mode is asked
            found = getattr(owner, key) if key in _OF_TENSORS else UNKNOWN
        own = own_attributes(owner)
        return own if key == "__dict__" else own.get(key, found)
    if key is ALL:
        return _content(owner)
    if isinstance(key, Registered):
        return [*own_attributes(owner).get(key.slots, ())]
    if isinstance(owner, types.CellType):
        try:
            return owner.cell_contents
        except ValueError:
            return UNKNOWN
    if isinstance(owner, Names):
        return owner.names.get(key, vars(builtins).get(key, UNKNOWN))
    if isinstance(owner, types.ModuleType):
        return vars(owner) if key == "__dict__" else vars(owner).get(key, UNKNOWN)
    if _is_field(owner, key):  # of numpy's records
        return sys.modules["numpy"].ndarray.__getitem__(owner, key)
    if isinstance(owner, dict):
        return dict.get(owner, key, UNKNOWN) if _is_plain_key(key) else UNKNOWN
    if isinstance(owner, set):
        return set.__contains__(owner, key) if _is_plain_key(key) else UNKNOWN
    if isinstance(owner, list | tuple | deque) and isinstance(key, int):
        return owner[key] if -len(owner) <= key < len(owner) else UNKNOWN
    if type(owner).__module__ == "numpy" or not isinstance(key, str | int):
        return UNKNOWN
    if isinstance(owner, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        children = children_of(owner)
        if isinstance(key, str) and key in children:
            return children[key]
        if isinstance(key, int):
            found = [*children.values()]
            return found[key] if -len(found) <= key < len(found) else UNKNOWN
    if isinstance(owner, Mapping) and not isinstance(owner, nn.Module):
        return own_attributes(owner).get(key, UNKNOWN)
    return UNKNOWN if isinstance(key, int) else _attribute(owner, key)


def _content(owner: Any) -> Any:
    """Return the content of a container as a value to compare."""
    if type(owner) in (list, deque):
        return [*owner]
    return UNKNOWN


def _attribute(owner: Any, name: str) -> Any:
    if isinstance(owner, type):
        if name == "__dict__":
            return ClassNames(owner)
        holder = _class_with(owner, name) or _class_with(type(owner), name)
        return UNKNOWN if holder is None else _in_c(vars(holder)[name], owner)
    attributes = own_attributes(owner)
    if name == "__dict__":
        return attributes
    if name == "__class__":
        return type(owner)
    if name in attributes:
        return attributes[name]
    if isinstance(owner, torch.jit.ScriptModule) and name in names_in_script(owner):
        return in_script(owner, name)
    for slot in slot_members(type(owner)):
        if getattr(slot, "__name__", "") == name:
            try:
                return slot.__get__(owner)
            except AttributeError:
                return UNKNOWN
    if isinstance(owner, nn.Module):
        for slots in map(attributes.get, SLOTS):  # torch.jit.trace's modules have none
            if slots is not None and name in slots:
                return slots[name]
    holder = _class_with(type(owner), name)
    found = UNKNOWN if holder is None else vars(holder)[name]
    is_field = isinstance(found, _FIELD) and isinstance(owner, tuple)
    return found.__get__(owner) if is_field else _in_c(found, owner)


def _in_c(found: Any, owner: Any) -> Any:
    """Return a member of a class, or what it stands for, if code in C or of Python's own gives
    that: ``partial.args``, ``kind.__name__``, the name and the value of an enum's member."""
    if isinstance(found, types.DynamicClassAttribute):
        return own_attributes(owner).get(_OF_ENUMS.get(id(found), ""), UNKNOWN)
    is_name = isinstance(found, types.GetSetDescriptorType) and found.__name__ in _NAMES
    if is_name or isinstance(found, types.MemberDescriptorType):
        try:
            return found.__get__(owner)
        except (AttributeError, TypeError):  # it is not set, or of the class itself
            return UNKNOWN
    return UNKNOWN if isinstance(found, types.GetSetDescriptorType) else found


def own_attributes(owner: Any) -> dict[str, Any]:
    """Return an object's ``__dict__``; an empty one if it has none."""
    try:
        found = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def _class_with(kind: type, name: str) -> type | None:
    return next((base for base in kind.__mro__ if name in vars(base)), None)


def _is_plain_key(key: Any) -> bool:
    if isinstance(key, tuple):
        return all(map(_is_plain_key, key))
    compare = getattr(type(key), "__hash__", None), getattr(type(key), "__eq__", None)
    is_by_identity = compare == (object.__hash__, object.__eq__)
    return is_by_identity or isinstance(key, str | int | float | bytes | type(None) | type)
