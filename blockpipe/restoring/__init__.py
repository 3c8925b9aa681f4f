"""Undo the changes of a call, so that a recording leaves no trace and a failure no partial state.

In: a model, a thread. Out: context managers that save and restore the state that can be reached
from the model (objects, containers, iterators, arrays), the interpreter's, the thread's modes and
the process's streams. Read first: ``model_state``; another kind of object that holds state goes
into ``holders`` if it holds other objects, and into ``contents`` if it does not.
``copies`` has deep copies that follow what is set on a model. ``kept_imports`` is about what a
recording does not undo.
"""
