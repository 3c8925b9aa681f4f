"""Deep copies of a model, and what is set on the model after they were made.

A training loop sets ``net.scale = 3``, registers a hook, replaces a layer. To compare the models
themselves would find what the copies' own forwards have set, so the model is compared with itself:
as its last step left it, with what it is now. The objects compared are those of which the copies
have their own. Values in parameters and buffers are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from ..._common.callsite import users_line
from ..._torch.graph import hooks_of_leaf
from ..._torch.modules import pruned_names
from ..._torch.tensors import version_of
from ...errors import UsageError
from ..holders import AttributesHolder, DictHolder, Holder, SequenceHolder
from ..model_state import ModelState
from .whole_copies import copied_whole

_PLAIN = frozenset([bool, int, float, complex, str, bytes, type(None)])
_kind_of: Callable[[Tensor], tuple[Any, ...]] = attrgetter("dtype", "shape")


@dataclass(frozen=True)
class _Seen:
    """What the model's objects were: their classes, and their members one after the other."""

    classes: list[type]
    counts: list[int]
    keys: list[Any]
    values: list[Any]
    kinds: list[Any]
    versions: list[int]  # of tensors that are no parameters and no buffers

    def is_same(self, now: _Seen) -> bool:
        pairs = (self.classes, now.classes), (self.keys, now.keys), (self.values, now.values)
        if self.counts != now.counts or not all(all(map(is_, *pair)) for pair in pairs):
            return False
        return self.kinds == now.kinds and self.versions == now.versions


