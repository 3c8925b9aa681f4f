"""Find the tensors that code reads and writes which no recording sees run.

In: accesses of code that autograd calls, of the loss, and of branches that were not taken. Out:
entries :class:`SharedChange` of the recording. Read first: ``used_tensors``, what one access does.
``tensor_uses`` collects that of code beside the forward, ``missed_tensors`` that of branches.
"""
