"""Functions of this package under the names that users of other libraries know.

In: a model, a pipeline, a script for another library. Out: arguments of ``Pipeline``, or a step of
one. Each library has a folder of its own name. These only translate: if a translation needs more
than the core has, the core gets it. Nothing but the top of the package imports them; a name that
only an error message knows belongs in ``_common/hints``.
"""
