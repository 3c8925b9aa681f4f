"""Values in and out, and where they live.

In: checkpoints (safetensors, torch's, mappings), models on the meta device. Out: parameters and
buffers on their stages' devices, saved shards. Read first: ``sources`` and ``placement``; another
format is a source.
"""
