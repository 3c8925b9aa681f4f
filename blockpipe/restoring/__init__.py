"""What a call changes, put back: a recording leaves no trace, a failure no half state.

In: a model, a thread. Out: context managers that keep what can be reached from the model (objects,
containers, iterators, arrays), the thread's modes, the process's streams. Read first:
``model_state``, with its ``holders``.
"""
