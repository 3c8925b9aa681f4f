"""One module: the dictionaries behind its attributes, how it was compiled, and its state dict."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from types import FrameType
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.modules import module as _of_all_modules
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.utils import parametrize
from torch.nn.utils._named_member_accessor import NamedMemberAccessor
from torch.nn.utils.prune import BasePruningMethod

Slots = dict[str, Tensor | None]

parameters_of: Callable[[nn.Module], Slots] = attrgetter("_parameters")
"""A module's own parameters by name, in the dictionary itself. ``named_parameters`` leaves out what
is ``None`` and, unless told not to, names of tied ones; and to look up one name in it each step
takes a walk through all."""

buffers_of: Callable[[nn.Module], Slots] = attrgetter("_buffers")
"""A module's own buffers, as :data:`parameters_of`; replaced here, where an assignment to the
module would run a ``__setattr__`` of the user's."""

children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""A module's children, as :data:`parameters_of`: ``named_children`` leaves out names of one that is
there twice."""

CHILDREN = "_modules"
"""The name of that dictionary, for who asks a module that may not have it yet."""

SLOTS = ("_parameters", "_buffers", CHILDREN)
"""The names of the three, for who looks through ``vars(module)``."""


def within(module: nn.Module) -> Iterable[nn.Module]:
    """Return a module and all inside of it; ``modules()`` may be the user's."""
    found, level = {id(module): module}, [module]
    for outer in level:
        inner = (child for child in children_of(outer).values() if child is not None)
        new = {id(child): child for child in inner if id(child) not in found}
        found |= new
        level += new.values()
    return found.values()


def submodule_at(module: nn.Module, path: str) -> nn.Module | None:
    """Return what ``get_submodule`` finds, without any code of the user's."""
    found: nn.Module | None = module
    for name in path.split(".") if path else ():
        found = None if found is None else children_of(found).get(name)
    return found


def tensor_at(module: nn.Module, path: str) -> Tensor | None:
    """Return what ``get_parameter`` and ``get_buffer`` find, likewise."""
    outer, _, name = path.rpartition(".")
    holder = submodule_at(module, outer)
    return None if holder is None else (parameters_of(holder) | buffers_of(holder))[name]


def tensors_by_name(module: nn.Module, prefix: str = "") -> Slots:
    """Return what ``state_dict`` has of a module's parameters and buffers, likewise."""
    found = parameters_of(module) | buffers_of(module)
    named = {f"{prefix}{name}": tensor for name, tensor in found.items()}
    for name, child in children_of(module).items():
        named |= {} if child is None else tensors_by_name(child, f"{prefix}{name}.")
    return named


FOUND_BY: dict[Any, Callable[..., Any]] = {
    nn.Module.get_submodule: submodule_at,
    nn.Module.get_parameter: tensor_at,
    nn.Module.get_buffer: tensor_at,
    nn.Module.state_dict: tensors_by_name,
}
"""What methods of modules find by names."""


def slots_of(module: nn.Module) -> list[Mapping[str, Any]]:
    """Return the three; none before a module's ``__init__`` has run. ``vars(module)`` has none of
    them if ``torch.jit.trace`` made the module, which asks the module inside of it."""
    try:
        return [parameters_of(module), buffers_of(module), children_of(module)]
    except AttributeError:
        return []


unsaved_buffers_of: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
"""The names of buffers that a state dict leaves out. Making one to see would run the user's hooks,
and take in what ``get_extra_state`` makes."""

forward_pre_hooks_of: Callable[[nn.Module], dict[int, Any]] = attrgetter("_forward_pre_hooks")
"""A module's forward pre-hooks by their handle's id. A handle removes its own in public, but a
deep copy of a module has a copy of the hooks, and no handles to it."""

forward_hooks_of: Callable[[nn.Module], dict[int, Any]] = attrgetter("_forward_hooks")
"""A module's forward hooks by their handle's id, to count them: no public way tells of them."""


backward_pre_hooks_of: Callable[[nn.Module], dict[int, Any]] = attrgetter("_backward_pre_hooks")
"""A module's hooks before its backward, likewise."""

