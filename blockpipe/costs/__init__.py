"""Count the work of operations, and measure how fast a device does each kind of work.

In: operations as they are dispatched. Out: counts of work by kind, rates of a device measured by
probes, which operations make the host wait. Read first: ``work``, then ``rates``; a new kind of
operation is a constant of ``work`` and a probe of ``probing``.
"""
