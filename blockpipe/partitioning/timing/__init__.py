"""Measure the time that each segment of a model takes on a device.

In: a model, a sample and its recording. Out: the seconds of each segment, forward and backward.
Read first: ``segment_timing``, which compares runs with stamps to runs without; ``segment_stamps``
sets the stamps.
"""
