"""Which process has trained a tensor, where several pipelines have had one model.

A pipeline leaves in each process what its own stages have trained, and for the others the values of
before. The next pipeline of the model, cut elsewhere or over an encoder that both share, would take
those for its own. So the processes say whose each tensor was, and send what another one reads now.
A pipeline alone has nothing to do with this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..._common.callsite import users_line
from ..._torch.tensors import version_of
from ...errors import UsageError
from ..rank_failures.failures import Failures
from ..stage_values import StageValues

_KNOWN, _OWN, _WRITTEN, _HAS_GRADIENT, _READS = (1 << bit for bit in range(5))


@dataclass
class _Home:
    """Whose a tensor was when a pipeline ran last.

    Attributes:
        pipeline: the pipeline's.
        is_own: whether one of the stages in this process has it there.
        version: counts the writes before.
    """

    pipeline: object
    is_own: bool
    version: int


class _Homes:
    """Those of this process's tensors, whichever models have them."""

    def __init__(self) -> None:
        self.of = WeakIdKeyDictionary()
        self.changes = 0


_homes = _Homes()


def is_known(model: nn.Module) -> bool:
    """Return whether another pipeline has had a part of the model before."""
    return any(tensor in _homes.of for _, tensor in _named(model))


class ValueHomes:
    """The tensors of one pipeline's model, as it has them.

    Args:
        model: the model.
        values: those of this process's stages.
        group: the processes; ``None`` takes all of them.
        device: of the tensors that are exchanged.
        failures: what reaches the other processes.
    """

    def __init__(
        self,
        model: nn.Module,
        values: StageValues,
        group: dist.ProcessGroup | None,
        device: torch.device,
        failures: Failures,
    ) -> None:
        self._model = model
        self._values = values
        self._group = group
        self._device = device
        self._failures = failures
        self._me = object()
        self._seen = -1  # of the changes
        self._note()

    def are_elsewhere(self) -> bool:
        """Return whether another pipeline has had some of the tensors since."""
        if self._seen != _homes.changes:
            found = (_homes.of.get(tensor) for _, tensor in _named(self._model))
            if any(home is not None and home.pipeline is not self._me for home in found):
                return True
            self._seen = _homes.changes
        return False

    def _note(self) -> None:
        """Note that this pipeline has them now."""
        own = self._own()
        for _, tensor in _named(self._model):
            _homes.of[tensor] = _Home(self._me, id(tensor) in own, version_of(tensor))
        _homes.changes += 1
        self._seen = _homes.changes

    def _own(self) -> set[int]:
        return {id(tensor) for tensor in (*self._values.parameters(), *self._values.buffers())}

    @torch.no_grad()
    def take(self, words: list[int], *, backward: bool = False) -> None:
        """Take what other processes have trained; all of them call it together.

        Args:
            words: what :func:`words_of` has said of the tensors, before this pipeline noted them.
            backward: whether gradients are asked for.

        Raises:
            UsageError: in all processes, if there is no one true value or gradient.
        """
        self._failures.is_agreed = False
        refusal = self._taken(words, backward=backward)
        self._failures.is_agreed = True
        if refusal:
            self._failures.began = False  # all know of it, and can go on
            raise UsageError(f"{refusal} ({users_line()}); {_REMEDY}")
        self._note()

    def _taken(self, words: list[int], *, backward: bool) -> str:
        """Return what is wrong, with the same words in all processes."""
        own, named = self._own(), _named(self._model)
        words = [word | _READS * (id(t) in own) for word, (_, t) in zip(words, named, strict=True)]
        given = torch.tensor(words, device=self._device)
        rows = [torch.empty_like(given) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(rows, given, group=self._group)
        columns = [*zip(*(row.tolist() for row in rows), strict=True)]
        moved = [at for at, column in enumerate(columns) if any(map(_is_taken, column))]
        homes = {at: _homes_of(named[at][1], columns[at]) for at in moved}
        for at in moved:
            refusal = _refusal(named[at][0], columns[at], homes[at], backward=backward)
            if refusal:
                return refusal
        differs = torch.zeros(len(named), dtype=torch.int32, device=self._device)
        for at in moved:
            differs[at] = self._receive(named[at][1], homes[at][0], columns[at])
        dist.all_reduce(differs, dist.ReduceOp.MAX, group=self._group)
        names = (name for (name, _), differ in zip(named, differs.tolist(), strict=True) if differ)
        found = next(names, "")
        return found and (
            f"expected {found!r} to be trained in one process, got two pipelines that have it on "
            "different ranks, and other values on each"
        )

    def _receive(self, tensor: Tensor, home: int, column: Sequence[int]) -> bool:
        """Send a tensor from its home to all; returns whether this process has written another."""
        rank = dist.get_rank(self._group)
        value = tensor.detach().to(self._device).contiguous() if rank == home else torch.empty(0)
        if rank != home:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source = home if self._group is None else dist.get_global_rank(self._group, home)
        dist.broadcast(_bytes_of(value), source, group=self._group)
        if not _is_taken(column[rank]):
            return False
        if not column[rank] & _WRITTEN:
            tensor.detach().copy_(value)
            return False
        is_other = not torch.equal(*map(_bytes_of, (value.to(tensor.device), tensor.detach())))
        return is_other and bool(column[home] & _WRITTEN)  # else it was loaded here since


def words_of(model: nn.Module) -> list[int]:
    """Return what this process knows of each tensor of a model, for :meth:`ValueHomes.take`."""
    found = []
    for _, tensor in _named(model):
        home, word = _homes.of.get(tensor), 0
        if home is not None:
            word = _KNOWN | _OWN * home.is_own | _WRITTEN * (version_of(tensor) != home.version)
        has_gradient = tensor.requires_grad and tensor.is_leaf and tensor.grad is not None
        found.append(word | _HAS_GRADIENT * has_gradient)
    return found


_REMEDY = (
    "cut both at the same modules (plan=…), or train one after the other: with its step and its "
    "zero_grad() before the other's begins"
)


def _is_taken(word: int) -> bool:
    """Whether a process reads what has been another one's."""
    return bool(word & _READS and word & _KNOWN) and not word & _OWN


def _homes_of(tensor: Tensor, column: Sequence[int]) -> list[int]:
    """Return the ranks that have the true value of a tensor."""
    homes = [rank for rank, word in enumerate(column) if word & _OWN]
    if not homes and not isinstance(tensor, nn.Parameter):  # a forward has replaced the buffer
        homes = [rank for rank, word in enumerate(column) if not word & _KNOWN]
    return homes


def _refusal(name: str, column: Sequence[int], homes: list[int], *, backward: bool) -> str:
    if not homes:
        return (
            f"expected the trained values of {name!r} on a rank of this pipeline, got a model that "
            "another pipeline has trained on other ones"
        )
    left = [rank for rank in homes if column[rank] & _HAS_GRADIENT and not column[rank] & _READS]
    if left and backward:
        return (
            f"expected no gradient of {name!r} on rank {left[0]}, where another pipeline has it, "
            "got one, which this step's would not be added to"
        )
    return ""


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's memory; gloo sends no int16 and no float8, and torch compares no float8."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the tensors with values or not, in an order that is the same in every process."""
    return [*model.named_parameters(), *model.named_buffers()]
