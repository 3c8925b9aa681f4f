"""A recording as a table: rows and columns, as text and as HTML.

A new column is an entry of ``columns``, and if its number is new also a field of ``ModuleRow`` in
``rows``. ``explain`` gives the reason why a module or parameter is where it is, and ``notes`` the
lines below the tables.
"""
