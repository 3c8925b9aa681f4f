"""An ``nn.Sequential`` marked by the number of children of each stage, as in torchgpipe."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import nn

from .._common.callsite import users_line
from .._common.checks import expected, is_integer
from .._torch.modules import children_of
from ..errors import PlanError
from .marks import begin_blocks
from .plan import StagePlan


def mark_sequential(net: nn.Sequential, sizes: Sequence[int]) -> nn.Sequential:
    """Mark an ``nn.Sequential`` so that each stage has a given number of its children.

    Args:
        net: the net to mark, in place.
        sizes: the number of children of each stage, as :func:`partition_uniform` and
            :func:`partition_balanced` return them; torchgpipe's ``balance``.

    Returns:
        The same net.

    Raises:
        PlanError: ``net`` is not an ``nn.Sequential``; the sizes are not positive integers, or do
            not add up to its length; a stage would begin with a module that the net has twice.
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
        fix = "cut other models with balance()"
        raise PlanError(expected("an nn.Sequential", net, for_="net", fix=fix))
    if not isinstance(sizes, Sequence) or not all(is_integer(size, 1) for size in sizes):
        is_plan = isinstance(sizes, StagePlan)
        fix = "pass a plan without marks: Pipeline(net, plan=plan)" if is_plan else ""
        raise PlanError(expected("a list of positive integers", sizes, for_="sizes", fix=fix))
    if sum(sizes) != len(net):
        contract = f"sizes that add up to {len(net)}, the number of children,"
        fix = "see partition_uniform and partition_balanced"
        raise PlanError(expected(contract, list(sizes), fix=fix))
    children = list(net)
    names = list(children_of(net))
    begins = list(accumulate(sizes))[:-1]
    for at in begins:
        if sum(child is children[at] for child in children) > 1:
            raise PlanError(
                f"a stage would begin with {names[at]!r}, a module that the net has several times, "
                f"and its mark would begin the stage at each of them ({users_line()}); use other "
                "sizes, or balance(), whose plan distinguishes calls"
            )
    begin_blocks(net, {names[at]: stage for stage, at in enumerate(begins, 1)})
    return net
