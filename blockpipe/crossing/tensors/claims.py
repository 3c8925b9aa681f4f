"""The tensors that one run makes: each gets a tag that says where it was made, and whether it is a
constant that every micro-batch may read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..._common.callsite import users_place
from ..._common.nested import tensors
from ..._torch.tensors import version_of
from ..constants import makes_constants, note_write, writes
from ..step_context import StepContext
from ..tags import MADE, RECORDING, TAG, Tag
from .place import Place

Outside = Sequence[tuple[Tensor, int]]  # tensors of nobody's, and the versions they were read at
Constants = list[tuple[Tensor, Tag]]


class Claims:
    """The tags of the tensors that one run makes.

    Args:
        step: what the run shares with the other runs of its step.
        place: where the run is.
    """

    def __init__(self, step: StepContext, place: Place) -> None:
        self._step = step
        self._place = place

    def claim(self, result: Any, outside: Outside) -> None:
        """Tag the tensors in a result: they were made on this hop.

        Args:
            result: what an operation, or a sealed call, returned.
            outside: the tensors of nobody's that it has read.
        """
        if isinstance(result, Tensor):
            self.tag(result, outside)
        else:
            for tensor in tensors(result):
                self.tag(tensor, outside)

    def tag(self, tensor: Tensor, outside: Outside = ()) -> None:
        """Tag one tensor if it has no tag yet."""
        tag: Tag | None = getattr(tensor, TAG, None)
        if tag is not None and (tag.key is self._place.key or tag.is_constant(tensor)):
            return
        if tag is None and outside and _is_untouched(tensor, outside):
            return  # an operation that had nothing to do returned what it was given
        if self._step.home_of(tensor) is None:
            made = self._place.tag(tensor)
            if made is not None:
                setattr(tensor, TAG, made)

    def claim_gradient(self, gradient: Tensor, tensor: Tensor) -> None:
        """Tag the ``.grad`` of a tensor: a backward in the forward made it where the tensor is."""
        its: Tag | None = getattr(tensor, TAG, None)
        tag: Tag | None = getattr(gradient, TAG, None)
        if tag is not None and tag.key is (self._place.key if its is None else its.key):
            return
        made = self._place.tag(gradient)
        if made is not None:
            at = self._step.home_of(tensor) if its is None else its
            if at is not None:
                made.hop, made.stage = at.hop, at.stage
            setattr(gradient, TAG, made)

    def claim_leaf(self, leaf: Tensor) -> None:
        """Note who has made a parameter. It is nobody's: a layer that the first forward makes is
        for all. But if each one makes its own, it matters whose is read."""
        if self._place.key.step == RECORDING:
            return
        made = Tag(self._place.key, self._place.hop, self._place.stage)
        made.constant, made.site = version_of(leaf), users_place()
        setattr(leaf, MADE, made)
        if self._step.constants is not None:
            self._step.constants.made(leaf, made.site, made.key)

    # --- constants

    def constants_read(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Constants | None:
        """Return this run's constants that an operation is about to be given; ``None`` if its
        result is no constant, because it is given something of a micro-batch's."""
        first: Any = args[0] if args else kwargs.get("out")
        its_tag: Tag | None = getattr(first, TAG, None)
        if its_tag is not None and its_tag.constant is None:
            return None  # the common case
        own: Constants = []
        reads_other = False
        for tensor in tensors((args, kwargs)):
            tag: Tag | None = getattr(tensor, TAG, None)
            if tag is None:
                continue
            if not tag.is_constant(tensor):
                reads_other = True
                break
            if tag.key is self._place.key:
                own.append((tensor, tag))
        is_others = its_tag is not None and (reads_other or its_tag.key is not self._place.key)
        if is_others and writes(func):
            assert its_tag is not None
            its_tag.constant = None  # also where no version says so
            note_write(first)
        return own if not reads_other and makes_constants(func) else None

    def claim_constant(
        self, result: Any, func: Callable[..., Any], given: Constants, outside: Outside
    ) -> None:
        """Tag the result of such an operation. Tensors that it wrote to were made by this forward,
        which is still making them.

        Args:
            result: what it returned.
            func: the operation.
            given: the answer of :meth:`constants_read`.
            outside: the tensors of nobody's that it has read.
        """
        for tensor, tag in given:
            if tag.constant != version_of(tensor):
                tag.constant, tag.copies = version_of(tensor), None
        for tensor in tensors(result):
            self._claim_constant(tensor, (users_place(), func), outside)

    def claim_constants(
        self, result: Any, which: Collection[int], name: str, outside: Outside
    ) -> None:
        """Tag those tensors in the result of a sealed call that were constants when it was
        recorded."""
        for index, tensor in enumerate(tensors(result)):
            if index in which:
                self._claim_constant(tensor, (name, index), outside)

    def _claim_constant(self, tensor: Tensor, site: Hashable, outside: Outside) -> None:
        tag: Tag | None = getattr(tensor, TAG, None)
        is_mine = tag is not None and tag.key is self._place.key and tag.constant is None
        if tensor.requires_grad or (tag is not None and not is_mine):
            return
        if tag is None:
            self.tag(tensor, outside)
            tag = getattr(tensor, TAG, None)
            if tag is None:
                return  # it is from outside, and as it was
        tag.constant, tag.site = version_of(tensor), site
        if self._step.constants is not None:
            self._step.constants.made(tensor, site, tag.key)

    def keep_on_host(self, result: Any, given: tuple[Any, ...], outside: Outside) -> Any:
        """Tag a result that the forward asked to have on the host, where other stages are not."""
        if isinstance(result, Tensor) and result.device.type == "cpu":
            if any(result is a for a in given):
                result = result.view_as(result)  # it was there: the tensor itself may follow
            self.claim(result, outside)
            getattr(result, TAG).is_kept = True
        return result


def _is_untouched(tensor: Tensor, outside: Outside) -> bool:
    return any(other is tensor and version_of(other) == version for other, version in outside)
