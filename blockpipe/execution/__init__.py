"""One step: the forwards and backwards of a batch's micro-batches.

In: a prepared model, micro-batches and their weights, a schedule. Out: gradients in ``.grad``,
losses and outputs. Read first: ``step_runner``, where users' calls arrive, then ``step``, which
shows the three ways that a step can take. ``lanes`` has the threads, and ``microbatch`` the actions
of one micro-batch. An observer is called in ``microbatch`` and in ``plain_loop``.
"""
