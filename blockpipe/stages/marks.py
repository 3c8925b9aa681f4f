"""Marks: where in a forward a stage begins.

A mark moves a *cursor*, and only if there is one: the recording and every run put a cursor
into the context of their thread, everywhere else the marks do nothing. So a marked model is still
an ordinary model. A stack of device scopes (``with torch.device``) was no alternative: what
follows a mark must stay where it is, also when the mark was made deep inside a module call.

``BeginBlock`` keeps its mark in the module's ``__dict__`` and reads it from there when it runs:
copies and pickles carry it along, and the class and the ``state_dict`` stay what they were.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import nn

from .._common.callsite import users_line
from .._common.hints import knows_other_names
from ..errors import MarkError

P = ParamSpec("P")
R = TypeVar("R")
Marked = TypeVar("Marked", bound=Callable[..., Any])

MARK = "_blockpipe_mark"


@dataclass(frozen=True)
class Mark:
    """One mark as written: its stage (``None``: the next number), its name and its line."""

    stage: int | None
    name: str | None
    where: str
    checkpoint: bool | None = None


# Calls a function that is a block, known by a text, with its arguments.
FunctionCall = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Cursor:
    """Which stage the forward under way is on. One for each run; never shared by threads."""

    def __init__(self, *, follow_marks: bool = True) -> None:
        self.stage = 0
        self.mark: Mark | None = None
        self.follow_marks = follow_marks
        self.highest = -1
        self.checkpoint: bool | None = None  # what the mark in effect says of recomputation
        self.noted: dict[Any, Any] = {}  # by a numbering, of this forward
        self._scopes: list[tuple[int, bool | None, Mark | None]] = []
        self.in_scope = False
        self.on_move: Callable[[int], None] | None = None
        self.on_call: FunctionCall | None = None
        self.block_ended = False  # the last thing that happened was the end of an outermost block

    def copy(self) -> "Cursor":
        """A cursor that stands where this one does, and tells nobody."""
        new = Cursor(follow_marks=self.follow_marks)
        new.stage, new.mark, new.highest = self.stage, self.mark, self.highest
        new.noted = {**self.noted}
        new.checkpoint, new._scopes, new.in_scope = self.checkpoint, [*self._scopes], self.in_scope
        return new

    def begin(self, mark: Mark) -> None:
        """Move to a mark's stage."""
        numbering = _numbering.get()
        if numbering is not None:
            stage = numbering(self, mark)
        else:
            stage = self.highest + 1 if mark.stage is None else mark.stage
        self.highest = max(self.highest, stage)
        self.block_ended = False
        self.checkpoint = mark.checkpoint
        if self.follow_marks:
            self.move(stage, mark)

    def enter(self, mark: Mark) -> None:
        """Move to a mark's stage and remember the one to come back to."""
        self._scopes.append((self.stage, self.checkpoint, self.mark))
        self.begin(mark)
        self.in_scope = True

    def leave(self) -> None:
        """Come back to the outer block's stage; after the outermost block, stay."""
        outer, self.checkpoint, mark = self._scopes.pop()
        self.in_scope = bool(self._scopes)
        self.block_ended = not self._scopes
        if self._scopes and self.follow_marks:
            self.move(outer, mark)

    def move(self, stage: int, mark: Mark | None) -> None:
        """Set the stage, and tell the run."""
        moves = stage != self.stage
        self.stage = stage
        self.mark = mark
        if moves and self.on_move is not None:
            self.on_move(stage)


_cursor: ContextVar[Cursor | None] = ContextVar("blockpipe_cursor", default=None)

# The stage of a mark that a forward has come to, from its cursor and the mark.
Numbering = Callable[[Cursor, Mark], int]
_numbering: ContextVar[Numbering | None] = ContextVar("blockpipe_numbering", default=None)


@contextmanager
def numbered_by(numbering: Numbering) -> Iterator[None]:
    """While entered, forwards that are recorded or run ask this function for each mark's stage.

    A number at the mark cannot say which stages the blocks of a name are put together in: that is
    decided where the pipeline is made. What the function has to remember of a forward is kept in
    ``cursor.noted``, for several run at once.
    """
    token = _numbering.set(numbering)
    try:
        yield
    finally:
        _numbering.reset(token)


def set_cursor(cursor: Cursor | None) -> Cursor | None:
    """Put a cursor into this context; returns the one that was there."""
    before = _cursor.get()
    _cursor.set(cursor)
    return before


def current_stage() -> int | None:
    """The stage that the forward under way is on, or ``None`` outside a recording or replay.

    Example:
        >>> import blockpipe as bp
        >>> print(bp.current_stage())
        None
    """
    cursor = _cursor.get()
    return None if cursor is None else cursor.stage


_microbatch: ContextVar[int | None] = ContextVar("blockpipe_microbatch", default=None)


def current_microbatch() -> int | None:
    """The index of the micro-batch whose forward is under way, or ``None`` outside of one.

    For state that a forward keeps on ``self``: keep one for each micro-batch.

    Source: ``torchgpipe``'s function of this name, which returns a tensor to compare instead.

    Example:
        >>> import blockpipe as bp
        >>> print(bp.current_microbatch())
        None
    """
    return _microbatch.get()


