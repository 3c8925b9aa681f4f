"""Which questions of the user's code may have another answer for another micro-batch.

In: expressions, and the frames that they are in. Read first: ``open_questions``. ``chosen`` has the
objects among which such an answer chooses, and ``sizes_by_data`` the tensors whose size is one.
"""
