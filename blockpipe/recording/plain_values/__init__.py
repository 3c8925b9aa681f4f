"""Find plain Python values that one hop sets and another one reads, by tracing the user's code.

In: the frames of a watched forward, the code that autograd will call, and the loss. Out: entries
:class:`SharedChange` of the recording. Read first: ``shared_values``, which traces, and
``known_values``, which says what follows from what was read and set. ``accesses`` has what an
instruction reads or sets, by its source, and ``expressions`` evaluates that without running
anything. ``still_code`` looks at such code and losses, which run in no recording, ``tensor_uses``
at the tensors in them and ``drawn_numbers`` at what they draw; ``checkpoints`` tells what
``torch.utils.checkpoint`` will run again.
"""
