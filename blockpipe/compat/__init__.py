"""Functions of this package under the names that users of other libraries know.

In: a model, a pipeline. Out: stages as data, in IPU Keras' words; the scripts of PopTorch,
torchgpipe and fairscale as they are, in folders of these names. These only translate: what the core
lacks for them is put there. Nothing else imports this folder. Each library has files or a folder of
its own; a name that only an error message knows belongs in ``_common/hints``.
"""
