"""Reports on a pipeline over processes: a summary, a timeline, a verification; the same in each.

In: what each process knows. Out: the reports of ``blockpipe.reports``, gathered.
"""
