"""A recording as a table: rows, columns, and their text and HTML.

A new column is an entry of ``columns``. ``explain`` says why something is where it is.
"""
