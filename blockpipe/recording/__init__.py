"""What a forward does, stage by stage: one watched run, and what follows from it.

In: a model and a sample. Out: a :class:`Recording`, plain data. Read first: ``record`` for the way
there, ``recording`` for what comes out. What is watched: operations and tensors in ``recorder``
(with ``watching`` for its parts), torch's and the modules' state in ``shared_changes``, the user's
other objects in ``outside_state``; ``watched_run`` puts them around a forward.
"""
