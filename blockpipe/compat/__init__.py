"""Functions of this package under the names that users of other libraries know.

In: a model, a pipeline, a script for another library. Out: what ``Pipeline`` takes, or a step of
one. Each library has a folder of its own: ``keras``, ``poptorch``, ``torchdistpackage``. Nothing
but the top of the package imports them; a name that only an error message knows belongs in
``_common/hints``.
"""
