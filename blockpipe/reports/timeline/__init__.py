"""The times of a step, measured or played out by a schedule: a trace and its pictures.

``profiling`` collects a trace from steps; ``text``, ``html``, ``plot`` and ``chrome`` draw it.
"""
