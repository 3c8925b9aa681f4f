"""The lanes of a step: which action begins when, and in which thread.

In: a schedule, and what runs a forward or a backward. Out: all of its actions run, or the first
failure. Read first: ``lane_state``, which has no threads, then ``lane_threads``.
"""
