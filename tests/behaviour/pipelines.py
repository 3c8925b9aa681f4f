"""Models and helpers of several test files."""

import blockpipe as bp

from ..stage_devices import stages


def pipeline(model, **options):
    return bp.Pipeline(model, **{"devices": stages(3), "chunks": 3, **options})
