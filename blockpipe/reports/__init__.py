"""What users are told: tables, pictures, verdicts. Nothing here changes a step.

In: recordings, prepared models, traces. Out: summaries, memory, timelines, verifications. Read
first: ``inspector`` for what is asked before a step; then the folder of the report.
"""
