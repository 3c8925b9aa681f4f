"""``GPipe``: a sequential module and its balance, as a pipeline.

The layers are put into one ``nn.Sequential`` for each partition, as torchgpipe does it, and the
pipeline's model is the row of these: so the keys of a ``state_dict`` are torchgpipe's by
themselves, with nothing to rename on the way in or out. The user's module is left unmarked, and may
be wrapped again with another balance.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn

from ..._common.callsite import remembers_caller, users_line
from ..._common.nested import map_tensors, tensors
from ..._torch.modules import children_of, forward_hooks_of, forward_pre_hooks_of
from ...devices.devices import default_devices
from ...errors import PlanError, UsageError
from ...pipeline import Pipeline
from ...preparation.options import CHECKPOINTS
from ...stages.marks import BeginBlock
from .skip import verify_skippables

Device = torch.device | int | str


class BalanceError(PlanError):
    """A balance that does not fit the module. A ``ValueError``, as in torchgpipe."""


class TooFewDevicesError(PlanError, IndexError):
    """More partitions than devices. An ``IndexError``, as in torchgpipe."""


class Partitions(nn.Module):
    """A row of partitions, each a stage.

    Args:
        module: whose layers they have.
        balance: how many layers each has, adding up to their number.
    """

    def __init__(self, module: nn.Sequential, balance: list[int]) -> None:
        super().__init__()
        layers = iter(zip(children_of(module), module, strict=True))
        self.partitions = nn.ModuleList(
            nn.Sequential(OrderedDict(islice(layers, size))) for size in balance
        )
        for stage, partition in enumerate(self.partitions):
            BeginBlock(partition, stage)
        for container in (self, self.partitions, *self.partitions):
            container.training = module.training  # not their layers', which have modes of their own

    def forward(self, input: Any) -> Any:
        """One partition after the other.

        Args:
            input: what the first layer takes.

        Returns:
            What the last layer gives.
        """
        for partition in self.partitions:
            output = partition(input)
            if output is input:  # nothing has run, but a stage without an operation is none
                output = map_tensors(torch.clone, input)
            input = output
        return input


class GPipe(Pipeline):
    """A sequential module as a pipeline, in torchgpipe's words.

    Everything that :class:`blockpipe.Pipeline` has is there too: ``forward_backward``, ``summary``,
    ``verify``, ``profile``, and its options as attributes (``model.schedule = "gpipe"``).

    Args:
        module: an ``nn.Sequential`` without a ``forward`` or hooks of its own. Its layers may share
            parameters, and be there several times.
        balance: the number of layers in each partition.
        devices: one for each partition, by number or name; more are left over. ``None``: all
            accelerators, or the CPU for each partition where there is none.
        chunks: into how many micro-batches a batch is split.
        checkpoint: which micro-batches are recomputed: ``"always"``, ``"except_last"`` (all that
            there are but the last), ``"never"``. A call is recomputed where that saves memory.
        deferred_batch_norm: whether batch norm's running statistics are those of the whole batch.

    Attributes:
        balance: as given, a list.
        devices: one for each partition.
        chunks: as given; may be assigned.
        checkpoint: as given; may be assigned.

    Input and output are a tensor or a tuple of tensors with the batch on dim 0, or whatever else
    :class:`blockpipe.Pipeline` splits and joins. In ``state_dict`` layer ``i`` of partition ``j``
    is ``partitions.j.i``.

    Raises:
        BalanceError: no balance, or one that does not fit.
        TooFewDevicesError: fewer devices than partitions.
        PlanError: an invalid option.
        UsageError: no ``nn.Sequential``; stashes and pops that do not match (see
            :func:`~blockpipe.compat.torchgpipe.skip.verify_skippables`); later, a move to a device.

    Source: ``torchgpipe.GPipe``, whose paper is "GPipe" by Huang et al., 2019.

    Example:
        >>> import torch
        >>> from blockpipe.compat.torchgpipe import GPipe
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> model = GPipe(net, balance=[2, 1], devices=["cpu", "cpu"], chunks=2)
        >>> model(torch.ones(4, 4)).mean().backward()
        >>> len(model), model.balance, list(model.state_dict())[0]
        (3, [2, 1], 'partitions.0.0.weight')
    """

    @remembers_caller
    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        _check_module(module)
        sizes = _checked_balance(module, balance)
        verify_skippables(module)
        super().__init__(
            Partitions(module, sizes),
            devices=_devices(devices, max(len(sizes), 1)),
            chunks=_as_number(chunks),
            checkpoint=_checked_checkpoint(str(checkpoint)),
            deferred_batch_norm=bool(deferred_batch_norm),
            batch_dims={0: 0} if sizes else None,  # a tuple's tensors have the batch on dim 0, all
        )
        self.balance = sizes
        self.training = module.training

    def forward(self, input: Any) -> Any:
        """The layers, pipelined and differentiable.

        Args:
            input: what the first layer takes.

        Returns:
            What the last layer gives, on ``devices[-1]``.

        Raises:
            UsageError: no tensor in the input.
        """
        if next(iter(tensors(input)), None) is None:
            raise UsageError(
                f"expected a tensor or a tuple of tensors, got {type(input).__name__} "
                f"({users_line()})"
            )
        return super().forward(input)

    @property
    def partitions(self) -> nn.ModuleList:
        """An ``nn.Sequential`` of each partition's layers."""
        model = self.module
        assert isinstance(model, Partitions)
        return model.partitions

    def __len__(self) -> int:
        """The number of layers."""
        return sum(len(layers) for layers in self._sequentials())

    def __getitem__(self, index: int) -> nn.Module:  # type: ignore[override]
        """A layer, by its position in the whole module."""
        return list(self)[index]

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers, in their order."""
        for layers in self._sequentials():
            yield from layers

    def _sequentials(self) -> Iterator[nn.Sequential]:
        for partition in self.partitions:
            assert isinstance(partition, nn.Sequential)
            yield partition


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Sequential):
        raise UsageError(
            f"expected an nn.Sequential to be partitioned, got {type(module).__name__} "
            f"({users_line()}); mark the stages of any other model with blockpipe.begin_blocks, "
            "or find them with blockpipe.balance, and pass it to blockpipe.Pipeline"
        )
    own = "a forward" if type(module).forward is not nn.Sequential.forward else None
    if own is None and (forward_pre_hooks_of(module) or forward_hooks_of(module)):
        own = "hooks"
    if own is not None:
        raise UsageError(
            f"expected an nn.Sequential that only calls its layers, got {type(module).__name__} "
            f"with {own} of its own ({users_line()}), which no partition would run; use "
            "blockpipe.mark_sequential and blockpipe.Pipeline, which do"
        )


def _checked_balance(module: nn.Sequential, balance: Iterable[int] | None) -> list[int]:
    remedy = "blockpipe.compat.torchgpipe.balance finds one"
    if balance is None:
        raise BalanceError(f"expected a balance, got none ({users_line()}); {remedy}")
    sizes = [_as_number(size) for size in balance] if isinstance(balance, Iterable) else None
    if sizes is None or not all(type(size) is int and size >= 1 for size in sizes):
        raise BalanceError(
            f"expected a balance of whole numbers from 1 on, got {balance!r} ({users_line()}); "
            f"{remedy}"
        )
    if sum(sizes) != len(module):
        raise BalanceError(
            f"expected a balance that adds up to the module's {len(module)} layers, got {sizes}, "
            f"which makes {sum(sizes)} ({users_line()}); {remedy}"
        )
    return sizes


def _devices(devices: Iterable[Device] | None, count: int) -> list[Device]:
    if devices is None:
        found: list[Device] = [*(default_devices() or [torch.device("cpu")] * count)]
    else:
        found = [devices] if isinstance(devices, str | int | torch.device) else list(devices)
    if len(found) < count:
        raise TooFewDevicesError(
            f"expected a device for each of {count} partitions, got {len(found)} "
            f"({users_line()}); name a device several times, or make fewer partitions"
        )
    return found[:count]


def _as_number(number: Any) -> Any:
    """``42.0`` as ``42``; what is no whole number is left to be refused."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _checked_checkpoint(checkpoint: str) -> str:
    if checkpoint not in CHECKPOINTS:
        raise PlanError(
            f"expected a checkpoint mode of {', '.join(CHECKPOINTS)}, got {checkpoint!r} "
            f"({users_line()})"
        )
    return checkpoint
