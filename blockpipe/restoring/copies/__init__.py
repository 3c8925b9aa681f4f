"""Copy models and objects as a whole.

In: a model, an object. Out: deep copies that follow what is set on it later, and whether a step
changes what they have in common. Read first: ``whole_copies``.
"""
