"""Write the calls of a forward's glue, the code between sealed modules, on a tape.

In: a forward and its recording. Out: a ``Tape``, which is cut into stages and replayed. Read
``tape.py`` first, which has the data; ``taping.py`` runs the forward, and ``mode.py`` writes the
tape. Code that a tape cannot hold is refused in ``mode.py`` and ``left_behind.py``;
``watched_model.py`` notices when it would do something else than was taped.
"""
