"""The assignment functions do what IPU Keras' own tests pin."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.compat import keras
from blockpipe.errors import PlanError, UsageError

from ..compat.keras.assigned_models import net_of

X = torch.ones(6, 4)


# --- what IPU Keras' own tests pin


class Twice(nn.Module):
    """The model of Keras' tests: three layers, each called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten, self.dense_1, self.dense_2 = nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 8)

    def forward(self, one, two):
        one, two = self.flatten(one), self.flatten(two)
        return self.dense_2(self.dense_1(one)), self.dense_2(self.dense_1(two))


PAIR = (torch.ones(2, 4), torch.ones(2, 4))


def test_each_call_of_a_layer_has_an_entry():
    """By the layer's path and the number of the call; all are on stage 0 at first."""
    entries = keras.get_pipeline_stage_assignment(Twice(), PAIR)
    assert [(e.path, e.call) for e in entries] == [
        ("flatten", 0),
        ("flatten", 1),
        ("dense_1", 0),
        ("dense_2", 0),
        ("dense_1", 1),
        ("dense_2", 1),
    ]
    assert {e.pipeline_stage for e in entries} == {0}


def test_stages_that_are_set_are_got_and_reset():
    """By the attribute that Keras' entries have; a nested entry takes those inside along."""
    net = Twice()
    entries = keras.get_pipeline_stage_assignment(net, PAIR)
    for stage, entry in enumerate(entries):
        entry.pipeline_stage = stage
    keras.set_pipeline_stage_assignment(net, entries)
    found = keras.get_pipeline_stage_assignment(net, PAIR)
    assert [e.pipeline_stage for e in found] == [0, 1, 2, 3, 4, 5]
    keras.reset_pipeline_stage_assignment(net)
    found = keras.get_pipeline_stage_assignment(net, PAIR)
    assert [e.pipeline_stage for e in found] == [0] * 6
    nested = keras.get_pipeline_stage_assignment(net_of(), X)[1]
    nested.pipeline_stage = 1
    assert [e.pipeline_stage for e in nested.inside] == [1, 1, 1]


def _popped(entries):
    del entries[-1]


def _no_entry(entries):
    entries[0] = None


def _unassigned(entries):
    entries[0].stage = None


def _swapped(entries):
    entries[:2] = reversed(entries[:2])


def _every_second(entries):
    for stage, entry in enumerate(entries):
        entry.pipeline_stage = 2 * stage


def _too_early(entries):
    for stage, entry in enumerate(entries[1:]):
        entry.pipeline_stage = stage
    entries[0].pipeline_stage = 4


@pytest.mark.every
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_popped, "'dense_2' call 1: only in the forward"),
        (_no_entry, "entry 0 is None, but should be an Assignment"),
        (_unassigned, "for the stage of 'flatten' call 0, got None"),
        (_swapped, "'flatten' call 1 in the plan, but 'flatten' call 0 in the forward"),
        (_every_second, r"without gaps, got \[0, 2, 4, 6, 8, 10\], where \[1, 3, 5, 7, 9\] are"),
        (_too_early, "'flatten' call 0 is on stage 4, before any call on stage 0"),
    ],
)
def test_what_keras_refuses_is_refused(change, message):
    """A wrong number, class or order of entries; an entry without a stage; gaps; a stage too
    early. Each is a ValueError, as there."""
    net = Twice()
    entries = keras.get_pipeline_stage_assignment(net, PAIR)
    change(entries)
    with pytest.raises(ValueError, match=message):
        keras.set_pipeline_stage_assignment(
            net, entries, *([PAIR] if change in (_popped, _swapped) else [])
        )


def test_a_sequence_takes_a_list_of_numbers():
    """One for each child, a module that is there twice has two; changes, errors."""
    shared = nn.Linear(4, 4)
    net = nn.Sequential(shared, nn.ReLU(), shared, nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert (
        keras.set_pipeline_stage_assignment(net, [0, 0, 1, 2]).layout
        == "0#0=0, 1#0=0, 0#1=1, 3#0=2"
    )
    entries = keras.get_pipeline_stage_assignment(net, X)
    assert [e.pipeline_stage for e in entries] == [0, 0, 1, 2]
    assert [e.pipeline_stage for e in entries[3].inside] == [2, 2]
    net.append(nn.Linear(4, 2))  # stays where the forward is
    assert [e.stage for e in keras.get_pipeline_stage_assignment(net, X)] == [0, 0, 1, 2, 2]
    keras.set_pipeline_stage_assignment(net, [0, 0, 1, 2, 3])
    net.pop(4)
    with pytest.raises(PlanError, match="'4'"):
        bp.record(net, X)
    for wrong, message in (
        ([0, 1], "a stage for each of its 4 children, got '2 stages'"),
        ([0.0, 0.0, 1.0, 1.0], "entry 0 is 0.0"),
        ([1, 1, 2, 2], "'0' call 0 is on stage 1, before any call on stage 0"),
    ):
        with pytest.raises(PlanError, match=message):
            keras.set_pipeline_stage_assignment(net, wrong)
    with pytest.raises(PlanError, match="is for the children of an nn.Sequential"):
        keras.set_pipeline_stage_assignment(Twice(), [0, 0, 1])


def test_a_model_without_a_sample_says_what_is_missing():
    """Keras' own call, which knows the inputs of a built model."""
    for ask in (
        keras.get_pipeline_stage_assignment,
        keras.print_pipeline_stage_assignment_summary,
    ):
        with pytest.raises(UsageError, match=r"forward of Twice takes \(one, two\) .*; write "):
            ask(Twice())


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("layer", "model.get_submodule(entry.path)"),
        ("node_index", "entry.call"),
        ("is_nested_model", "bool(entry.inside)"),
        ("pipeline_stage_assignments", "entry.inside"),
        ("inbound_layers", "call.inbound"),
    ],
)
def test_other_attributes_of_keras_entries_are_understood(name, ours):
    """The error has the name here; one that is set is an error too."""
    entry = keras.get_pipeline_stage_assignment(net_of(), X)[0]
    with pytest.raises(AttributeError, match=re.escape(ours)):
        getattr(entry, name)
    with pytest.raises(AttributeError, match="pipelinestage"):
        entry.pipelinestage = 1
    assert copy.deepcopy(entry) == pickle.loads(pickle.dumps(entry)) == entry


def test_names_that_the_door_lacks_say_what_to_use():
    for name, instead in keras.MISSING.items():
        with pytest.raises(AttributeError, match=re.escape(instead)):
            getattr(keras, name)
