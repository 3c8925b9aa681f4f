"""Check a pipelined step against the plain loop, and find the first module where they diverge.

``run`` makes the runs, ``verdict`` compares them, ``divergence`` finds the first module that
differs, ``whole_batch`` compares with the batch in one forward, and ``result`` is the answer.
"""
