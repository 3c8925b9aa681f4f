"""What a forward does, stage by stage: one watched run, and what follows from it.

In: a model and a sample. Out: a :class:`Recording`, plain data. Read first: ``record`` for the way
there, ``recording`` and ``calls`` for what comes out. What is watched: operations and tensors in
``watching``, torch's and the modules' state in ``shared_changes``, the user's other objects in
``outside_state``.
"""
