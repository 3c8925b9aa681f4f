"""One micro-batch in a step: its forward, and its backward actions.

In: the state of the step, and a micro-batch. Out: its loss and outputs without graphs; gradients in
``.grad``. Read first: ``forward``. ``observed`` calls observers, and ``failure_notes`` adds to an
error the micro-batch, the stage and the user's line.
"""
