"""A batch in micro-batches, and their results in one.

In: a call's arguments and target, ``batch_dims``, ``loss_reduction``. Out: micro-batches with
weights, and joined outputs and losses. Read first: ``microbatch``; a new rule for splitting belongs
there, and one for joining in ``joining``.
"""
