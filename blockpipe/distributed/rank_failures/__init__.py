"""What becomes of the other processes when one fails, ends or hangs.

In: what this process is doing (``progress.py``), noted by the engine's stages
(``watched_stage.py``) and by a step. Out: an error in every process, which says what happened and
where. Read ``failures.py`` first; ``watch.py`` is the thread that looks after the others, by way of
``board.py``.
"""
