"""Files from anywhere, read within bounds, and files that replace earlier ones.

In: paths and texts. Out: plain JSON data, or a ``ValueError`` that names the bound; complete files.
Read first: ``bounded_json``, whose bounds are in SECURITY.md, then ``replaced_files``.
"""
