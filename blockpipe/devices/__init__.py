"""Devices, and one tensor on its way between two of them.

In: a tensor and the device it is needed on. Out: copies on streams of their own, waited for where
they are read; what must not be written or freed meanwhile; whose a storage is; streams of random
numbers. Read first: ``copies``, then ``lending``. A new kind of device begins in ``devices``, a new
event of a step in ``observer``.
"""
