"""The caller's tensors that one run reads, and the caller's writes to them before a backward.

A slice of a batch gets a version counter of its own: with the batch's, a forward that writes to its
slice in place would look to autograd as if it had written to those of all other micro-batches. But
then autograd misses the caller's own write to the batch as well, by a loader that fills the same
buffer between ``pipe(x)`` and ``backward()``. So the versions are compared before each backward,
and a write to the batch is counted on the slices too. Whether it matters is left to autograd, as in
the plain loop: it raises an error where the values were saved, and nowhere else.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..._torch.tensors import storage_of, version_of


class InputSlices:
    """The inputs of one run that are the caller's memory, and not copies of it."""

    def __init__(self) -> None:
        # Each as it was given, its version, and what has been cut off from its versions.
        self._taken: list[tuple[Tensor, int, Tensor | None]] = []
        self.written: list[Tensor] = []
        """Those that the caller has written to since, as they were given to the run."""

    def take(self, given: Tensor, value: Tensor, *, watches: bool) -> Tensor:
        """Return an input as the run has it: a slice of more memory is cut off from the versions of
        the rest.

        Args:
            given: the tensor that the run was given; it shares its version with the caller's.
            value: the same where it is read, an alias or a copy.
            watches: whether a backward may need the values.
        """
        if value.layout is not torch.strided:
            return value
        is_slice = value.nbytes < value.untyped_storage().nbytes()
        own = value.data if is_slice else value
        if watches and given.layout is torch.strided and storage_of(given) == storage_of(own):
            self._taken.append((given, version_of(given), own if is_slice else None))
        return own

    def finish_forward(self) -> None:
        """Note the versions that the forward leaves, which may have written to a whole tensor."""
        for at, (given, _, own) in enumerate(self._taken):
            if own is None:
                self._taken[at] = given, version_of(given), None

    def notice_writes(self) -> None:
        """Have autograd know of the caller's writes."""
        for at, (given, version, own) in enumerate(self._taken):
            now = version_of(given)
            if now != version:
                self._taken[at] = given, now, own
                self.written.append(given)
                if own is not None:
                    increment_version(own)

    def forget(self) -> None:
        """Release the inputs: nothing reads them any more."""
        self._taken.clear()
