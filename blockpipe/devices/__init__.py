"""Devices, and one tensor on its way between two of them.

In: a tensor and its target device. Out: copies on streams of their own, waited for where they are
read; the tensors that must not be written or freed meanwhile; the owners of storages; streams of
random numbers. Read first: ``copies``, then ``copy_lifetimes``. A new kind of device
begins in ``devices``, a new event of a step in ``observer``.
"""
