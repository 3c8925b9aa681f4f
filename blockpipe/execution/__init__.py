"""One step: the forwards and backwards of a batch's micro-batches.

In: what was prepared, micro-batches and their weights, a schedule. Out: gradients in ``.grad``,
losses and outputs. Read first: ``step_runner``, where users' calls arrive, then ``step``, which
shows the three ways that a step can take; ``lanes`` and ``microbatch`` are rooms of their own. An
observer is called in ``microbatch`` and in ``plain_loop``.
"""
