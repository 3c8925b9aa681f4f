"""Functions of this package under the names that users of other libraries know.

In: a model, a pipeline. Out: stages as data, in IPU Keras' words; scripts for PopTorch, torchgpipe
and fairscale as they are, in ``poptorch``, ``torchgpipe`` and ``fairscale``. These only translate:
what a library has and the core lacks is put into the core. Nothing else imports this folder. Each
library has files or a folder of its own; a name that only an error
message knows belongs in ``_common/hints``.
"""
