"""Find plain Python values that one hop sets and another one reads, by tracing the user's code.

In: the frames of a watched forward, the code that autograd will call, and the loss. Out: entries
:class:`SharedChange` of the recording. Read first: ``shared_values``, which traces, and
``known_values``, which draws the conclusions. ``accesses`` has what an instruction reads or sets,
by its source, and ``expressions`` evaluates that. ``effects`` tells what a library's function does
to a container. ``still_code`` looks at code that runs in no recording, ``tensor_uses`` at its
tensors and ``drawn_numbers`` at what it draws; ``checkpoints`` tells what
``torch.utils.checkpoint`` will run again.
"""
