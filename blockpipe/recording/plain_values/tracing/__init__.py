"""Trace the user's code while a forward runs.

In: what Python calls at each instruction. Out: the accesses of the instruction, for those who note
them. Read first: ``traced_code``. ``pending_writes`` compares what an instruction sets when it has
ended, and ``checkpoints`` tells which frames a checkpoint will run again.
"""
