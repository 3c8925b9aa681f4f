"""What Python's syntax says of values, without a run: the names that it binds, what it takes out of
containers, the methods that it calls.

Expressions and accesses go in; names, values and methods come out. Read ``contents`` first.
"""
