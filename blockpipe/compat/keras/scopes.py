"""``PipelineStage``: layers made or called in a scope are on its stage.

In a forward the scope is a :class:`~blockpipe.stages.marks.Block`. Elsewhere it marks the modules
that are made in it. torch calls nobody when a module is made: its registration hooks see a module
only when it gets a parameter or a parent, which a ``nn.ReLU()`` in a variable has not. So
``nn.Module.__init__`` is replaced while a scope is open, and notes the modules of its own thread.
"""

import functools
from collections.abc import Iterable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from ..._common.callsite import users_line
from ..._common.checks import expected, is_integer
from ...crossing.torch_patches import Replacement
from ...errors import MarkError
from ...stages import marks
from ...stages.cursor import Mark, active_cursor

# The modules made so far in each open scope of this context, the innermost scope last.
_made: ContextVar[tuple[list[nn.Module], ...]] = ContextVar("blockpipe_made_in_scopes", default=())


class PipelineStage(marks.Block):
    """A scope whose layers are on a stage: those that are called in it, and those made in it.

    A layer that is made in the scope is on the stage in each of its calls. A call that is itself in
    a scope is on that scope's stage, wherever the layer was made. Code between two layers is on the
    stage of the first of them, and a layer without a stage is on that of the layer before it.

    Of a module that is made with others inside, the outermost one is marked. A container without a
    forward (``nn.ModuleList``) cannot be: the modules inside it are.

    Args:
        stage: the stage, from 0 on. ``devices=`` of :class:`~blockpipe.Pipeline` sets its device.

    Raises:
        MarkError: the stage is not an integer from 0 on; or, at the end of the scope, a module made
            in it cannot be marked.

    Source: ``keras.ipu.PipelineStage``. There, scopes must not be nested, every layer needs a
    stage, and no layer may be on an earlier stage than the one before it.

    Example:
        >>> import torch, blockpipe as bp
        >>> from blockpipe.compat import keras
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.body = torch.nn.Linear(4, 4)
        ...         with keras.PipelineStage(1):
        ...             self.head = torch.nn.Linear(4, 2)
        ...     def forward(self, x):
        ...         with keras.PipelineStage(0):
        ...             x = self.body(x)
        ...         return self.head(x)
        >>> bp.record(Net(), torch.zeros(1, 4)).route
        [0, 1]
    """

    def __init__(self, stage: int) -> None:
        if not is_integer(stage, 0):
            fix = "write PipelineStage(0), PipelineStage(1), …"
            raise MarkError(expected("an integer from 0 on", stage, for_="stage", fix=fix))
        super().__init__(stage)

    def __enter__(self) -> Self:
        cursor = active_cursor()
        if cursor is not None:
            cursor.enter(Mark(self.stage, None, users_line()))
        elif not torch.compiler.is_dynamo_compiling():
            _ModuleInit().__enter__()
            _made.set((*_made.get(), []))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        cursor = active_cursor()
        if cursor is not None:
            cursor.leave()
        elif not torch.compiler.is_dynamo_compiling():
            *outer, made = _made.get()
            _made.set(tuple(outer))
            _ModuleInit().__exit__()
            if kind is None:
                mark = Mark(self.stage, None, users_line(), yields=True)
                for module in _outermost(made):
                    marks.put_mark(module, mark)


def _outermost(made: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules to mark: those with a forward that are in no other such module, and
    have no mark of their own."""
    called = {id(module): module for module in made if marks.has_forward(module)}
    inside = {
        id(inner) for module in called.values() for inner in module.modules() if inner is not module
    }
    return [
        module
        for key, module in called.items()
        if key not in inside and marks.mark_of(module) is None
    ]


class _ModuleInit(Replacement):
    """``nn.Module.__init__`` notes each module for the scope that it is made in."""

    owner, name = nn.Module, "__init__"

    def replacement(self) -> Any:
        original = self._original

        @functools.wraps(original)
        def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            scopes = _made.get()
            if scopes:
                scopes[-1].append(module)

        return init
