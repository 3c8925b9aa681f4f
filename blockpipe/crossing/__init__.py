"""One micro-batch: its tensors from stage to stage, and their gradients back.

In: a forward's operations, intercepted. Out: the arguments of each operation on its stage, graphs
that end at the stages' borders, one hop's backward. Read first: ``microbatch_run`` and ``tensors``,
then ``interception`` and ``hop_backward``; ``recompute`` and ``offload`` for activations. A
crossing is refused where it is noticed: reads in ``tensors/tensor_import``, writes in
``tensors/writes``, torch functions in ``interception``, a forward's state in ``recording``.
"""
