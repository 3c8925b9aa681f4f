"""A ``Pipeline`` in each of several processes, each with a share of every batch.

In: a pipeline whose stages are all in one process. Out: one gradient of all shares. Read
``replicated.py``, then ``stage_sums.py``.
"""
