"""Models and helpers of several test files."""

from torch.utils.checkpoint import (
    checkpoint,
)

import blockpipe as bp

B = bp.Block


def again(function, *args, **options):
    return checkpoint(function, *args, use_reentrant=False, **options)


def a_closure(s, x):
    """Reads a tensor of another stage that it was not given."""
    with B(0):
        h = s.a(x)
    with B(1):
        y = again(lambda t: s.b(t).tanh() * h, h)
    with B(2):
        return s.c(y) + y
