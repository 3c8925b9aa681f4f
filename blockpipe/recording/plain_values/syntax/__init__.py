"""What Python's syntax says of values, without a run: the names that it binds, what it takes out of
containers, the methods that it calls, the places that it reads and sets.

Code and its expressions go in; names, values, methods and accesses come out. Read ``accesses``
first; ``effects`` tells what a library's function does to a container.
"""