def set_microbatch(index: int | None) -> int | None:
    """Say which micro-batch's forward is under way here; returns what was said before."""
    before = _microbatch.get()
    _microbatch.set(index)
    return before


recomputing: ContextVar[bool] = ContextVar("blockpipe_recomputing", default=False)


def is_recomputing() -> bool:
    """Whether a module runs again, only to make activations that were dropped.

    By the pipeline's ``checkpoint=``, or by a ``torch.utils.checkpoint`` in the forward's own code.

    For what a forward does beside computing, and should do once: count, log, append to a list.
    Random states and buffers need no care: they are the first run's, and as if it ran once.

    Source: ``torchgpipe.is_recomputing``.

    Example:
        >>> import blockpipe as bp
        >>> bp.is_recomputing()
        False
    """
    return recomputing.get()


def _active_cursor() -> Cursor | None:
    # Not is_compiling(): that says whether any thread of the process compiles.
    return None if torch.compiler.is_dynamo_compiling() else _cursor.get()


def _checked_stage(stage: int | None) -> int | None:
    if stage is None or (isinstance(stage, int) and not isinstance(stage, bool) and stage >= 0):
        return stage
    raise MarkError(
        f"a stage is a whole number from 0 on, but {stage!r} came; "
        f"write stage=0, stage=1, … ({users_line()})"
    )


def _checked_checkpoint(checkpoint: bool | None) -> bool | None:
    if checkpoint is None or isinstance(checkpoint, bool):
        return checkpoint
    raise MarkError(
        "a mark's checkpoint is True, False, or None (as the pipeline's), but "
        f"{checkpoint!r} came ({users_line()})"
    )


_IPU_ID = "pass stage=; on which device a stage is, devices= of Pipeline says"
_knows_poptorchs_names = knows_other_names(ipu_id=_IPU_ID, user_id="pass name=")


class Block:
    """A region of a forward as a stage: a context manager, and a decorator.

    Code in the block runs on ``stage``. A nested block's exit restores the outer block's stage;
    after the outermost block the forward stays on the stage it is on. Outside Blockpipe, and
    while ``torch.compile`` or ``torch.export`` trace, a block does nothing.

    Args:
        stage: a number from 0 on; ``None`` is the number after the highest entered so far in
            this forward (0 at first).
        name: shown in summaries and errors.
        checkpoint: whether the modules called in it are recomputed in the backward; ``None``: as
            the pipeline's ``checkpoint=`` says.

    Raises:
        MarkError: ``stage`` is no whole number from 0 on.

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
        cursor = _active_cursor()
        if cursor is not None:
            cursor.enter(Mark(self.stage, self.name, users_line(), self.checkpoint))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        cursor = _active_cursor()
        if cursor is not None:
            cursor.leave()

    def begin(self) -> None:
        """Be on the block's stage from here on, until the next mark.

        As the call of a module under :func:`BeginBlock`, for code that no ``with`` is around. In a
        nested ``with Block`` it lasts until the end of that.
        """
        cursor = _active_cursor()
        if cursor is not None:
            cursor.begin(Mark(self.stage, self.name, users_line(), self.checkpoint))

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if not callable(function) or isinstance(function, nn.Module):
            raise MarkError(
                f"Block decorates a function, but {type(function).__name__} came; "
                f"mark a module with BeginBlock ({users_line()})"
            )

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
    """Call a function that is a block: as a sealed one, if it turned out to be one."""
    cursor = _active_cursor()
    if cursor is None or cursor.on_call is None:
        return function(*args, **kwargs)
    return cast(R, cursor.on_call(key, function, args, kwargs))


@_knows_poptorchs_names
def BlockFunction(  # noqa: N802 - PopTorch's name
    stage: int | None = None, *, name: str | None = None, checkpoint: bool | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function or method as a block; keeps its name, signature and docstring.

    Args:
        stage: as for :class:`Block`.
        name: shown in summaries and errors.
        checkpoint: as for :class:`Block`; the function's call is recomputed as a whole.

    Raises:
        MarkError: a wrong stage, or something that is no function.

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
    """An ``extra_repr`` that puts the mark before the module's own; a class, to be pickled."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> str:
        mark = mark_of(self.module)
        own = type(self.module).extra_repr(self.module)
        if mark is None:
            return own
        return f"BeginBlock({_shown(mark)})" + (f", {own}" if own else "")


def _begin_marked_module(module: nn.Module, args: Any) -> None:
    """The pre-hook of a marked module: the mark is read when it runs, so copies keep their own."""
    cursor = _active_cursor()
    if cursor is not None:
        mark = mark_of(module)
        if mark is not None:
            cursor.begin(mark)


def mark_of(module: nn.Module) -> Mark | None:
    """The mark that BeginBlock put on a module, or None."""
    return cast("Mark | None", module.__dict__.get(MARK))


