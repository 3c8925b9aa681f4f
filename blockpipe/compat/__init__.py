"""Doors for those who come from elsewhere: other libraries' names for what is here.

In: a model, a pipeline. Out: stages as data, in IPU Keras' words. Nothing else imports it.
"""
