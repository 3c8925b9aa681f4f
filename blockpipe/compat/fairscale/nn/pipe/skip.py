"""Skip connections by name: :mod:`blockpipe.compat.torchgpipe.skip` under fairscale's path."""

from ....torchgpipe.skip import Namespace, Skippable, pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "Skippable", "pop", "skippable", "stash", "verify_skippables"]
