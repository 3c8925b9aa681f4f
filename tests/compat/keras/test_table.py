"""The table of an assignment, as Keras prints it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import blockpipe as bp
from blockpipe.errors import UsageError

from .assigned_models import net_of

X = torch.ones(6, 4)


# --- the table


def printed(*args, **kwargs) -> list[str]:
    lines: list[str] = []
    bp.print_pipeline_stage_assignment_summary(*args, print_fn=lines.append, **kwargs)
    return lines


class Joined(nn.Module):
    """A layer with several inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.join = nn.Linear(4, 4), nn.Linear(4, 4), nn.Bilinear(4, 4, 2)

    def forward(self, x):
        return self.join(self.left(x), self.right(x))


def test_the_table_is_that_of_keras():
    """To the character, with the line length that IPU Keras' own test uses."""
    net = bp.begin_blocks(Joined(), {"join": 1})
    assert printed(net, 85, args=X) == [
        'Model: "Joined"',
        "_" * 85,
        "Layer (type) (node index)         Input Layers                      Pipeline Stage   ",
        "=" * 85,
        "left (Linear) (0)                                                   0                ",
        "_" * 85,
        "right (Linear) (0)                                                  0                ",
        "_" * 85,
        "join (Bilinear) (0)               left                              1                ",
        "                                  right                                              ",
        "=" * 85,
    ]
    assert {len(line) for line in printed(net, args=X)[1:]} == {89}


def test_every_call_has_its_row():
    """In execution order; containers of several stages have all of them."""
    net = net_of()
    bp.set_pipeline_stage_assignment(net, "body.2=1, head=1")
    recording = bp.record(net, X)
    rows = [line for line in printed(recording)[4:] if line[0] not in "_="]
    assert [row.split()[0] for row in rows] == [a.path for a in recording.plan.assignments]
    assert [row[71:].strip() for row in rows] == ["0", "0, 1", "0", "0", "1", "1"]
    assert [row[35:71].strip() for row in rows] == ["", "stem", "stem", "body.0", "body.1", "body"]


@given(st.integers(30, 200))
def test_long_names_go_on_in_the_next_line(length):
    """Nothing is cut off, and no line is longer than the rule."""
    path = "encoder_with_a_long_name"
    net = nn.Sequential()
    net.add_module(path, nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.LayerNorm(4)))
    lines = printed(net, length, args=X)
    assert all(len(line) == length for line in lines[1:])
    for column, begin, end in ((0, 0, 0.4), (1, 0.4, 0.8)):
        cells = "".join(
            line[int(length * begin) : int(length * end)].strip()
            for line in lines[4:]
            if len(set(line)) > 1
        )
        expected = (f"{path}.0.0(Linear)(0)", f"{path}.0")[column]
        assert expected in cells.replace(" ", "")


@pytest.mark.parametrize("length", [0, 29, -1, True, "89", 40.0])
def test_a_line_length_below_the_least_is_refused(length):
    """The least is named."""
    with pytest.raises(UsageError, match="an integer from 30 up for line_length"):
        printed(net_of(), length, args=X)


def test_a_print_fn_that_is_no_function_is_refused():
    with pytest.raises(UsageError, match="a function of a line for print_fn, got 5"):
        bp.print_pipeline_stage_assignment_summary(net_of(), None, 5, args=X)


def test_the_table_goes_to_print(capsys):
    """By default, and with print_fn=None as in Keras."""
    bp.print_pipeline_stage_assignment_summary(net_of(), None, None, args=X)
    first = capsys.readouterr().out
    bp.print_pipeline_stage_assignment_summary(net_of(), args=X)
    assert capsys.readouterr().out == first != ""
