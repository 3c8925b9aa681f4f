"""Helpers of every folder, which no user of the library imports.

In: nothing of Blockpipe but its errors. Out: nested containers, the user's file and line, texts and
tables, the state of threads (``threads``), bounded and replaced files (``files``). Read first:
``callsite``, by which errors name the user's line, then ``threads``. ``checks`` makes the texts of
errors, and ``hints`` has other libraries' names that errors understand.
"""
