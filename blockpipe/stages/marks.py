"""Marks: where in a forward a stage begins.

A mark moves the :mod:`cursor <blockpipe.stages.cursor>`, and only if there is one: a recording and
every run put one into the context of their thread, and everywhere else the marks do nothing. So a
marked model is still an ordinary model.

``BeginBlock`` keeps its mark in the module's ``__dict__`` and reads it from there when it runs:
copies and pickles carry it along, and the class and the ``state_dict`` stay what they were.
"""

import functools
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import nn

from .._common.callsite import users_line
from .._common.checks import expected, is_integer
from .._common.hints import knows_other_names
from .._torch.modules import forward_pre_hooks_of
from ..errors import MarkError
from .cursor import Mark, active_cursor
from .path_patterns import matching_paths

P = ParamSpec("P")
R = TypeVar("R")
Marked = TypeVar("Marked", bound=Callable[..., Any])

MARK = "_blockpipe_mark"


def _checked_stage(stage: int | None) -> int | None:
    if stage is not None and not is_integer(stage, 0):
        fix = "write stage=0, stage=1, …"
        if isinstance(stage, str):
            fix += f", and name={stage!r} for a name"
        raise MarkError(expected("a non-negative integer or None", stage, for_="stage", fix=fix))
    return stage


def _checked_checkpoint(checkpoint: bool | None) -> bool | None:
    if checkpoint is not None and not isinstance(checkpoint, bool):
        contract = "True, False, or None (as the pipeline's)"
        raise MarkError(expected(contract, checkpoint, for_="checkpoint"))
    return checkpoint


_IPU_ID = "pass stage=; devices= of Pipeline sets the device of each stage"
_knows_poptorchs_names = knows_other_names(ipu_id=_IPU_ID, user_id="pass name=")


