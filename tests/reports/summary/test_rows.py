"""The rows of a summary: what they add up, open and close."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import blockpipe as bp

from ...stage_devices import examples
from .summarized import recorded


def names(summary: Any) -> list[tuple[int, str]]:
    return [(row.depth, row.name) for row in summary.modules]


def test_repeated_blocks_are_one_row() -> None:
    """By stage; and what is in them too, if it is asked for."""
    rows = recorded().summary().modules
    assert [(r.name, r.kind, len(r.paths), r.calls, r.stages) for r in rows] == [
        ("", "Net", 1, 1, [0, 1]),
        ("stem", "Linear", 1, 1, [0]),
        ("twice", "Linear", 1, 3, [0, 1]),
        ("blocks.0 … 1", "Sequential", 2, 2, [0]),
        ("blocks.2 … 3", "Sequential", 2, 2, [1]),
    ]
    deep = recorded().summary(depth=2)
    assert names(deep)[3:6] == [(1, "blocks.0 … 1"), (2, "0"), (2, "1")]
    assert (deep.modules[4].paths, deep.modules[4].parameters) == (
        ["blocks.0.0", "blocks.1.0"],
        144,
    )
    assert "  twice (Linear, 3 calls)" in str(deep)
    assert "    0 (2 × Linear)" in str(deep)


# A tree of containers without code of their own; numbers are leaves, which may come several times.
TREES = st.recursive(
    st.integers(0, 4), lambda inner: st.lists(inner, min_size=1, max_size=4), max_leaves=9
)


def built(tree: Any, leaves: list[nn.Module]) -> nn.Module:
    if isinstance(tree, int):
        return leaves[tree]
    return nn.Sequential(*(built(inner, leaves) for inner in tree))


@settings(max_examples=examples(40), deadline=None)
@given(TREES, st.data())
def test_rows_add_up_to_the_row_that_they_are_in(tree: Any, data: st.DataObject) -> None:
    """And those of the model to the stages; tied weights and shared modules count once above."""
    leaves = [nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(), nn.Tanh(), nn.LayerNorm(8)]
    leaves[1].weight = leaves[0].weight
    net = nn.Sequential(built(tree, leaves), nn.Linear(8, 8))
    bp.BeginBlock(data.draw(st.sampled_from([m for m in net.modules() if m is not net])), 1)
    summary = bp.record(net, torch.zeros(4, 8)).summary(depth=99)
    rows = summary.modules
    for at, row in enumerate(rows):
        end = next((i for i in range(at + 1, len(rows)) if rows[i].depth <= row.depth), len(rows))
        children = [inner for inner in rows[at + 1 : end] if inner.depth == row.depth + 1]
        if not children:
            continue
        for number in ("activation_bytes", "flops", "forward_seconds", "backward_seconds"):
            total = sum(getattr(child, number) for child in children)
            assert getattr(row, number) == pytest.approx(total), (row.name, number)
        assert row.parameters == sum(c.parameters - c.shared_parameters for c in children)
        assert row.bytes == sum(c.bytes - c.shared_bytes for c in children)
    assert rows[0].activation_bytes == sum(stage.activation_bytes for stage in summary.stages)
    assert ("note: *: an earlier row" in str(summary)) == any(row.shared_bytes for row in rows)


def test_depth_opens_and_closes() -> None:
    """0 is the model alone; the deepest is as deep as there are modules."""
    recording = recorded()
    assert names(recording.summary(depth=0)) == [(0, "")]
    assert {depth for depth, _ in names(recording.summary(depth=1))} == {0, 1}
    assert names(recording.summary(depth=2)) == names(recording.summary(depth=1000))


def test_numbered_names_need_one_size() -> None:
    """``layer1`` and ``layer2`` are one row if they are as large as each other."""
    net = nn.Sequential()
    for number, width in enumerate((8, 8, 8, 4)):
        net.add_module(f"layer{number}", nn.Linear(8 if number < 4 else 4, width))
    assert names(recorded(net).summary(depth=1))[1:] == [(1, "layer0 … 2"), (1, "layer3")]


def test_a_module_stands_below_the_one_that_calls_it() -> None:
    """Though it is registered elsewhere; a function of the user's is a row too."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.other = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            @bp.BlockFunction(1)
            def on_top(x: Tensor) -> Tensor:
                return torch.relu(self.other[0](x))

            return on_top(self.inner(x))

    summary = recorded(Outer()).summary(depth=3)
    assert [(r.depth, r.paths[0].partition(" ")[0], r.parameters) for r in summary.modules] == [
        (0, "", 144),
        (1, "inner", 72),
        (
            1,
            f"{test_a_module_stands_below_the_one_that_calls_it.__name__}.<locals>.Outer.forward.<locals>.on_top",
            72,
        ),
        (2, "other.0", 72),
    ]
    assert "on_top (function, test_rows.py:" in str(summary)


def test_a_function_that_calls_itself_is_counted_once() -> None:
    class RecomputeSpec(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            @bp.BlockFunction(0)
            def again(x: Tensor, left: int) -> Tensor:
                return again(x @ x, left - 1) if left else x

            return again(x, 3)

    summary = bp.record(RecomputeSpec(), torch.zeros(8, 8)).summary(depth=9)
    assert [(row.calls, row.flops) for row in summary.modules] == [(1, 3 * 2 * 8**3)] * 2
