"""Functions of this package under the names that users of other libraries know.

In: a model, a pipeline. Out: stages as data, in IPU Keras' words; a pipeline from a device map of
Accelerate's; PopTorch's script as it is, in ``poptorch``. Nothing else imports it. Each library has
files of its own; a name that only an error message knows belongs in ``_common/hints``.
"""
