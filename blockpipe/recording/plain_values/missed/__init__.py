"""What the recorded micro-batch did not run, and another one may.

In: the frames of a forward when they are over. Read first: ``missed_branches``, which decides what
counts; ``missed_calls`` finds the functions that such code would call.
"""
