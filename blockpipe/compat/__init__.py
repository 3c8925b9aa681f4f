"""Other libraries' functions for what is here, under the names that their users know.

In: a model, a pipeline. Out: stages as data, in IPU Keras' words; PopTorch's script as it is, in
``poptorch``. Nothing else imports it. Each library has files of its own; a name that only an error
message knows belongs in ``_common/hints``.
"""
