"""A model as a list of layers, and the list in parts of a stage each."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal, overload

from torch import nn

from ..._common.callsite import users_line
from ..._common.checks import did_you_mean, expected, is_integer
from ...errors import PlanError
from ...stages.sequential import mark_sequential
from .ranks import current_ranks
from .topology import tpc

Layer = str | nn.Module | Callable[..., Any]


class _Function(nn.Module):
    """A function as a layer: an ``nn.Sequential`` takes modules only."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)

    def extra_repr(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__name__)


@overload
def flatten_model(
    model: nn.Module, layer_list: Iterable[Layer], return_list: Literal[True]
) -> list[nn.Module]: ...
@overload
def flatten_model(
    model: nn.Module, layer_list: Iterable[Layer], return_list: Literal[False] = False
) -> nn.Sequential: ...
def flatten_model(
    model: nn.Module, layer_list: Iterable[Layer], return_list: bool = False
) -> list[nn.Module] | nn.Sequential:
    """Return the layers of a model in the order in which they run.

    Args:
        model: any model whose forward is such a row.
        layer_list: for each layer the name of a submodule (``"layer1"``, ``"features.0"``), a
            module, or a function of the one tensor that is handed on. A name of an
            ``nn.Sequential`` or ``nn.ModuleList`` stands for the modules in it.
        return_list: whether to return a list, for :func:`partition_uniform`.

    Returns:
        The model's own modules, and a module around each function.

    Raises:
        PlanError: the model has no such submodule (the message has near misses), or an entry is
            none of these.

    Source: ``torchdistpackage.parallel.pipeline_helper.flatten_model``.

    Example:
        >>> import torch
        >>> from blockpipe.compat.torchdistpackage import flatten_model
        >>> net = torch.nn.Module()
        >>> net.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        >>> net.head = torch.nn.Linear(4, 2)
        >>> len(flatten_model(net, ["body", lambda x: x * 2, "head"]))
        4
    """
    layers: list[nn.Module] = []
    for entry in layer_list:
        found: Any = _named(model, entry) if isinstance(entry, str) else entry
        if isinstance(entry, str) and isinstance(found, nn.Sequential | nn.ModuleList):
            layers += list(found)
        elif isinstance(found, nn.Module):
            layers.append(found)
        elif callable(found):
            layers.append(_Function(found))
        else:
            contract = "the name of a submodule, a module or a function"
            raise PlanError(expected(contract, entry, for_="an entry of layer_list"))
    return layers if return_list else nn.Sequential(*layers)


def _named(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        paths = [name for name, _ in model.named_modules() if name]
        raise PlanError(
            f"{type(model).__name__} has no submodule {path!r} ({users_line()}); "
            f"{did_you_mean(path, paths)}"
        ) from None


def partition_uniform(flat_sequence: Sequence[nn.Module], extra_len: int = 0) -> list[nn.Module]:
    """Return the layers of this rank: a stage's share of a list.

    Outside of :func:`launch` the process is every rank. So it has all layers, and the first layer
    of each stage is marked, as :func:`blockpipe.mark_sequential` does.

    Args:
        flat_sequence: from :func:`flatten_model`, or an ``nn.Sequential``.
        extra_len: as many layers as the last stage shall have less.

    Returns:
        A list of modules, for ``nn.Sequential(*layers)``. Each stage has ``(len(flat_sequence) +
        extra_len) // stages`` of them, and the last one the rest.

    Raises:
        PlanError: a stage would have no layer; or it would begin with a module that the list has
            twice.
        MarkError: a layer is marked already.

    Source: ``torchdistpackage.parallel.pipeline_helper.partition_uniform``.

    Example:
        >>> import torch
        >>> from blockpipe.compat.torchdistpackage import launch, partition_uniform
        >>> layers = [torch.nn.Linear(4, 4) for _ in range(5)]
        >>> [len(part) for part in launch(lambda: partition_uniform(layers), 2)]
        [2, 3]
    """
    layers, stages = list(flat_sequence), tpc.get_group_size("pipe")
    if not is_integer(extra_len, 0):
        raise PlanError(expected("an integer from 0 on", extra_len, for_="extra_len"))
    each = (len(layers) + extra_len) // stages
    bounds = [*(stage * each for stage in range(stages)), len(layers)]
    if any(begin >= end for begin, end in pairwise(bounds)):
        contract = f"layers for each of {stages} stages"
        fix = "take fewer stages, finer layers, or a smaller extra_len"
        raise PlanError(expected(contract, f"{len(layers)} layers", fix=fix))
    if current_ranks() is not None:
        begin, end = bounds[tpc.get_group_rank("pipe") :][:2]
        return layers[begin:end]
    mark_sequential(nn.Sequential(*layers), [end - begin for begin, end in pairwise(bounds)])
    return layers


def NaiveDDP(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:  # noqa: N802 - their name
    """Return the module as it is: in one process there are no copies to average over.

    Args:
        module: the model.
        *args: what ``torchdistpackage`` takes; nothing here needs it.
        **kwargs: what ``torchdistpackage`` takes; nothing here needs it.

    Source: ``torchdistpackage.NaiveDDP``.

    Example:
        >>> import torch
        >>> from blockpipe.compat.torchdistpackage import NaiveDDP
        >>> NaiveDDP(torch.nn.ReLU())
        ReLU()
    """
    return module