@dataclass
class CopiedModels:
    """Deep copies of a model that follow what is set on it.

    Args:
        model: the user's.
        count: how many.

    Attributes:
        copies: the copies.

    Raises:
        UsageError: it cannot be copied.
    """

    model: nn.Module
    count: int
    copies: list[nn.Module] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._memos: list[dict[int, Any]] = []
        self.copy()

    def copy(self) -> None:
        """Make the copies anew, from the model as it is now."""
        try:
            with torch.inference_mode(False):  # they are trained, whatever this is called under
                self._memos = [_without_graphs(self.model) for _ in range(self.count)]
                self.copies = [copied_whole(self.model, memo) for memo in self._memos]
        except RuntimeError as error:
            raise UsageError(
                f"expected a model that copy.deepcopy can copy, got its error {error} "
                f"({users_line()}); keep no tensor on it that has a gradient path"
            ) from error
        kept = self._memos[0].get(id(self._memos[0]), ()) if self._memos else ()  # what was copied
        registered = {*map(id, self.model.parameters()), *map(id, self.model.modules())}
        beside = [each for each in kept if id(each) not in registered]
        self._leaves = [t for t in beside if isinstance(t, Tensor) and _is_trained(t)]
        self._apart = [m for m in beside if isinstance(m, nn.Module)]
        self._tensors = [each for each in beside if isinstance(each, Tensor)]  # in tuples too
        for memo in self._memos:
            for leaf in self._leaves:
                memo[id(leaf)].grad = None  # a copy of a plain tensor has one of its gradient
        self._versions: list[dict[int, int]] = [{} for _ in self._memos]  # by the id of the model's
        self._find()
        self.note()

    def parameters(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the model's parameters, also those in plain lists and objects, which no module has
        registered, each with that of a copy."""
        yield from zip(self.model.parameters(), self.copies[number].parameters(), strict=True)
        memo = self._memos[number]
        yield from ((leaf, memo[id(leaf)]) for leaf in self._leaves)

    def buffers(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the model's buffers, also of modules in plain lists, each with that of a copy."""
        yield from zip(self.model.buffers(), self.copies[number].buffers(), strict=True)
        memo = self._memos[number]
        for module in self._apart:
            own, copied = module.buffers(recurse=False), memo[id(module)].buffers(recurse=False)
            yield from zip(own, copied, strict=True)

    def copy_plain_tensors(self, number: int) -> None:
        """Give a copy the values of the model's other tensors, unless something else writes to the
        copy's: versions do not tell of writes to the model's by ``.data`` or numpy."""
        memo, versions = self._memos[number], self._versions[number]
        for tensor in self._beside:
            own = memo.get(id(tensor))
            if own is None or own is tensor or not _takes_values(tensor, own):
                continue
            before = versions.setdefault(id(tensor), version_of(own))
            if version_of(own) == before:
                own.copy_(tensor, non_blocking=True)
                versions[id(tensor)] = version_of(own)

    def _find(self) -> None:
        """Find the objects of which each copy has its own."""
        memo = self._memos[0] if self._memos else {}
        state = ModelState(self.model, values=False, contents=False)
        owned = [h for h in state.holders if _has_names(h, memo)]
        for holder in owned:
            holder.before = []  # the saved members may be as large as the model
        self._named: list[Any] = [h for h in owned if isinstance(h, DictHolder)]
        self._ordered: list[Any] = [h for h in owned if isinstance(h, SequenceHolder)]
        self._others = [h for h in owned if not isinstance(h, DictHolder | SequenceHolder)]
        self._spaces = [h.namespace() for h in (*self._named, *self._ordered)]
        self._owners = [h.owner for h in owned if h.namespace() is not h.owner]
        self._parameters = [*self.model.parameters(), *self._leaves]
        apart = (buffer for module in self._apart for buffer in module.buffers(recurse=False))
        self._held = [*self._parameters, *self.model.buffers(), *apart]

    def is_copied(self, owner: object) -> bool:
        """Return whether each copy has an object for itself."""
        return any(_is_copied(owner, memo) for memo in self._memos[:1])

    def has_own(self, key: int) -> bool:
        """Return the same, by the object's id."""
        return any(key in memo and id(memo[key]) != key for memo in self._memos[:1])

    def note(self) -> None:
        """Note what the model is now: a step is over."""
        # Most are empty: a module has a dictionary for each kind of hook.
        self._dicts = [space for space in self._spaces[: len(self._named)] if space]
        self._lists = [space for space in self._spaces[len(self._named) :] if space]
        ids = {id(tensor) for tensor in self._held}
        values = self._values()
        beside = {id(v): v for v in (*values, *self._tensors) if isinstance(v, Tensor)}
        self._beside = [tensor for key, tensor in beside.items() if key not in ids]
        self._seen = self._now(values)

    def _values(self) -> list[Any]:
        others = [value for holder in self._others for _, value in holder.now()]
        named = chain.from_iterable(map(dict.values, self._dicts))
        return [*named, *chain.from_iterable(self._lists), *others]

    def _now(self, values: list[Any]) -> _Seen:
        return _Seen(
            [*map(type, self._owners)],
            [*map(len, self._spaces), len(values)],
            [*chain.from_iterable(self._dicts)],
            values,
            [*map(_kind_of, self._held)],
            [*map(version_of, self._beside)],
        )

    def follow(self) -> bool:
        """Set on the copies what was set on the model since :meth:`note`.

        Returns:
            Whether all is set. If not, the copies have to be made anew.

        Raises:
            UsageError: a parameter has a hook.
        """
        self._check_hooks()
        now = self._now(self._values())
        if self._seen.is_same(now):
            return True
        before, is_plain = self._seen, now.classes == self._seen.classes
        if not is_plain or before.counts != now.counts or before.kinds != now.kinds:
            return False
        if before.versions != now.versions or not all(map(is_, before.keys, now.keys)):
            return False
        changes = list(self._changes(before.values, now.values))
        if any(at is None or not _are_plain(then, value) for at, then, value in changes):
            return False
        for at, _, value in changes:
            for memo in self._memos:
                assert at is not None
                holder, key = at
                _space(holder, memo)[key] = value
        self._seen = now
        return True

    def _changes(
        self, then: Sequence[Any], now: Sequence[Any]
    ) -> Iterator[tuple[tuple[Holder, Any] | None, Any, Any]]:
        """Yield the values that were set, each with the place that it is in; ``None``: that has no
        names."""
        starts = [0, *accumulate(map(len, self._spaces))]
        holders: list[Holder] = [*self._named, *self._ordered]
        for holder, space, start in zip(holders, self._spaces, starts, strict=False):
            end = start + len(space)
            if all(map(is_, then[start:end], now[start:end])):
                continue
            for key, old, new in zip(_keys(space), then[start:end], now[start:end], strict=True):
                if old is not new:
                    yield (holder, key), old, new
        if not all(map(is_, then[starts[-1] :], now[starts[-1] :])):
            yield from zip(repeat(None), then[starts[-1] :], now[starts[-1] :], strict=False)

    def _check_hooks(self) -> None:
        hooked = [p for p in self._parameters if hooks_of_leaf(p)]
        if not hooked:
            return
        names = (repr(name) for name, p in self.model.named_parameters() if p is hooked[0])
        name = next(names, "one that no module has registered")
        raise UsageError(
            f"expected parameters without hooks, got one on {name} ({users_line()}): it would "
            "not see the gradients of the copies; change .grad after the step, or register a hook "
            "on a module, which is copied"
        )


def _without_graphs(model: nn.Module) -> dict[int, Any]:
    """Return a memo for ``copy.deepcopy`` that knows the tensors with a gradient path that the
    forward computes anew before it reads them: those of ``torch.nn.utils.prune``."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name in pruned_names(module):
            pruned = vars(module).get(name)
            if isinstance(pruned, Tensor) and not pruned.is_leaf:
                memo[id(pruned)] = pruned.detach().clone()
    return memo


def _is_trained(tensor: Tensor) -> bool:
    """Return whether a tensor that no module has registered may get a gradient, or has had one."""
    return tensor.requires_grad or isinstance(tensor, nn.Parameter)


def _takes_values(tensor: Tensor, own: Tensor) -> bool:
    """Return whether ``own.copy_(tensor)`` is all there is to do."""
    is_plain = all(
        type(one) is Tensor and one.layout is torch.strided and not one.requires_grad
        for one in (tensor, own)
    )
    is_expanded = 0 in own.stride() if is_plain else False
    return is_plain and tensor.shape == own.shape and not (is_expanded or own.is_inference())


def _has_names(holder: Holder, memo: dict[int, Any]) -> bool:
    """Whether an object of which each copy has its own has members that are followed."""
    owner = holder.owner
    if isinstance(owner, Tensor) and not isinstance(holder, AttributesHolder):
        return False
    return not isinstance(owner, torch.Generator) and _is_copied(owner, memo)


def _is_copied(owner: Any, memo: dict[int, Any]) -> bool:
    return memo.get(id(owner), owner) is not owner


def _space(holder: Holder, memo: dict[int, Any]) -> Any:
    """Return a copy's namespace that stands for a holder's."""
    copied = memo[id(holder.owner)]
    return copied if holder.namespace() is holder.owner else vars(copied)


def _keys(space: Any) -> Any:
    return space if isinstance(space, dict) else range(len(space))


def _are_plain(then: Any, now: Any) -> bool:
    return type(then) in _PLAIN and type(now) in _PLAIN
