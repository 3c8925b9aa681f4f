"""A forward as a tape: what its glue, the code between sealed modules, does.

In: a forward and its recording. Out: a ``Tape``, which is cut into stages and replayed. Read
``tape.py`` first, which is the data; ``taping.py`` runs the forward, and ``mode.py`` writes. What a
tape cannot hold is refused in ``mode.py`` and ``left_behind.py``.
"""
