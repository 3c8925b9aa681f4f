"""The lanes of a step: the order of actions, and the threads that run them.

In: a schedule, and functions that run a forward or a backward. Out: all actions have run, or the
first failure. Read first: ``lane_state``, which has no threads, then ``lane_threads``.
"""