@_knows_poptorchs_names
def BeginBlock(  # noqa: N802 - PopTorch's name
    module: Marked,
    stage: int | None = None,
    *,
    name: str | None = None,
    checkpoint: bool | None = None,
) -> Marked:
    """From this module's call on, the forward is on ``stage``.

    It lasts until the next mark, or until the end of the nested ``with Block`` around it. The
    same module comes back: class, parameters, ``state_dict`` keys and ``isinstance`` are
    unchanged, and the mark survives copies and pickles. A plain callable gives a marked callable.

    Args:
        module: an ``nn.Module`` or any callable.
        stage: as for :class:`Block`.
        name: shown in summaries and errors.
        checkpoint: as for :class:`Block`.

    Returns:
        The same module, or a callable that begins the block and then calls the given one.

    Raises:
        MarkError: a wrong stage; neither module nor callable; a container that nobody calls
            (``nn.ModuleList``); marked already.

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
    before = mark_of(module)
    if before is not None:
        raise MarkError(
            f"{type(module).__name__} is marked as stage {before.stage} already ({before.where}), "
            f"and now as stage {mark.stage} ({mark.where}); call remove_blocks(module) first"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise MarkError(
            "BeginBlock marks modules that take hooks, but a scripted one came "
            f"({mark.where}); write with Block(stage={mark.stage}) around its call"
        )
    if not _is_called(module) and "forward" not in module.__dict__:
        inside = next((name for name, child in module.named_modules() if _is_called(child)), None)
        remedy = "" if inside is None else f", its {inside!r} for example"
        raise MarkError(
            f"BeginBlock marks modules that are called, but a {type(module).__name__} has no "
            f"forward of its own ({mark.where}); mark the module in it that the stage begins "
            f"with{remedy}"
        )
    module.__dict__[MARK] = mark
    # First of the pre-hooks: those of the user (weight norm, say) compute on the new stage.
    handle = module.register_forward_pre_hook(_begin_marked_module, prepend=True)
    module.__dict__["_blockpipe_hook"] = handle.id
    module.__dict__["extra_repr"] = _MarkedRepr(module)
    return module


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _marked_callable(function: Marked, mark: Mark) -> Marked:
    if not callable(function):
        raise MarkError(
            f"BeginBlock marks an nn.Module or a callable, but {type(function).__name__} came; "
            f"pass the module itself, not its output or its name ({mark.where})"
        )

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
        cursor = _active_cursor()
        if cursor is not None:
            cursor.begin(mark)
        return _call(key, function, args, kwargs)

    setattr(begin_and_call, MARK, mark)
    return cast(Marked, begin_and_call)


def remove_blocks(model: nn.Module) -> nn.Module:
    """Take off every mark that BeginBlock put into a model, at any depth.

    Hooks of others are left alone. Returns the model.

    Example:
        >>> import torch, blockpipe as bp
        >>> bp.remove_blocks(bp.BeginBlock(torch.nn.Linear(1, 1), stage=2))
        Linear(in_features=1, out_features=1, bias=True)
    """
    for module in model.modules():
        if mark_of(module) is not None:
            del module.__dict__[MARK]
            hook = module.__dict__.pop("_blockpipe_hook")
            module._forward_pre_hooks.pop(hook, None)
            module.__dict__.pop("extra_repr", None)
    return model


def matching_paths(pattern: str, paths: list[str]) -> list[str]:
    """The module paths that a pattern names, segment by segment (``blocks.[6-9]``, ``*.attn``).

    Raises:
        MarkError: none is named; the message has near misses.
    """
    if not isinstance(pattern, str):
        raise MarkError(
            f"a path pattern is text such as 'layer3', not {pattern!r} ({users_line()})"
        )
    wanted = pattern.split(".")
    found = [
        path
        for path in paths
        if len(have := path.split(".")) == len(wanted)
        and all(fnmatchcase(h, w) for h, w in zip(have, wanted, strict=True))
    ]
    if found:
        return found
    plain = re.sub(r"[\[\]*?!]", "", pattern)
    near = get_close_matches(plain, paths, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(map(repr, near))}?" if near else f"there are {paths[:8]} …"
    raise MarkError(f"no module has the path {pattern!r}; {hint} ({users_line()})")


def begin_blocks(model: nn.Module, stages: Mapping[str, int]) -> nn.Module:
    """Mark submodules by path: ``{"layer3": 1, "blocks.[6-9]": 2}``.

    Args:
        model: the model to mark, in place.
        stages: from a path pattern to a stage. A pattern is matched segment by segment, with
            ``*``, ``?`` and ``[…]`` as in a shell.

    Returns:
        The same model.

    Raises:
        MarkError: a pattern that matches nothing (with near misses), a module marked twice. All
            patterns are checked before anything is marked.

    Example:
        >>> import torch, blockpipe as bp
        >>> net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        >>> _ = bp.begin_blocks(net, {"[2-3]": 1})
        >>> bp.record(net, torch.zeros(1, 4)).route
        [0, 1]
    """
    if not isinstance(model, nn.Module) or not isinstance(stages, Mapping):
        raise MarkError(
            "begin_blocks takes an nn.Module and a mapping from path patterns to stages, but for "
            f"the mapping {stages!r}, and for the model {type(model).__name__} came; write "
            f"begin_blocks(model, {{'layer3': 1}}) ({users_line()})"
        )
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
