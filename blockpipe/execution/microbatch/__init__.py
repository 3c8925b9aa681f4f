"""One micro-batch in a step: its forward, and its backward actions.

In: the state of the step, and a micro-batch. Out: its loss and outputs without graphs; gradients in
``.grad``. Read first: ``forward``.
"""
