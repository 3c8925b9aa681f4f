"""Find what the backwards of earlier micro-batches read of memory that later forwards write to.

In: the tensors that autograd and its hooks save, those that checkpoints will read again, and the
forward's writes. Out: entries of a :class:`Recording`. Read first: ``late_backwards``, which
compares the writes with the reads. ``late_reads`` collects the reads, ``uses_inside`` those uses
that no torch function shows, ``crossed_memory`` what stays behind of what has crossed, ``outputs``
what is returned, and ``lasting_memory`` knows the memory that outlives a forward.
"""
