"""The parts that watch a recorded forward.

In: operations and calls, as they happen. Out: entries of a :class:`Recording`. Read first:
``calls``, the calls under way. ``mode`` stands between the forward and the recorder, which uses the
others.
"""
