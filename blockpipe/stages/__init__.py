"""The user's stages: marks in a forward, or a plan as data.

In: ``with Block``, ``BeginBlock``, a plan's entries or its one-line text. Out: a cursor, which has
the stage that a forward is on, and :class:`StagePlan`. Read first: ``marks`` and ``cursor``, then
``plan`` (without torch).
"""
