"""A balance by profiling: :mod:`blockpipe.compat.torchgpipe.balance` under fairscale's path."""

from ....torchgpipe.balance import balance_by_size, balance_by_time

__all__ = ["balance_by_size", "balance_by_time"]
