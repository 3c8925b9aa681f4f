"""Make a recording ready for steps, once for each kind of call.

In: a model, options, a micro-batch. Out: a :class:`~blockpipe.preparation.prepared.Prepared`:
homes, stand-ins for sealed modules, lanes, costs. Read first: ``preparer`` (record, plan, place),
then ``options``. ``watched`` compares what a user sets between steps, ``after_steps`` what a step
has set, and ``memory`` predicts and measures what a step needs.
"""
