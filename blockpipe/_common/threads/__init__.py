"""The state of threads, and turns between them.

In: the thread that calls, the models that it works with. Out: its modes and settings for the
threads that work for it, one model's turns, changes that all threads see, waits that end. Read
first: ``thread_state``, then ``model_turns``; ``standstill`` finds waits that cannot end, and
``shared_contexts`` is about torch's context managers.
"""
