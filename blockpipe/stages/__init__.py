"""How a user says which stage: marks in a forward, or a plan as data.

In: ``with Block``, ``BeginBlock``, a plan's entries or its one-line text. Out: a cursor that says
where a forward is, and :class:`StagePlan`. Read first: ``marks``, then ``plan`` (without torch).
"""
