"""Reports to users: tables, pictures, verdicts. Nothing here changes a step.

In: recordings, prepared models, traces. Out: summaries, memory, timelines, verifications. Read
first: ``inspector`` for the reports that need no step; then the folder of the report.
"""
