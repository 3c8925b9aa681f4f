"""PopTorch's blocks, which have a name (``user_id``) and the IPU that they are on (``ipu_id``).

The mark of the core keeps both: the IPU as its stage, and the ``user_id`` as its name. The strategy
of the options turns them into a stage when a forward reaches the mark.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn

from ..._common.callsite import users_line, warn
from ...errors import UsageError
from ...stages import marks
from .strategies import restart_auto_ids

P = ParamSpec("P")
R = TypeVar("R")
Marked = TypeVar("Marked", bound=Callable[..., Any])


class Block(marks.Block):
    """A region of a forward, by the IPU that it is on or by a name.

    Args:
        user_id: its name; blocks of one name are on one stage. ``None`` takes the number of the
            block among those without a name, as text.
        ipu_id: the IPU, from 0 on; with the default strategy also the stage. ``None`` takes the
            stage of its name, which is a new one the first time.

    Raises:
        MarkError: ``ipu_id`` is not a non-negative integer.

    Blocks may be nested; leaving the inner one restores the outer one. After the outermost block
    the forward stays on its stage.

    Source: ``poptorch.Block``.

    Example:
        >>> import torch, blockpipe as bp
        >>> from blockpipe.compat import poptorch
        >>> class Net(torch.nn.Module):
        ...     def forward(self, x):
        ...         with poptorch.Block(ipu_id=0):
        ...             x = x + 1
        ...         with poptorch.Block("head", ipu_id=1):
        ...             return x * 2
        >>> bp.record(Net(), torch.zeros(1, 4)).route
        [0, 1]
    """

    def __init__(self, user_id: str | int | None = None, ipu_id: int | None = None) -> None:
        super().__init__(ipu_id, name=None if user_id is None else str(user_id))

    @staticmethod
    def useAutoId() -> None:  # noqa: N802 - PopTorch's name
        """Count blocks without a name from 0 again, as each forward does at its start."""
        restart_auto_ids()

    @staticmethod
    def start(user_id: str | int | None = None, ipu_id: int | None = None) -> None:
        """Enter the block of ``user_id`` and ``ipu_id`` until the next one begins."""
        Block(user_id, ipu_id).begin()


def BeginBlock(  # noqa: N802 - PopTorch's name
    layer_to_call: Marked, user_id: str | int | None = None, ipu_id: int | None = None
) -> Marked:
    """From this module's call on, the forward is in a block; returns the same module.

    Args:
        layer_to_call: a module, or any callable.
        user_id: as for :class:`Block`.
        ipu_id: as for :class:`Block`.

    Raises:
        MarkError: it is neither a module nor a callable, or it is marked already.

    Source: ``poptorch.BeginBlock``, in which a callable that is no module is deprecated.

    Example:
        >>> import torch
        >>> from blockpipe.compat import poptorch
        >>> poptorch.BeginBlock(torch.nn.Linear(1, 1), "head", ipu_id=1)
        Linear(BeginBlock(stage=1, name='head'), in_features=1, out_features=1, bias=True)
    """
    name = None if user_id is None else str(user_id)
    return marks.BeginBlock(layer_to_call, ipu_id, name=name)


def BlockFunction(  # noqa: N802 - PopTorch's name
    user_id: str | int | None = None, ipu_id: int | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function or method as a block; keeps its name, signature and docstring.

    Args:
        user_id: as for :class:`Block`.
        ipu_id: as for :class:`Block`.

    Source: ``poptorch.BlockFunction``, which keeps neither name, signature nor docstring.

    Example:
        >>> from blockpipe.compat import poptorch
        >>> @poptorch.BlockFunction("decoder", ipu_id=1)
        ... def decode(x):
        ...     "The decoder."
        ...     return x + 1
        >>> decode(1), decode.__doc__
        (2, 'The decoder.')
    """
    return Block(user_id, ipu_id)


def removeBlocks(module: nn.Module) -> None:  # noqa: N802 - PopTorch's name
    """Remove every mark that BeginBlock put on a module or inside it, at any depth.

    Example:
        >>> import torch
        >>> from blockpipe.compat import poptorch
        >>> layer = poptorch.BeginBlock(torch.nn.Linear(1, 1), ipu_id=1)
        >>> poptorch.removeBlocks(layer)
        >>> layer
        Linear(in_features=1, out_features=1, bias=True)
    """
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"expected an nn.Module, got {type(module).__name__} ({users_line()}); pass the model"
        )
    marks.remove_blocks(module)


def recomputationCheckpoint(*tensors: Any) -> Any:  # noqa: N802 - PopTorch's name
    """Return the tensors unchanged, with a warning, because recomputation is chosen by block.

    Args:
        *tensors: the tensors, or a single list or tuple of them.

    Returns:
        A single tensor as itself, several as a tuple, a list or tuple as such.

    Raises:
        UsageError: an argument is not a tensor.

    Example:
        >>> import torch, warnings
        >>> from blockpipe.compat import poptorch
        >>> with warnings.catch_warnings(action="ignore"):
        ...     poptorch.recomputationCheckpoint(torch.ones(2))
        tensor([1., 1.])
    """
    given = tensors[0] if len(tensors) == 1 else tensors
    several = given if isinstance(given, tuple | list) else [given]
    wrong = [one for one in several if not isinstance(one, Tensor)]
    if wrong:
        raise UsageError(
            f"expected tensors, got {type(wrong[0]).__name__} ({users_line()}); pass tensors, or "
            "one list of them"
        )
    warn(
        "recomputationCheckpoint keeps nothing here: a whole module is recomputed, or it is not; "
        "call trainingModel(…, checkpoint='except_last') for all, or blockpipe.Block(stage, "
        "checkpoint=False) for a block that is kept"
    )
    return given
