"""An ``nn.Sequential`` marked by how many of its children each stage has, as torchgpipe has it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import nn

from .._common.callsite import users_line
from .._torch.modules import children_of
from ..errors import PlanError
from .marks import begin_blocks
from .plan import StagePlan


def mark_sequential(net: nn.Sequential, sizes: Sequence[int]) -> nn.Sequential:
    """Mark an ``nn.Sequential`` so that each stage has so many of its children.

    Args:
        net: is marked, and stays what it is.
        sizes: of the stages, as :func:`partition_uniform` and :func:`partition_balanced` give them;
            torchgpipe's ``balance``.

    Returns:
        The same net.

    Raises:
        PlanError: no ``nn.Sequential``; sizes that are no whole numbers from 1 on, or do not add up
            to its length; a stage that would begin with a module that is there twice.
        MarkError: a module that is to be marked is marked already.

    Source: ``GPipe(module, balance)`` of torchgpipe.

    Example:
        >>> import blockpipe as bp
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> _ = mark_sequential(net, bp.partition_uniform(net, 2))
        >>> net
        Sequential(
          (0): Linear(in_features=4, out_features=8, bias=True)
          (1): ReLU()
          (2): Linear(BeginBlock(stage=1), in_features=8, out_features=4, bias=True)
        )
    """
    if not isinstance(net, nn.Sequential):
        raise PlanError(
            f"mark_sequential takes an nn.Sequential, but {type(net).__name__} came "
            f"({users_line()}); balance() cuts any model"
        )
    if not isinstance(sizes, Sequence) or any(
        not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes
    ):
        if isinstance(sizes, StagePlan):
            raise PlanError(
                f"sizes are whole numbers from 1 on, but a {type(sizes).__name__} came "
                f"({users_line()}); it needs no marks: Pipeline(net, plan=plan)"
            )
        raise PlanError(f"sizes are whole numbers from 1 on, but {sizes!r} came ({users_line()})")
    if sum(sizes) != len(net):
        raise PlanError(
            f"sizes add up to the number of children, {len(net)}, but {list(sizes)} makes "
            f"{sum(sizes)} ({users_line()}); see partition_uniform and partition_balanced"
        )
    children = list(net)
    names = list(children_of(net))
    begins = list(accumulate(sizes))[:-1]
    for at in begins:
        if sum(child is children[at] for child in children) > 1:
            raise PlanError(
                f"a stage begins with {names[at]!r}, which is there several times: a mark would "
                f"count at each of them ({users_line()}); use other sizes, or balance(), whose "
                "plan tells calls apart"
            )
    begin_blocks(net, {names[at]: stage for stage, at in enumerate(begins, 1)})
    return net
