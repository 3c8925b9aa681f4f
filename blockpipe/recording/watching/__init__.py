"""Watch one run of a forward: its operations, module calls and tensors.

In: the operations and calls of a forward. Out: entries of a :class:`Recording`. Read first:
``watched_run``, which puts the watchers around a forward, then ``recorder``, the listener, which
uses the others. ``calls`` has the calls under way, and ``mode`` intercepts for the recorder;
``late`` has what a forward does only in the plain loop's order.
"""
