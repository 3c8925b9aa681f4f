"""Other libraries' functions for what is here, under the names that their users know.

In: a model, a pipeline. Out: stages as data in IPU Keras' words, and pipelines in torchgpipe's and
fairscale's. A door only translates: what a library has and the core lacks is put into the core.
Nothing else imports it. Each library has files or a folder of its own; a name that only an error
message knows belongs in ``_common/hints``.
"""
