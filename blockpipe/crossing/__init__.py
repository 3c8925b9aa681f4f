"""One micro-batch: its tensors from stage to stage, and their gradients back.

In: a forward's operations, intercepted. Out: what each operation is given on its stage, graphs that
end at the stages' borders, one hop's backward. Read first: ``microbatch_run`` and the parts of a
run in ``tensors``, then ``interception`` and ``hop_backward``; ``recompute`` and ``offload`` for
activations.
"""
