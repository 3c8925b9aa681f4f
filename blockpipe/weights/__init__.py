"""Values in and out, and where they live.

In: checkpoints (safetensors, torch's, mappings), models on the meta device. Out: parameters and
buffers on their stages' devices, saved shards. Read first: ``sources`` and ``placement``. Another
format to read is a class in ``sources``; another one to write belongs in ``save``.
"""
