"""Gradients clipped by the norm over all stages."""

from collections.abc import Iterable

import torch
from torch import Tensor

from .ranks import current_ranks


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip gradients by the norm over those of all stages.

    Args:
        parameters: the model's; under :func:`launch` those of this rank.
        max_norm: the largest norm that is left as it is.
        norm_type: the kind of the norm.
        error_if_nonfinite: whether a norm that is not finite is an error.

    Returns:
        The norm before, 0-d.

    Source: ``torchdistpackage.parallel.clip_grad_parallel``. That one adds up the stages' norms,
    which is larger than the norm of the whole; this one is the whole's.

    Example:
        >>> import torch
        >>> from blockpipe.compat.torchdistpackage import clip_grad_norm_
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_([weight], 1.0), weight.grad
        (tensor(5.), tensor([0.6000, 0.8000]))
    """
    own = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    ranks = current_ranks()

    def clip(of_ranks: list[list[Tensor]]) -> Tensor:
        together = [parameter for of_rank in of_ranks for parameter in of_rank]
        return torch.nn.utils.clip_grad_norm_(together, max_norm, norm_type, error_if_nonfinite)

    return clip([own]) if ranks is None else ranks.meet("clip_grad_norm_", own, clip)
