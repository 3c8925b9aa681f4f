"""Names from other libraries, for errors that give Blockpipe's name.

The names are those of the libraries that people come from, and of the model that a pipeline holds.
Accepting them would be a second way to say everything: they are only understood.
"""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch import nn

from .._torch.modules import buffers_of, children_of, parameters_of
from ..errors import UsageError
from .callsite import users_line

P = ParamSpec("P")
R = TypeVar("R")

ALL_REDUCE = (
    "all-reduce the gradients after forward_backward: "
    "for p in pipe.parameters(): dist.all_reduce(p.grad); p.grad /= dist.get_world_size()"
)


def knows_other_names(**meant: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that people call with other libraries' arguments.

    Args:
        **meant: for the name of an argument elsewhere, the remedy that the error names.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if kwargs and not meant.keys().isdisjoint(kwargs):
                what = function.__qualname__.removesuffix(".__init__")
                name = next(name for name in kwargs if name in meant)
                raise UsageError(
                    f"{what}() got an unexpected keyword argument {name!r} ({users_line()}); "
                    f"{meant[name]}"
                )
            return function(*args, **kwargs)

        return call

    return decorate


def where_model_has(model: nn.Module | None, name: str) -> str | None:
    """Return how to reach an attribute of a pipeline's model; ``None``: it has none of that name.

    No property is evaluated: it may fail or be slow.
    """
    if model is None or name.startswith("_"):
        return None
    slots = (model.__dict__, children_of(model), parameters_of(model), buffers_of(model))
    if any(name in names for names in slots):
        return f"the model has it: pipe.module.{name}"
    try:
        found = inspect.getattr_static(type(model), name)
    except AttributeError:
        return None
    if callable(found) or isinstance(found, classmethod | staticmethod):
        return (
            f"the model has that method: pipe.run(pipe.module.{name}, …) where it runs the model, "
            f"pipe.module.{name}(…) where it does not"
        )
    return f"the model has it: pipe.module.{name}"
