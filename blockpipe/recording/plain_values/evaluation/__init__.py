"""Evaluate the user's expressions, without running any of the user's code.

In: a frame, which runs or stands still, and an expression of its code. Out: the value, or the
object that holds it and its key there. Read first: ``expressions``. ``members`` finds attributes
and entries, and ``getters`` what functions of Python read by names. ``callers`` finds what a
running function was given. ``sizes`` tells what may be another value for a micro-batch of another
size, and ``index_uses`` which numbers are an index, a bound of a slice, or the length of a loop.
"""
