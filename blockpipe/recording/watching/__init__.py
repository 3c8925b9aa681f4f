"""One watched run of a forward, and the parts that watch it.

In: a forward, as operations and calls happen. Out: entries of a :class:`Recording`. Read first:
``watched_run``, which puts everything around a forward, then ``recorder``, the listener, which uses
the others. ``calls`` are the calls under way; ``mode`` stands between the forward and the recorder.
"""
