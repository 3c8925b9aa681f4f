"""The command line, ``python -m blockpipe``: words in, text and an exit status out.

Read first: ``commands``, which adds every option to its command and has a function for each
command. ``option_types`` has the types of options, and ``model_arguments`` makes a model and its
inputs from words.
"""
