"""Which process has trained a tensor, where several pipelines have had one model.

A pipeline leaves in each process what its own stages have trained, and for the others the values of
before. The next pipeline of the model, cut elsewhere or over an encoder that both share, would take
those for its own. So the processes say whose each tensor was, and send what another one reads now.
A pipeline alone has nothing to do with this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..._common.callsite import users_line
from ..._torch.tensors import bytes_of, version_of
from ...errors import UsageError
from ..rank_failures.failures import Failures
from ..stage_values import StageValues

_KNOWN, _OWN, _WRITTEN, _HAS_GRADIENT, _READS, _MISSING = (1 << bit for bit in range(6))
_OTHER, _LACKS = 1, 2  # what is wrong with a tensor where it is read


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


class Word(NamedTuple):
    """What a process says of a tensor that it has: bits, and what another one needs to hold it."""

    bits: int
    shape: torch.Size
    dtype: torch.dtype
    is_buffer: bool


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

    def are_elsewhere_for_any(self) -> bool:
        """Return the same in all processes, which ask together: whether it is so in any of them. A
        pipeline of some of the processes is known to these alone."""
        asked = torch.tensor([self.are_elsewhere()], dtype=torch.int32, device=self._device)
        dist.all_reduce(asked, dist.ReduceOp.MAX, group=self._group)
        return bool(asked.item())

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
    def take(self, words: Mapping[str, Word], *, backward: bool = False) -> None:
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

    def _taken(self, words: Mapping[str, Word], *, backward: bool) -> str:
        """Return what is wrong, with the same words in all processes."""
        own, here = self._own(), dict(_named(self._model))
        said = {
            name: word._replace(bits=word.bits | _READS * (id(here[name]) in own))
            for name, word in words.items()
        }
        rows: list[dict[str, Word]] = [{} for _ in range(dist.get_world_size(self._group))]
        dist.all_gather_object(rows, said, group=self._group)
        # A forward may register a buffer, which the other processes do not have.
        names = [*dict.fromkeys(name for row in rows for name in row)]
        columns = {n: [row[n].bits if n in row else _MISSING for row in rows] for n in names}
        moved = {n: column for n, column in columns.items() if any(map(_is_taken, column))}
        homes = {n: _homes_of(next(row[n] for row in rows if n in row), moved[n]) for n in moved}
        for name, column in moved.items():
            refusal = _refusal(name, column, homes[name], backward=backward)
            if refusal:
                return refusal
        wrong = torch.zeros(len(names), dtype=torch.int32, device=self._device)
        called = self._values.paths()
        for at, name in enumerate(names):
            if name in moved:
                home = homes[name][0]
                value = self._sent(here.get(name), rows[home][name], home)
                wrong[at] = _OTHER * self._receive(here.get(name), value, home, columns[name])
            elif name not in here:
                wrong[at] = _LACKS * (name.rpartition(".")[0] in called)
        dist.all_reduce(wrong, dist.ReduceOp.MAX, group=self._group)
        return next(filter(None, map(_told, names, wrong.tolist())), "")

    def _sent(self, tensor: Tensor | None, word: Word, home: int) -> Tensor:
        """Send a tensor from its home to all, and return it."""
        if tensor is None or dist.get_rank(self._group) != home:
            value = torch.empty(word.shape, dtype=word.dtype, device=self._device)
        else:
            value = tensor.detach().to(self._device).contiguous()
        source = home if self._group is None else dist.get_global_rank(self._group, home)
        dist.broadcast(bytes_of(value), source, group=self._group)
        return value

    def _receive(
        self, tensor: Tensor | None, value: Tensor, home: int, column: Sequence[int]
    ) -> bool:
        """Keep what was sent; returns whether this process has written another value."""
        bits = column[dist.get_rank(self._group)]
        if tensor is None or not _is_taken(bits):
            return False
        if not bits & _WRITTEN:
            tensor.detach().copy_(value)
            return False
        is_other = not torch.equal(*map(bytes_of, (value.to(tensor.device), tensor.detach())))
        return is_other and bool(column[home] & _WRITTEN)  # else it was loaded here since


@contextmanager
def loading(model: nn.Module) -> Iterator[None]:
    """What is written during the block is nobody's but this pipeline's: it has been loaded."""
    before = {id(tensor): version_of(tensor) for _, tensor in _named(model)}
    yield
    for _, tensor in _named(model):
        if before.get(id(tensor)) != version_of(tensor):
            _homes.of.pop(tensor, None)


def words_of(model: nn.Module) -> dict[str, Word]:
    """Return what this process knows of each tensor of a model, for :meth:`ValueHomes.take`."""
    found = {}
    for name, tensor in _named(model):
        home, bits = _homes.of.get(tensor), 0
        if home is not None:
            bits = _KNOWN | _OWN * home.is_own | _WRITTEN * (version_of(tensor) != home.version)
        has_gradient = tensor.requires_grad and tensor.is_leaf and tensor.grad is not None
        bits |= _HAS_GRADIENT * has_gradient
        found[name] = Word(bits, tensor.shape, tensor.dtype, not isinstance(tensor, nn.Parameter))
    return found


_REMEDY = (
    "cut both at the same modules (plan=…), or train one after the other: with its step and its "
    "zero_grad() before the other's begins"
)


def _told(name: str, wrong: int) -> str:
    if wrong == _LACKS:
        return (
            f"expected {name!r} in each process, got a buffer that a forward has registered on the "
            "rank of another pipeline: register it in __init__"
        )
    return (
        ""
        if not wrong
        else (
            f"expected {name!r} to be trained in one process, got two pipelines that have it on "
            "different ranks, and other values on each"
        )
    )


def _is_taken(word: int) -> bool:
    """Whether a process reads what has been another one's."""
    return bool(word & _READS and word & _KNOWN) and not word & _OWN


def _homes_of(word: Word, column: Sequence[int]) -> list[int]:
    """Return the ranks that have the true value of a tensor."""
    homes = [rank for rank, bits in enumerate(column) if bits & _OWN]
    if not homes and word.is_buffer:  # a forward has replaced it
        homes = [rank for rank, bits in enumerate(column) if not bits & (_KNOWN | _MISSING)]
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


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the tensors with values or not, in an order that is the same in every process."""
    return [*model.named_parameters(), *model.named_buffers()]
