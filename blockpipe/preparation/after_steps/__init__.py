"""What a step does after it is over, where it did what no recording has seen.

Comes in: the values that it has set (``second_looks``) and the code that it has run
(``second_paths``), its micro-batches, and what records one of them. Goes out: a ``StateError`` if a
recording of such a micro-batch shows that stages share state. Start with ``second_looks``.
"""