full_backward_hooks_of: Callable[[nn.Module], dict[int, Any]] = attrgetter("_backward_hooks")
"""A module's hooks behind its backward, likewise."""


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of its own around its forward or its backward."""
    before, after = forward_pre_hooks_of(module), forward_hooks_of(module)
    return bool(before or after or backward_pre_hooks_of(module) or full_backward_hooks_of(module))


_GLOBAL_BACKWARD = ("_global_backward_pre_hooks", "_global_backward_hooks")
_GLOBAL = (
    *("_global_forward_pre_hooks", "_global_forward_hooks", *_GLOBAL_BACKWARD),
    *("_global_module_registration_hooks", "_global_parameter_registration_hooks"),
    "_global_buffer_registration_hooks",
)


def hooks_of_all_modules() -> list[dict[int, Any]]:
    """Return the hooks that every module calls (``register_module_forward_hook`` and its siblings),
    by their handles' ids. They can be added in public, but not asked for."""
    return [getattr(_of_all_modules, name) for name in _GLOBAL]


def hooks_around_all_modules() -> list[dict[int, Any]]:
    """Return those of them that run before each forward, and those that run after it."""
    return [getattr(_of_all_modules, name) for name in _GLOBAL[:2]]


def of_all_takes_kwargs(key: int) -> bool:
    """Whether a hook of all modules, by its handle's id, gets a forward's keyword arguments."""
    return key in _of_all_modules._global_forward_hooks_with_kwargs


def backward_hooks_of_all_modules() -> list[dict[int, Any]]:
    """Return those of them that run around each backward."""
    return [getattr(_of_all_modules, name) for name in _GLOBAL_BACKWARD]


def pruned_names(module: nn.Module) -> list[str]:
    """Return the names of a module's tensors that ``torch.nn.utils.prune`` computes before each
    forward."""
    hooks = forward_pre_hooks_of(module).values()
    return [hook._tensor_name for hook in hooks if isinstance(hook, BasePruningMethod)]


def backward_hooks_of(module: nn.Module) -> list[Any]:
    """Return a module's hooks that a backward calls, before it and after it, with those that every
    module calls. They can be added in public, but not asked for."""
    of_all = backward_hooks_of_all_modules()
    hooks = (*of_all, backward_pre_hooks_of(module), full_backward_hooks_of(module))
    return [hook for one in hooks for hook in one.values()]


def caches_parametrizations() -> bool:
    """Return whether ``torch.nn.utils.parametrize.cached()`` is entered: it counts its entries in a
    private global."""
    return parametrize._cache_enabled > 0


SWAPS: tuple[Any, str] = (NamedMemberAccessor, "swap_tensors_dict")
"""The method by which ``torch.func.functional_call`` gives a module other tensors, and takes them
back. Its users have that function itself, so that to replace it in its module shows nothing."""


@contextmanager
def no_cached_parametrizations() -> Iterator[None]:
    """While entered, nothing is put into the cache of ``torch.nn.utils.parametrize.cached()``, nor
    taken from it, but by who enters that meanwhile."""
    before, parametrize._cache_enabled = parametrize._cache_enabled, 0
    try:
        yield
    finally:
        parametrize._cache_enabled = before


