"""Find plain Python values that one hop sets and another one reads, by tracing the user's code.

In: the frames of a watched forward, the code that autograd will call, and the loss. Out: entries
:class:`SharedChange` of the recording. Read first: ``shared_values``, which notes accesses, and
``known_values``, which draws the conclusions. ``tracing`` follows the code while it runs,
``syntax`` has what an instruction reads or sets, and ``evaluation`` evaluates that. ``still_code``
looks at code that runs in no recording, ``tensors`` at its tensors, ``drawn_numbers`` at what it
draws; ``missed`` looks at what was not taken, and ``questions`` says what may come out otherwise.
"""
