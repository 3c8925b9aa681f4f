"""Where to cut a model: into stages of equal cost, within their memory.

In: a recording, devices, a number of stages. Out: a plan that says what its stages cost, also as
code to paste. Read first: ``balance``, then ``search``; ``cut_points`` says where a recording can
be cut at all, and ``timing`` measures on a device. A new cost to balance is computed in
``stage_costs`` and has its unit in ``balanced_plan``.
"""
