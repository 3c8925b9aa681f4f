"""The tensors of one micro-batch: the parts of a :class:`MicrobatchRun`.

In: the run's ``place``, which only the run changes. Out: the tensors that an operation may read
there, those that it made and wrote, and each hop's graph. Read first: ``tensor_import``, which uses
all the others; ``gradients`` uses ``hop_copies``; ``writes``, ``claims`` and ``input_slices`` stand
alone.
"""
