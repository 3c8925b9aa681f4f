"""What a user's code sets between steps and a forward may branch on.

In: a model, before and after each step. Out: the part of a recording's key that says what it was
recorded with. Read first: ``watched_values``. ``members`` says which values count, ``seen`` which
part of one is compared, ``contents`` is what two containers have in common that are no one object,
and ``watched_numbers`` are numbers that remember what they were asked.
"""
