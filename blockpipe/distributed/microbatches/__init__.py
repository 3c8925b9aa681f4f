"""One micro-batch on one stage: its random numbers, and what is recomputed.

In: the tensors of the boundary before a stage. Out: those after it, computed with the same numbers
as in one process. Read ``calls.py`` first; ``loss_watch.py`` refuses losses that read what is in
another process.
"""
