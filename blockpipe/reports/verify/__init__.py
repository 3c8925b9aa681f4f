"""Whether a pipelined step is the plain one, and where the two diverge.

``run`` makes the runs, ``verdict`` compares them, ``divergence`` finds the first module that
differs, ``whole_batch`` looks at the batch in one piece, and ``result`` is what users get.
"""
