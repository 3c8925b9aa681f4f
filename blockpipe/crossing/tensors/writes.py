"""In-place writes to tensors that crossed: which of a run's copies were written to, and what else
shares their memory.

A copy does not share the original's memory, so a write to one has to reach the readers of the
other. Where the tensor itself crossed, the copy is what counts from then on (``Tag.newest``). Where
the write would be missed, because a view crossed as well or the value is everybody's, it is an
error.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

from ..._common.callsite import users_line
from ..._torch.tensors import shape_of, version_of
from ...errors import CrossingError, StateError
from ..step_context import StepContext
from ..tags import TAG, UNCUT, Aliases, Import, Tag, aliases_of, set_aliases
from .place import Place


class Writes:
    """The writes of one run to tensors of other hops.

    Args:
        step: what the run shares with the other runs of its step.
        place: where the run is.

    Attributes:
        reached_back: whether any tensor of another hop was written to.
    """

    def __init__(self, step: StepContext, place: Place) -> None:
        self._step = step
        self._place = place
        self.reached_back = False
        # This hop's imports: a write may reach one through a view of it, with no import in sight.
        self._hop_imports: list[tuple[weakref.ref[Tensor], weakref.ref[Import]]] = []

    def follow(self, tensor: Tensor, made: Import) -> None:
        """Watch from here on whether a copy is written to, until the run leaves the hop."""
        self._hop_imports.append((weakref.ref(tensor), weakref.ref(made)))

    def before_import(self, tensor: Tensor, tag: Tag) -> None:
        """Check a tensor that is about to be copied: its memory may have been written to on this
        hop."""
        if self._hop_imports:
            self.notice()
            self.check_current(tensor, tag)

    def notice(self) -> None:
        """Look which of this hop's imports were written to, in whatever way."""
        for tensor_ref, import_ref in self._hop_imports:
            tensor, used = tensor_ref(), import_ref()
            if tensor is not None and used is not None:
                self.check(((tensor, used),))

    def check(self, imports: Iterable[tuple[Tensor, Import]]) -> None:
        """Check after an operation or a sealed call whether it wrote to one of its imports."""
        for tensor, used in imports:
            used.return_attributes(tensor)
            version = version_of(used.value)
            if version != used.version:
                used.version = version
                self._write_through(tensor, used)

    def leave_hop(self) -> None:
        """Check the imports of a hop that the run leaves, and forget them."""
        self.notice()
        self.forget()

    def forget(self) -> None:
        """Release the hop's imports."""
        self._hop_imports.clear()

    def _write_through(self, tensor: Tensor, used: Import) -> None:
        place = self._place
        if place.listener is not None:
            place.listener.wrote_across(tensor)
        tag: Tag | None = getattr(tensor, TAG, None)
        if tag is None:
            home = self._step.home_of(tensor)
            what = "a constant" if home is None else f"{home.name!r}"
            lives = "elsewhere" if home is None else f"on stage {home.stage}"
            raise StateError(
                f"{what} of shape {shape_of(tensor)} lives {lives} and was written in place, "
                f"there or on stage {place.stage}, which reads it too ({users_line()}); let one "
                f"stage write it and read it, or {UNCUT}"
            )
        aliases = used.aliases
        if aliases is None:
            raise CrossingError(
                f"an operation on stage {place.stage} writes in place to a tensor of shape "
                f"{shape_of(tensor)} made on stage {tag.stage} ({users_line()}), which the "
                "recorded forward did not; give Pipeline a sample that takes this way"
            )
        if aliases.imported > 1:
            raise CrossingError(
                f"an operation on stage {place.stage} writes in place to a tensor of shape "
                f"{shape_of(tensor)} made on stage {tag.stage}, of which views crossed as well "
                f"({users_line()}): they would miss the write; clone() it first, or {UNCUT}"
            )
        aliases.written_on = place.hop
        aliases.imported = 0  # of what counts from here on
        tag.newest = used.value
        self.reached_back = True

    def join_aliases(self, tensor: Tensor, made: Import) -> None:
        """Note that a tensor and its copy are one memory to the user's code."""
        key = self._place.key
        aliases = aliases_of(tensor, key)
        if aliases is None:
            aliases = Aliases()
            set_aliases(tensor, key, aliases)
        tag: Tag = getattr(tensor, TAG)
        if tag.imports is None or len(tag.imports) <= 1:
            aliases.imported += 1  # this tensor's first; a further hop adds no alias
        set_aliases(made.value, key, aliases)
        made.aliases = aliases

    def check_current(self, tensor: Tensor, tag: Tag) -> None:
        """Raise if a later hop has written to a tensor's memory by way of another view."""
        aliases = aliases_of(tensor, self._place.key)
        if aliases is not None and aliases.written_on is not None and tag.hop < aliases.written_on:
            raise CrossingError(
                f"an operation on stage {self._place.stage} reads a tensor of shape "
                f"{shape_of(tensor)} made on stage {tag.stage}, whose storage was written in "
                f"place on a later stage through another view ({users_line()}): it would miss the "
                f"write; clone() before writing, or {UNCUT}"
            )
