"""Undo what a forward writes to parameters, or, while it runs on fake tensors, to any real one."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.modes import DispatchMode
from .._torch.tensors import (
    FakeTensor,
    normalizes_batches,
    put_back,
    storage_of,
    unset_fake_temporarily,
    updated_statistics,
    version_of,
    written_by,
)


class _Undone(DispatchMode):
    """Restore watched tensors at the end of a block in which they may be written to.

    A tensor is copied just before it is written to, so a forward that writes to none of them needs
    no memory for it.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copies: list[tuple[Tensor, Tensor, int]] = []

    def watched(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor to copy before a tensor is written to, or ``None``."""
        raise NotImplementedError

    def watched_sparse(self, _: Tensor) -> Tensor | None:
        """Return the same of a tensor without a storage."""
        return None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written = updated_statistics if normalizes_batches(func) else written_by
        for value in written(func, args, kwargs):
            self._keep(value)
        return func(*args, **kwargs)

    def _keep(self, value: Any) -> None:
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(tensor, Tensor):
                continue
            is_plain = tensor.layout is torch.strided
            watched = self.watched(tensor) if is_plain else self.watched_sparse(tensor)
            if watched is not None:
                with unset_fake_temporarily():
                    copied = watched, watched.detach().clone(), version_of(watched)
                    self._copies.append(copied)

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        with unset_fake_temporarily():
            for copied in reversed(self._copies):
                put_back(*copied)


class RealWritesUndone(_Undone):
    """Undo a forward's writes to real tensors while it runs on fake ones. torch computes some
    in-place operations on them even then (``self.count += 1``, where ``count`` is a plain
    attribute)."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[Any, ...]] = set()

    def watched(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor that is not fake, the first time."""
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            return None
        return self._first(
            tensor, (storage_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
        )

    def watched_sparse(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor that is not fake, the first time."""
        is_fake = isinstance(tensor, FakeTensor) or tensor.is_meta
        return None if is_fake else self._first(tensor, (id(tensor),))  # it is kept until the end

    def _first(self, tensor: Tensor, key: tuple[Any, ...]) -> Tensor | None:
        if key in self._seen:
            return None
        self._seen.add(key)
        return tensor


class WritesUndone(_Undone):
    """Undo the writes to parameters, to their gradients, and to other tensors.

    Args:
        model: the model that has the parameters.
        others: the other tensors.
    """

    def __init__(self, model: nn.Module, others: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._parameters = [(p, p.data, p.grad) for p in model.parameters()]
        self._others = [*others]
        self._watched = {
            storage_of(tensor): tensor
            for tensor in self._tensors()
            if tensor.layout is torch.strided and not tensor.is_meta
        }

    def _tensors(self) -> Iterator[Tensor]:
        for parameter, data, gradient in self._parameters:
            if not parameter.is_inference():
                yield data
            if gradient is not None:
                yield gradient
        yield from self._others

    def watched(self, tensor: Tensor) -> Tensor | None:
        """Return the parameter or gradient that a tensor is a view of, the first time."""
        return self._watched.pop(storage_of(tensor), None)

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        for parameter, data, gradient in self._parameters:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data
            parameter.grad = gradient
