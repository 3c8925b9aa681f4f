"""The command line, ``python -m blockpipe``: words in, text and an exit status out.

``model_arguments`` makes a model and its inputs of words; each command is a function of
``commands``.
"""
