"""The command line, ``python -m blockpipe``: words in, text and an exit status out.

``model_arguments`` makes a model and its inputs from words, ``option_types`` reads the other
options; each command is a function of ``commands``.
"""
