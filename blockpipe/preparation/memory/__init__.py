"""The memory of each stage: predicted from a recording, measured in a step, and reported.

In: what is prepared for a kind of call, and an optimizer. Out: a
:class:`~blockpipe.reports.MemoryReport`. Read first: ``model``, which predicts; ``measured`` counts
the tensors of a running step, ``report`` shows both, and ``suggestions`` says what would need less.
"""
