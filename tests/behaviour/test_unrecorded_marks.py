"""Marks outside of a recording: they change nothing, and cost nothing."""

import torch
from torch import nn

import blockpipe as bp
from blockpipe.stages import marks
from blockpipe.stages.cursor import Cursor, set_cursor


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def test_marks_do_nothing_outside_blockpipe():
    """A marked model computes what the plain one does."""
    net = two_layers()
    x = torch.randn(3, 4)
    expected = net(x)
    bp.BeginBlock(net[2], stage=1)
    with bp.Block(7):
        assert torch.equal(net(x), expected)
    assert bp.current_stage() is None


def test_marks_do_nothing_under_compile():
    """torch.compile traces through a marked model as if it were not."""
    net = two_layers()
    bp.BeginBlock(net[2], stage=1)

    def forward(x):
        with bp.Block(2):
            return net(x)

    compiled = torch.compile(forward, backend="eager", fullgraph=True)
    x = torch.randn(2, 4)
    assert torch.equal(compiled(x), net(x))


def test_marks_hold_while_another_thread_compiles(monkeypatch):
    """torch's flag is the process's: a stage that compiles does not take marks from the others."""
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    bp.begin_blocks(net, {"1": 1})
    assert bp.record(net, torch.zeros(1, 4)).route == [0, 1]


def test_marks_do_nothing_under_export():
    """torch.export sees no mark."""
    net = two_layers()
    bp.BeginBlock(net[2], stage=1)
    x = torch.randn(2, 4)
    assert torch.equal(torch.export.export(net, (x,)).module()(x), net(x))


def test_a_block_outside_of_a_recording_looks_at_no_frame(monkeypatch):
    """It reads one context variable: the user's line is asked for inside of a recording alone."""
    asked = []
    monkeypatch.setattr(marks, "users_line", lambda: asked.append(1) or "here")
    block = bp.Block(1)
    with block:
        assert not asked
    before = set_cursor(Cursor())
    try:
        with block:
            assert asked
    finally:
        set_cursor(before)