class Block:
    """A region of a forward that is a stage: a context manager, and a decorator.

    Code in the block runs on ``stage``. A nested block's exit restores the outer block's stage;
    after the outermost block the forward stays on the stage it is on. Outside Blockpipe, and
    while ``torch.compile`` or ``torch.export`` trace, a block does nothing.

    Args:
        stage: a non-negative integer; ``None``: the number after the highest entered so far in
            this forward (0 at first).
        name: a name for summaries and errors.
        checkpoint: whether the modules called in it are recomputed in the backward; ``None``: as
            the pipeline's ``checkpoint=`` says.

    Raises:
        MarkError: ``stage`` is not a non-negative integer.

    Source: ``poptorch.Block``; there, leaving a block leaves operations without a stage.

    Example:
        >>> import torch, blockpipe as bp
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
        ...     def forward(self, x):
        ...         with bp.Block(stage=0):
        ...             x = self.a(x)
        ...         with bp.Block(stage=1):
        ...             return self.b(x)
        >>> bp.record(Net(), torch.zeros(1, 4)).route
        [0, 1]
    """

    @_knows_poptorchs_names
    def __init__(
        self,
        stage: int | None = None,
        *,
        name: str | None = None,
        checkpoint: bool | None = None,
    ) -> None:
        self.stage = _checked_stage(stage)
        self.name = name
        self.checkpoint = _checked_checkpoint(checkpoint)

    def __enter__(self) -> "Block":
        cursor = active_cursor()
        if cursor is not None:
            cursor.enter(Mark(self.stage, self.name, users_line(), self.checkpoint))
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

    def begin(self) -> None:
        """Be on the block's stage from here on, until the next mark.

        As the call of a module under :func:`BeginBlock`, for code that no ``with`` is around. In a
        nested ``with Block`` it lasts until the end of that.
        """
        cursor = active_cursor()
        if cursor is not None:
            cursor.begin(Mark(self.stage, self.name, users_line(), self.checkpoint))

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if not callable(function) or isinstance(function, nn.Module):
            fix = "mark a module with BeginBlock"
            raise MarkError(expected("a function", function, for_="the decorator Block", fix=fix))

        key = _key_of(function)

        @functools.wraps(function)
        def run_in_block(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return _call(key, function, args, kwargs)

        return run_in_block

    def __repr__(self) -> str:
        return f"Block({_shown(self)})"


def _key_of(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _call(key: str, function: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
    """Call a function that is a block; the run may call it as a sealed one."""
    cursor = active_cursor()
    if cursor is None or cursor.on_call is None:
        return function(*args, **kwargs)
    return cast(R, cursor.on_call(key, function, args, kwargs))


@_knows_poptorchs_names
def BlockFunction(  # noqa: N802 - PopTorch's name
    stage: int | None = None, *, name: str | None = None, checkpoint: bool | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function or method a block; it keeps its name, signature and docstring.

    Args:
        stage: as for :class:`Block`.
        name: a name for summaries and errors.
        checkpoint: as for :class:`Block`; the function's call is recomputed as a whole.

    Raises:
        MarkError: ``stage`` is not a non-negative integer, or the decorated object is not a
            function.

    Source: ``poptorch.BlockFunction``.

    Example:
        >>> import blockpipe as bp
        >>> @bp.BlockFunction(stage=1)
        ... def head(x):
        ...     "The head."
        ...     return x + 1
        >>> head(1), head.__doc__
        (2, 'The head.')
    """
    return Block(stage, name=name, checkpoint=checkpoint)


def _shown(mark: "Mark | Block") -> str:
    named = f", name={mark.name!r}" if mark.name else ""
    checkpoint = "" if mark.checkpoint is None else f", checkpoint={mark.checkpoint}"
    return f"stage={mark.stage}{named}{checkpoint}"


class _MarkedRepr:
    """An ``extra_repr`` that puts the mark before the module's own; a class, so that it can be
    pickled."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> str:
        mark = mark_of(self.module)
        own = type(self.module).extra_repr(self.module)
        if mark is None:
            return own
        return f"BeginBlock({_shown(mark)})" + (f", {own}" if own else "")


def _begin_marked_module(module: nn.Module, args: Any) -> None:
    """Run as the pre-hook of a marked module: it reads the mark then, so copies keep their own."""
    cursor = active_cursor()
    if cursor is not None:
        mark = mark_of(module)
        if mark is not None:
            cursor.begin(mark)


def mark_of(module: nn.Module) -> Mark | None:
    """Return the mark that BeginBlock put on a module, or ``None``."""
    return cast("Mark | None", module.__dict__.get(MARK))


@_knows_poptorchs_names
def BeginBlock(  # noqa: N802 - PopTorch's name
    module: Marked,
    stage: int | None = None,
    *,
    name: str | None = None,
    checkpoint: bool | None = None,
) -> Marked:
    """Mark a module: from its call on, the forward is on ``stage``.

    The stage lasts until the next mark, or until the end of the nested ``with Block`` around it.
    The same module is returned: class, parameters, ``state_dict`` keys and ``isinstance`` are
    unchanged, and the mark survives copies and pickles. A plain callable gives a marked callable.

    Args:
        module: an ``nn.Module`` or any callable.
        stage: as for :class:`Block`.
        name: a name for summaries and errors.
        checkpoint: as for :class:`Block`.

    Returns:
        The same module, or a callable that begins the block and then calls the given one.

    Raises:
        MarkError: ``stage`` is not a non-negative integer, or ``module`` is neither a module nor a
            callable, is a container without a forward (``nn.ModuleList``), or is marked already.

    Source: ``poptorch.BeginBlock``.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> net[1] = bp.BeginBlock(net[1], stage=1)
        >>> net
        Sequential(
          (0): Linear(in_features=4, out_features=4, bias=True)
          (1): Linear(BeginBlock(stage=1), in_features=4, out_features=2, bias=True)
        )
    """
    mark = Mark(_checked_stage(stage), name, users_line(), _checked_checkpoint(checkpoint))
    if not isinstance(module, nn.Module):
        return _marked_callable(module, mark)
    put_mark(module, mark)
    return module


def put_mark(module: nn.Module, mark: Mark) -> None:
    """Mark a module.

    Raises:
        MarkError: it takes no mark: it has no forward, no hooks, or a mark already.
    """
    before = mark_of(module)
    if before is not None:
        raise MarkError(
            f"{type(module).__name__} is marked as stage {before.stage} already ({before.where}), "
            f"and now as stage {mark.stage} ({mark.where}); call remove_blocks(module) first"
        )
    if isinstance(module, torch.jit.ScriptModule):
        fix = f"write with Block(stage={mark.stage}) around its call"
        contract = "a module that takes hooks"
        raise MarkError(expected(contract, module, for_="BeginBlock", fix=fix, where=mark.where))
    if not has_forward(module):
        inside = next((name for name, child in module.named_modules() if has_forward(child)), None)
        example = "" if inside is None else f", for example its {inside!r}"
        fix = f"mark the module in it with which the stage begins{example}"
        contract = "a module with a forward of its own"
        raise MarkError(expected(contract, module, for_="BeginBlock", fix=fix, where=mark.where))
    module.__dict__[MARK] = mark
    # The first of the pre-hooks: those of the user (weight norm, say) compute on the new stage.
    handle = module.register_forward_pre_hook(_begin_marked_module, prepend=True)
    module.__dict__["_blockpipe_hook"] = handle.id
    module.__dict__["extra_repr"] = _MarkedRepr(module)


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called; an ``nn.ModuleList`` cannot."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _marked_callable(function: Marked, mark: Mark) -> Marked:
    if not callable(function):
        fix = "pass the module itself, not its output or its name"
        contract = "an nn.Module or a callable"
        raise MarkError(expected(contract, function, for_="BeginBlock", fix=fix, where=mark.where))

    before: Mark | None = getattr(function, MARK, None)
    if before is not None:
        raise MarkError(
            f"{getattr(function, '__name__', 'this callable')} is marked as stage {before.stage} "
            f"already ({before.where}), and now as stage {mark.stage} ({mark.where}); mark the "
            "function itself"
        )

    key = _key_of(function)

    @functools.wraps(function)
    def begin_and_call(*args: Any, **kwargs: Any) -> Any:
        cursor = active_cursor()
        if cursor is not None:
            cursor.begin(mark)
        return _call(key, function, args, kwargs)

    setattr(begin_and_call, MARK, mark)
    return cast(Marked, begin_and_call)


def remove_blocks(model: nn.Module) -> nn.Module:
    """Remove every mark that BeginBlock put into a model, at any depth.

    Other hooks are left alone. Returns the model.

    Example:
        >>> import torch, blockpipe as bp
        >>> bp.remove_blocks(bp.BeginBlock(torch.nn.Linear(1, 1), stage=2))
        Linear(in_features=1, out_features=1, bias=True)
    """
    for module in model.modules():
        if mark_of(module) is not None:
            del module.__dict__[MARK]
            hook = module.__dict__.pop("_blockpipe_hook")
            forward_pre_hooks_of(module).pop(hook, None)
            module.__dict__.pop("extra_repr", None)
    return model


def begin_blocks(model: nn.Module, stages: Mapping[str, int]) -> nn.Module:
    """Mark submodules by path: ``{"layer3": 1, "blocks.[6-9]": 2}``.

    Args:
        model: the model to mark, in place.
        stages: a mapping from path patterns to stages. A pattern is matched segment by segment,
            with ``*``, ``?`` and ``[…]`` as in a shell.

    Returns:
        The same model.

    Raises:
        MarkError: a pattern matches nothing (the message has near misses), or a module would be
            marked twice. All patterns are checked before anything is marked.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        >>> _ = bp.begin_blocks(net, {"[2-3]": 1})
        >>> bp.record(net, torch.zeros(1, 4)).route
        [0, 1]
    """
    fix = "write begin_blocks(model, {'layer3': 1})"
    if not isinstance(model, nn.Module):
        raise MarkError(expected("an nn.Module", model, for_="model", fix=fix))
    if not isinstance(stages, Mapping):
        contract = "a mapping from path patterns to stages"
        raise MarkError(expected(contract, stages, for_="stages", fix=fix))
    modules = dict(model.named_modules())
    paths = [path for path in modules if path]
    chosen = [(path, s) for pattern, s in stages.items() for path in matching_paths(pattern, paths)]
    wanted: dict[int, tuple[str, int]] = {}
    for path, stage in chosen:
        _checked_stage(stage)
        module = modules[path]
        before = mark_of(module)
        earlier = wanted.setdefault(id(module), (path, stage))
        if before is not None or earlier != (path, stage):
            old = before.stage if before is not None else earlier[1]
            raise MarkError(
                f"module {path!r} is marked as stage {old} already, and now as stage {stage}; "
                f"call remove_blocks(model) first, or give it one pattern ({users_line()})"
            )
    for path, stage in chosen:
        BeginBlock(modules[path], stage)
    return model
