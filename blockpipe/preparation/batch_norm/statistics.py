"""Statistics of samples, for each channel, that can be merged.

The obvious way adds up sums and sums of squares. Their difference, the variance, cancels where the
mean is large: at a mean of 1e4 and a variance of 1 nothing of it is left in float32. Here each
micro-batch is centered before it is squared, and micro-batches are merged by their means and
squared distances.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class BatchStatistics(NamedTuple):
    """Statistics of some samples, for each channel, that can be merged with those of others.

    ``mean`` and ``squares`` (the sum of squared distances from the mean) have shape
    ``[channels]``, in double precision where the device has it.
    """

    samples: int
    mean: Tensor
    squares: Tensor

    @property
    def variance(self) -> Tensor:
        """The unbiased variance."""
        return self.squares / max(self.samples - 1, 1)


def statistics(x: Tensor) -> BatchStatistics:
    """Compute the statistics of a tensor of shape ``[batch, channels, ...]``.

    Nothing of the tensor's size is made in double precision: after the rounded mean was subtracted
    the rest is small, so that single precision holds it well.
    """
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    double = torch.float32 if x.device.type == "mps" else torch.float64
    dims = [dim for dim in range(x.dim()) if dim != 1]
    samples = x.numel() // x.shape[1]
    mean = x.mean(dims, keepdim=True, dtype=wide)
    centered = x - mean
    rest = centered.mean(dims).to(double)
    squares = centered.square_().sum(dims).to(double)
    return BatchStatistics(
        samples, mean.flatten().to(double) + rest, squares - samples * rest.square()
    )


def merged(parts: list[BatchStatistics]) -> BatchStatistics:
    """Merge the statistics of parts into those of all their samples.

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances" (1979).
    """
    samples, mean, squares = parts[0]
    for more in parts[1:]:
        total = samples + more.samples
        distance = more.mean - mean
        mean = mean + distance * (more.samples / total)
        squares = squares + more.squares + distance.square() * (samples * more.samples / total)
        samples = total
    return BatchStatistics(samples, mean, squares)


def moved(running: Tensor, value: Tensor, factor: float | Tensor) -> Tensor:
    """Return a running statistic, moved toward a batch's by a factor."""
    return running.to(value).lerp_(value, factor)
