"""What happened when in a step, or would in a schedule: a trace and its pictures.

``profiling`` collects a trace from steps; ``text``, ``html``, ``plot`` and ``chrome`` draw it.
"""
