"""Models and helpers of several test files."""

import blockpipe as bp

B = bp.Block


# --- what the other schedules refuse, and say that this one does


def a_view_crossed_too(s, x):
    with B(0):
        h = s.a(x) * 1
        v = h[:, :2]
    with B(1):
        w = v + 2
        h.mul_(3)
    with B(2):
        return s.c(h) + w.sum()
