"""What a forward does, stage by stage: one watched run, and what follows from it.

In: a model and a sample. Out: a :class:`Recording`, plain data. Read first: ``record`` for the way
there, ``recording`` for what comes out, ``recorder`` for what is written down on the way.
"""