COMPILED_CALL = "_compiled_call_impl"
"""The attribute with what ``Module.compile()`` made, which a call of the module runs in place of
its ``forward``. To see or stand in for that, there is no public way."""


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` wraps a module, or compiled it in place: its wrapper has the module
    in ``_orig_mod``, and its class is not public."""
    own = module.__dict__  # a class's own __getattr__ is not asked
    return "_orig_mod" in own.get("_modules", own) or own.get(COMPILED_CALL) is not None


CALL = "_call_impl"
"""The name of the method behind a call of a module that was not compiled in place, hooks included.
``__call__`` is slow to replace: Python sets it anew in every subclass."""

CALLS = frozenset([nn.Module._wrapped_call_impl.__code__, nn.Module._call_impl.__code__])
"""The code that is under way in a thread while it is in a call of a module, hooks included."""

BatchNorm = _BatchNorm
"""The base of all batch norms. The public ones are three of its subclasses, and users derive from
it."""

IncompatibleKeys = _IncompatibleKeys
"""What ``load_state_dict`` returns, for one of ours to return the same."""


def keep_versions(source: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """Give a state dict the versions of the modules that another was made by, if that has them.
    ``load_state_dict`` hands them to modules that read older formats, and torch keeps them in an
    attribute of the dictionary."""
    if hasattr(source, "_metadata"):
        target._metadata = source._metadata  # type: ignore[attr-defined]


def versions_in(state: Mapping[str, Any]) -> dict[str, Any]:
    """The versions that :func:`keep_versions` is about, by the paths of modules."""
    found: dict[str, Any] = getattr(state, "_metadata", {})
    return found


Wrapper = Literal[
    "torch.compile",
    "DistributedDataParallel",
    "DataParallel",
    "FullyShardedDataParallel",
    "fully_shard",
    "torch.jit.script",
    "peft",
]

# By the function that asks a module for its tensors or modules before it has changed anything. Some
# ask each module inside of the wrapped one.
_ASKING: dict[tuple[str, str], Wrapper] = {
    ("torch.nn.parallel.data_parallel", "forward"): "DataParallel",
    ("torch.nn.parallel.distributed", "_build_params_for_reducer"): "DistributedDataParallel",
    ("torch.distributed.fsdp._init_utils", "_get_ignored_modules"): "FullyShardedDataParallel",
    ("torch.distributed.fsdp._init_utils", "_move_module_to_device"): "FullyShardedDataParallel",
    ("torch.distributed.fsdp._fully_shard._fsdp_init", "_get_managed_states"): "fully_shard",
    ("torch.distributed._composable.contract", "wrapper"): "fully_shard",
    ("peft.mapping_func", "get_peft_model"): "peft",
    ("peft.tuners.tuners_utils", "inject_adapter"): "peft",
}


class RefusesWrappers(nn.Module):
    """A module that hears of it when something is put around it, before that has done anything.

    A wrapper tells the module nothing in public. But most ask for an attribute that nothing else
    asks for, and have to get an exception there. Who goes through all attributes
    (``inspect.getmembers``) is no wrapper: these are not in ``dir()``. The others ask for what
    everybody asks for, and are known by who they are.
    """

    def _refuse_wrapper(self, wrapper: Wrapper) -> None:
        """Raise what there is to say."""
        raise NotImplementedError

    @property
    def _initialize_hook(self) -> None:
        # Lazy modules have it: they are initialized before they are compiled.
        self._refuse_wrapper("torch.compile")

    @property
    def _infer_parameters(self) -> None:
        # Since torch 2.14 their wrapper asks for that first of all, in its first call.
        self._refuse_wrapper("torch.compile")

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> None:
        self._refuse_wrapper("DistributedDataParallel")

    def _replicate_for_data_parallel(self) -> None:
        # What DataParallel makes its copies with, on every call.
        self._refuse_wrapper("DataParallel")

    def _refuse_caller(self, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_name == "<listcomp>":  # before Python 3.12
            frame = frame.f_back
        if frame is None:
            return
        wrapper = _ASKING.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
        if wrapper is not None:
            self._refuse_wrapper(wrapper)

    def modules(self, *args: Any, **kwargs: Any) -> Iterator[nn.Module]:
        """As a module's."""
        self._refuse_caller(sys._getframe(1))
        return super().modules(*args, **kwargs)

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """As a module's."""
        self._refuse_caller(sys._getframe(1))
        yield from super().named_modules(memo, prefix, remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As a module's."""
        self._refuse_caller(sys._getframe(1))
        return super().parameters(recurse)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As a module's."""
        self._refuse_caller(sys._getframe(1))
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def __prepare_scriptable__(self) -> None:
        self._refuse_wrapper("torch.jit.script")

    def __dir__(self) -> list[str]:
        asked = ("_initialize_hook", "_infer_parameters", "_ddp_params_and_buffers_to_ignore")
        return [name for name in super().__dir__() if name not in asked]  # type: ignore[no-untyped-call]


def is_moving(frame: FrameType) -> bool:
    """Return whether a frame is that of ``Module.to`` and its like, which set each parameter's
    values and ``.grad`` anew: a library may call it in its forward, where it changes nothing. The
    function that all of them call has no public name."""
    return frame.f_code is nn.Module._apply.__code__
