"""Helpers of every folder, which no user of the library imports.

In: nothing of Blockpipe but its errors. Out: nested containers, the user's file and line, thread
state, text and tables, JSON read within bounds, files that replace earlier ones. Read first:
``callsite`` for how errors know where the user was, ``thread_state`` for what threads take along.
``hints`` has other libraries' names that errors understand.
"""
