"""Models and helpers of several test files."""

import itertools
import json
import weakref

import torch
import torch.nn.functional as F
from torch import nn

import blockpipe as bp
from blockpipe.reports.timeline.chrome import chrome_trace

from .test_timeline import check_chrome

STAGES, CHUNKS = 3, 4


class Net(nn.Module):
    """Three stages in a row, and a tensor that skips the middle one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(STAGES)
        )
        self.fails_at = None
        self.seen = []

    def forward(self, x):
        made = []
        for stage, layer in enumerate(self.layers):
            with bp.Block(stage):
                if stage == 2:
                    x = x + made[0]
                if (stage, bp.current_microbatch()) == self.fails_at:
                    raise ValueError("boom")
                x = torch.tanh(layer(x))
                self.seen.append(weakref.ref(x))
                made.append(x)
        return x


def made(schedule="1f1b", devices=("cpu",) * STAGES, **options):
    torch.manual_seed(0)
    pipe = bp.Pipeline(Net(), devices=list(devices), chunks=CHUNKS, schedule=schedule, **options)
    step(pipe)
    pipe.zero_grad()
    return pipe


def step(pipe):
    return pipe.forward_backward(torch.ones(8, 4), target=torch.zeros(8, 4), loss_fn=F.mse_loss)


def check(timeline, kinds="FB", lane_of=range(STAGES), steps=1):
    """Each action once a step, on the lane of its hop, one at a time, when what it needs is done."""
    actions = timeline.actions()
    assert len(timeline.steps) == steps
    for n, info in enumerate(timeline.steps):
        found = sorted((e.kind, e.hop, e.microbatch) for e in timeline.actions(n))
        expected = sorted(a for lane in info.schedule.lanes for a in lane if a.kind in kinds)
        assert found == expected
        whole = itertools.product(kinds.replace("W", ""), range(STAGES), range(CHUNKS))
        assert set(whole) <= set(found)
    by_lane = {}
    for e in actions:
        assert e.lane == lane_of[e.hop]
        assert e.stage == e.hop
        by_lane.setdefault(e.lane, []).append((e.start, e.end))
    for spans in by_lane.values():
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(spans)))
    at = {(e.step, e.kind, e.hop, e.microbatch): e for e in actions}
    for (n, kind, hop, m), e in at.items():
        needs = {"F": ("F", hop - 1), "B": ("F", hop), "R": ("F", hop), "W": ("B", hop)}
        needed = at.get((n, *needs[kind], m))
        assert needed is None or needed.end <= e.start
        if kind == "B" and hop + 1 < STAGES:
            assert at[n, "B", hop + 1, m].end <= e.start
        if kind == "B" and "R" in kinds:
            assert at[n, "R", hop, m].end <= e.start
    check_chrome(json.loads(json.dumps(chrome_trace(timeline))), timeline)
    assert all(len(line) <= 100 for line in str(timeline).splitlines())
