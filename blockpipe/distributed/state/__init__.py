"""A pipeline's state in files: sharded, by ``torch.distributed.checkpoint``, and as safetensors.

In: the values of each process's stages. Out: one checkpoint of the whole model, under the model's
own names, so that another number of stages loads it. ``state_methods.py`` has the methods that
users call, ``shared_memory.py`` refuses state that processes would share. Read ``sharded.py``
first.
"""
