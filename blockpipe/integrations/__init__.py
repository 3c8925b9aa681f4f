"""Other libraries' training loops, with a pipeline in the place of the model.

In: a pipeline, or a marked model, and the library's own arguments. Out: the library's own objects,
which run pipelined steps. Read first: the module with the library's name, which no other module
imports; another library's loop belongs in a module of its own.
"""
