"""Devices, and one tensor on its way between two of them.

In: a tensor and where it shall be. Out: copies on streams of their own, waited for where they are
read; what must not be written or freed meanwhile; whose a storage is; streams of random numbers.
Read first: ``copies``, then ``lending``.
"""
