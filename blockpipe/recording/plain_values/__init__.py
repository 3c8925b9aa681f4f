"""Find plain Python values that one hop sets and another one reads, by tracing the user's code.

In: the frames of a watched forward, and the hooks that a backward will call. Out: entries
:class:`SharedChange` of the recording. Read first: ``shared_values``, which traces; ``accesses``
has what an instruction reads or sets, by its source, and ``expressions`` evaluates that without
running anything. ``backward_code`` looks at hooks, which run in no recording, and ``checkpoints``
tells what ``torch.utils.checkpoint`` will run again.
"""
