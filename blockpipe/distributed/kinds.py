"""What processes are about to do, in words that they compare before anything is sent."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from enum import Enum
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from .. import __version__
from .._common.callsite import users_line
from .._common.nested import leaf_names, leaves
from .._common.text import dtype_text
from .._common.threads.thread_state import autocast_states
from .._torch.modules import children_of, parameters_of
from ..batches.microbatch import Microbatch
from ..errors import UsageError
from ..preparation.watched.contents import Contents
from ..preparation.watched.seen import is_plain
from .agreement import CODE, Kind
from .build import CutForward
from .taping.tape import place_of

_SHARDED = (FSDPModule, FullyShardedDataParallel)


def kind_of_step(
    model: nn.Module,
    args: Any,
    kwargs: dict[str, Any],
    options: Mapping[str, object],
    chunks: int,
    *,
    answers: Sequence[str] = (),
    digests: Sequence[str] = (),
    modes: Mapping[str, str] | None = None,
) -> Kind:
    """Describe a step, with the same words in every process.

    Args:
        model: the model.
        args: the model's arguments, for the whole batch.
        kwargs: the model's keyword arguments.
        options: options of the pipeline and of the call; of a function only its presence counts.
        chunks: the number of micro-batches.
        answers: that the forwards' recordings got when they asked about the arguments.
        digests: of the recordings' code between modules.
        modes: the model's :func:`modes_in_words`, if they have been looked at.
    """
    common = {
        "model": type(model).__name__,
        "mode": "train" if model.training else "eval",
        "gradients": str(torch.is_grad_enabled()),
        "autocast": str([(kind, str(dtype)) for kind, on, dtype in autocast_states() if on]),
        "torch": str(torch.__version__),
        "blockpipe": __version__,
        **{name: "a function" if callable(o) else str(o) for name, o in options.items()},
        **(modes or modes_in_words(model)),
    }
    own = {"arguments": arguments_in_words(args, kwargs), "chunks": str(chunks)}
    own["answers about the arguments"] = "; ".join(answers)
    own[CODE] = " ".join(digests)
    return Kind(common, own)


def modes_in_words(model: nn.Module) -> dict[str, str]:
    """Return which modules are in training mode, and which parameters are trained.

    Raises:
        UsageError: a module's parameters are sharded over processes.
    """
    modules = _modules(model)
    if any(isinstance(module, _SHARDED) for module in modules):
        _refuse_sharded(model)
    held = (parameter for module in modules for parameter in parameters_of(module).values())
    parameters = {id(parameter): parameter for parameter in held if parameter is not None}
    trained = [parameter.requires_grad for parameter in parameters.values()]
    return {
        "modules in training mode": _flags([module.training for module in modules]),
        "trained parameters": _flags(trained),
    }


def _refuse_sharded(model: nn.Module) -> None:
    found = next(path for path, m in model.named_modules() if isinstance(m, _SHARDED))
    raise UsageError(
        "expected stages of which each process has whole parameters, got fully_shard on "
        f"{f'module {found!r}' if found else 'the model'} ({users_line()}); leave it out: replicas "
        "by mesh= have their stages whole. For less memory, mark more stages, or pass "
        "checkpoint='always'"
    )


def _modules(model: nn.Module) -> list[nn.Module]:
    """Return all modules once, in a fixed order.

    Each step asks. ``model.parameters()`` goes through a generator for each level of the model, and
    was most of a step's Python calls beside those of the stages.
    """
    found: dict[int, nn.Module] = {}
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            left += children_of(module).values()
    return [*found.values()]


def arguments_in_words(args: Any, kwargs: dict[str, Any]) -> str:
    """Return arguments in words that are the same for two calls of one kind, and for no others.

    A tensor that is passed for two arguments is one input of the tape, so that it is another kind.
    """
    given = (args, dict(sorted(kwargs.items())))
    names = [*leaf_names(given[0], "args"), *leaf_names(given[1], "kwargs")]
    words, first = [], dict[Hashable, str]()
    for name, leaf in zip(names, leaves(given), strict=True):
        of = first.setdefault(place_of(leaf), name) if isinstance(leaf, Tensor) else name
        words.append(f"{name}: {_leaf(leaf)}{f' (the same as {of})' * (of != name)}")
    return ", ".join(words)


def contents_of_arguments(args: Any, kwargs: dict[str, Any]) -> dict[str, Hashable]:
    """Return the arguments that are no tensors, by name: functions and objects by their contents,
    for which there are no words that all processes have."""
    given, contents = {"args": args, "kwargs": kwargs}, Contents(None)
    named = ((leaf_names(value, name), leaves(value)) for name, value in given.items())
    found = (pair for names, values in named for pair in zip(names, values, strict=True))
    return {name: contents.of(leaf) for name, leaf in found if not isinstance(leaf, Tensor)}


def check_alike(part: Sequence[Microbatch]) -> None:
    """Refuse micro-batches that run on one engine and have other arguments that are no tensors.

    Raises:
        UsageError: an argument is another one for one of them.
    """
    first, *others = [contents_of_arguments(m.args, m.kwargs) for m in part]
    for number, found in enumerate(others, 1):
        if found != first:
            names = (*first, *found)
            name = next(n for n in names if n not in first or first[n] != found.get(n))
            raise UsageError(
                "expected arguments that are no tensors to be the same for all micro-batches, got "
                f"another {name} for micro-batch {number} than for micro-batch 0 ({users_line()}): "
                "stages in several processes have them as constants; pass one tensor with an entry "
                "for each sample"
            )


def kind_of_forward(cut: CutForward) -> Kind:
    """Return the stages of a forward, what crosses between them, and their parameters."""
    common, own = {"route": str(cut.tape.route)}, {"answers about the arguments": cut.answers()}
    for stage in cut.stages:
        given = ", ".join(f"{dtype_text(m.dtype)}{list(m.shape)}" for m in stage.input_metas)
        where = f"stage {stage.stage} (step {stage.index} of the route)"
        own[f"tensors into {where}"] = given
        own[f"origins of the tensors into {where}"] = " ".join(stage.origins)
        for name in sorted(cut.parameters_of(stage.index)):
            common.setdefault(f"stage of {name!r}", str(stage.stage))
    for name, parameter in cut.model.named_parameters():
        common[f"parameter {name!r}"] = _leaf(parameter)
    return Kind(common, own)


def kind_of_values(model: nn.Module) -> Kind:
    """Return the parameters and buffers of a model that each process has as a whole."""
    named = (*model.named_parameters(), *model.named_buffers())
    return Kind({f"the value {name!r}": _leaf(tensor) for name, tensor in named})


def _flags(flags: list[bool]) -> str:
    """As many words as there are changes."""
    runs = [f"{len([*run])} {'yes' if flag else 'no'}" for flag, run in groupby(flags)]
    return ", ".join(runs)


def _leaf(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{dtype_text(leaf.dtype)}{list(leaf.shape)}"
    if isinstance(leaf, Enum):  # its value may be a function, which is elsewhere in each process
        return f"{type(leaf).__name__}.{leaf.name}"
    return repr(leaf) if is_plain(leaf) else type(leaf).__name__
