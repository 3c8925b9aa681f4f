"""One step: micro-batches out and back over the lanes.

In: what was prepared, micro-batches and their weights, a schedule. Out: gradients in ``.grad``,
losses and outputs. Read first: ``step_runner``, what users' calls come to; then ``step`` and
``lanes``.
"""
