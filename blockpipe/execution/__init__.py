"""One step: micro-batches out and back over the lanes.

In: what was prepared, micro-batches and their weights, a schedule. Out: gradients in ``.grad``,
losses and outputs. Read first: ``step_runner``, where users' calls arrive; then ``step`` and
``lanes``. An observer is called in ``step``, and in ``observed`` for what a forward reports.
"""
