"""Split a batch into micro-batches, and join their results.

In: a call's arguments and target, ``batch_dims``, ``loss_reduction``. Out: micro-batches with
weights, and joined outputs and losses. Read first: ``microbatch``; a new rule for splitting is read
from ``batch_dims`` in the module of that name and carried out in ``microbatch``. An argument that
is to be refused belongs in ``unsplittable``, a rule for joining in ``joining``, and what may be
a list of samples or of outputs in ``output_dims``. ``shared_memory`` knows which arguments overlap.
"""
