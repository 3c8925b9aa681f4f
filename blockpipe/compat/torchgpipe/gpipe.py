"""``GPipe``: a pipeline of a sequential module and its balance.

The layers are put into one ``nn.Sequential`` for each partition, as in torchgpipe, and the
pipeline's model is the row of these. So the keys of a ``state_dict`` are torchgpipe's, with nothing
to rename when it is saved or loaded. The user's module is left unmarked, and may be wrapped again
with another balance.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import nn

from ..._common.callsite import remembers_caller, users_line
from ..._common.checks import expected, is_integer
from ..._common.hints import knows_other_names
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
    """A row of partitions, each of them a stage.

    Args:
        module: the module whose layers are distributed.
        balance: the number of layers in each partition.
    """

    def __init__(self, module: nn.Sequential, balance: list[int]) -> None:
        super().__init__()
        layers = iter(zip(children_of(module), module, strict=True))
        self.partitions = nn.ModuleList(
            nn.Sequential(OrderedDict(islice(layers, size))) for size in balance
        )
        for stage, partition in enumerate(self.partitions):
            if stage:  # a forward begins on stage 0, and a mark costs each micro-batch a hook
                BeginBlock(partition, stage)
        for container in (self, self.partitions, *self.partitions):
            container.training = module.training  # not their layers', which have modes of their own

    def forward(self, input: Any) -> Any:
        """One partition after the other.

        Args:
            input: the first layer's argument.

        Returns:
            The last layer's result.
        """
        for partition in self.partitions:
            output = partition(input)
            if output is input:  # nothing has run here, but each stage needs an operation
                output = map_tensors(torch.clone, input)
            input = output
        return input


class GPipe(Pipeline):
    """A sequential module as a pipeline, in torchgpipe's words.

    It is a :class:`blockpipe.Pipeline`, so it also has ``forward_backward``, ``summary``,
    ``verify``, ``profile``, and a pipeline's options as attributes (``model.schedule = "gpipe"``).

    Args:
        module: an ``nn.Sequential`` without a ``forward`` or hooks of its own. Its layers may share
            parameters, and a layer may be there several times.
        balance: the number of layers in each partition.
        devices: a device for each partition, by number or name; further ones are not used. ``None``
            takes all accelerators, or the CPU for each partition if there is none.
        chunks: the number of micro-batches that a batch is split into.
        checkpoint: the micro-batches that are recomputed: ``"always"``, ``"except_last"`` (all but
            the last one of the batch at hand), ``"never"``. A call is recomputed if that saves
            memory.
        deferred_batch_norm: whether batch norm's running statistics are those of the whole batch.

    Attributes:
        balance: the number of layers in each partition, a list.
        devices: the device of each partition.
        chunks: the argument; it may be assigned.
        checkpoint: the argument; it may be assigned.

    Input and output are a tensor or a tuple of tensors with the batch on dim 0, or any other value
    that :class:`blockpipe.Pipeline` splits and joins. In ``state_dict`` layer ``i`` of partition
    ``j`` is ``partitions.j.i``.

    Raises:
        BalanceError: there is no balance, or it does not fit the module.
        TooFewDevicesError: there are fewer devices than partitions.
        PlanError: an option is invalid.
        UsageError: ``module`` is not an ``nn.Sequential``; stashes and pops do not match (see
            :func:`~blockpipe.compat.torchgpipe.skip.verify_skippables`); later, the pipeline is
            moved to a device.

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
    @knows_other_names(
        micro_batches="pass chunks=",
        num_microbatches="pass chunks=",
        device="pass devices=, one for each partition",
        schedule="a GPipe has one; pass it to blockpipe.Pipeline",
    )
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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layers as a pipeline; the result is differentiable.

        Args:
            args: the first layer's argument.
            kwargs: the same by its name, ``input``.

        Returns:
            The last layer's result, on ``devices[-1]``.

        Raises:
            UsageError: it is not one argument, or there is no tensor in it.
        """
        contract = "a tensor or a tuple of tensors"
        given = (*args, *kwargs.values())
        if len(given) != 1 or not kwargs.keys() <= {"input"}:
            named = f" and {sorted(kwargs)} by name" if kwargs else ""
            raise UsageError(
                f"expected one argument, {contract} for input, got {len(args)} by position{named} "
                f"({users_line()}); write model(x), or model((a, b)) for several tensors"
            )
        if next(tensors(given[0]), None) is None:
            raise UsageError(expected(contract, given[0], for_="input"))
        return super().forward(*given)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load as :meth:`blockpipe.Pipeline.load_state_dict`, by torchgpipe's names.

        Raises:
            WeightsError: every name and shape that does not fit.
            UsageError: the names are those of the plain module.
        """
        plain = {name.split(".", 2)[2] for name in self.module.state_dict()}
        if isinstance(state_dict, Mapping) and plain and plain <= state_dict.keys():
            name = min(plain)
            raise UsageError(
                f"expected names with a partition, as in torchgpipe, got those of the plain module "
                f"for state_dict, such as {name!r} ({users_line()}); load it into the module that "
                "this GPipe was made of, whose layers these are: module.load_state_dict(…)"
            )
        return super().load_state_dict(state_dict, strict, assign)

    def _check_device(self, device: torch.device) -> NoReturn:
        """Refuse every move, as torchgpipe does: to the device that all partitions are on, too."""
        raise UsageError(
            f"expected no device to move a {type(self).__name__} to, got {str(device)!r} "
            f"({users_line()}): its partitions have devices of their own; leave the call out"
        )

    @property
    def partitions(self) -> nn.ModuleList:
        """The partitions, each an ``nn.Sequential`` of its layers."""
        model = self.module
        assert isinstance(model, Partitions)
        return model.partitions

    def __len__(self) -> int:
        """Return the number of layers."""
        return sum(len(layers) for layers in self._sequentials())

    def __getitem__(self, index: int) -> nn.Module:  # type: ignore[override]
        """Return a layer by its position in the whole module."""
        return list(self)[index]

    def __iter__(self) -> Iterator[nn.Module]:
        """Yield the layers in their order."""
        for layers in self._sequentials():
            yield from layers

    def _sequentials(self) -> Iterator[nn.Sequential]:
        for partition in self.partitions:
            assert isinstance(partition, nn.Sequential)
            yield partition


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Sequential):
        fix = (
            "mark the stages of any other model with blockpipe.begin_blocks, or find them with "
            "blockpipe.balance, and pass it to blockpipe.Pipeline"
        )
        raise UsageError(expected("an nn.Sequential", module, for_="module", fix=fix))
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
    fix = "find one with blockpipe.compat.torchgpipe.balance"
    sizes = [_as_number(size) for size in balance] if isinstance(balance, Iterable) else None
    if sizes is None or not all(is_integer(size, 1) for size in sizes):
        contract = "a list of positive integers, the number of layers in each partition,"
        raise BalanceError(expected(contract, balance, for_="balance", fix=fix))
    if sum(sizes) != len(module):
        contract = f"numbers that add up to the module's {len(module)} layers"
        raise BalanceError(expected(contract, sizes, for_="balance", fix=fix))
    return sizes


def _devices(devices: Iterable[Device] | None, count: int) -> list[Device]:
    if devices is None:
        found: list[Device] = [*(default_devices() or [torch.device("cpu")] * count)]
    else:
        found = [devices] if isinstance(devices, str | int | torch.device) else list(devices)
    if len(found) < count:
        raise TooFewDevicesError(
            f"expected a device for each of {count} partitions, got {len(found)} for devices "
            f"({users_line()}); name a device several times, or make fewer partitions"
        )
    return found[:count]


def _as_number(number: Any) -> Any:
    """Return ``42`` for ``42.0``, as torchgpipe does, and anything else as it is."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _checked_checkpoint(checkpoint: str) -> str:
    if checkpoint not in CHECKPOINTS:
        contract = f"one of {', '.join(map(repr, CHECKPOINTS))}"
        raise PlanError(expected(contract, checkpoint, for_="checkpoint"))
    return checkpoint
