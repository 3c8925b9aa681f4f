"""Deferred batch norm: running statistics of the whole mini-batch, committed once a step.

In: a model. Out: a :class:`~blockpipe.preparation.batch_norm.deferred.DeferredBatchNorm`, whose
``step()`` stands around a step. Read first: ``deferred``, then ``gathered``, which sees torch's
function. ``statistics`` is the arithmetic.
"""
