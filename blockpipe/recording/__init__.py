"""Record a forward, stage by stage, in one watched run.

In: a model and a sample. Out: a :class:`Recording`, plain data. Read first: ``record``, which makes
it, then ``recording``, ``entries`` and ``calls``, the data. ``watching`` watches operations and
tensors, ``plain_values`` plain values, ``shared_changes`` the state of torch and the modules,
``outside_state`` the user's other objects. A model that no pipeline can run is refused where that
is noticed.
"""
