"""A model as a list of layers, and the list in parts."""

import re

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.compat import torchdistpackage
from blockpipe.compat.torchdistpackage import (
    NaiveDDP,
    flatten_model,
    launch,
    partition_uniform,
    tpc,
)
from blockpipe.errors import MarkError, PlanError


class Net(nn.Module):
    """Layers of each kind that a name may stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 2)


def test_names_modules_and_functions_are_layers():
    """Containers are taken apart, once; the modules are the model's own."""
    net, last = Net(), nn.Sequential(nn.Tanh())
    names = ["body", "blocks", lambda x: x * 2, net.head, "body.1", last]
    layers = flatten_model(net, names, return_list=True)
    assert layers[:4] == [*net.body, *net.blocks]
    assert layers[5:] == [net.head, net.body[1], last]
    assert torch.equal(layers[4](torch.ones(2)), torch.full((2,), 2.0))
    assert "lambda" in repr(layers[4])
    flat = flatten_model(net, names)
    assert isinstance(flat, nn.Sequential)
    x = torch.ones(3, 4)
    expected = net.head(net.blocks[1](net.blocks[0](net.body(x))) * 2).relu().tanh()
    assert torch.equal(flat(x), expected)


def test_what_is_no_layer_is_refused():
    with pytest.raises(PlanError, match=r"Net has no submodule 'bodi' \(.*mean 'body'"):
        flatten_model(Net(), ["bodi"])
    with pytest.raises(PlanError, match="the name of a submodule, a module or a function .*got 5"):
        flatten_model(Net(), [5])


def test_parts_are_those_of_torchdistpackage():
    """The last one has the rest, or less by extra_len; each rank gets its own."""
    layers = [nn.Linear(4, 4) for _ in range(7)]
    assert launch(lambda: partition_uniform(layers), 3) == [layers[:2], layers[2:4], layers[4:]]
    parts = launch(lambda: partition_uniform(nn.Sequential(*layers), extra_len=2), 3)
    assert parts == [layers[:3], layers[3:6], layers[6:]]


def test_one_process_has_all_layers_marked():
    tpc.setup_process_groups([("pipe", 3)])
    layers = [nn.Linear(4, 4) for _ in range(7)]
    assert partition_uniform(layers) == layers
    assert bp.record(nn.Sequential(*layers), torch.ones(2, 4)).plan.layout == "2=1, 4=2"
    with pytest.raises(MarkError, match="marked as stage 1 already"):
        partition_uniform(layers)


def test_a_stage_without_a_layer_is_refused():
    tpc.setup_process_groups([("pipe", 3)])
    layers = [nn.Linear(4, 4) for _ in range(4)]
    with pytest.raises(PlanError, match="layers for each of 3 stages, got '2 layers'"):
        partition_uniform(layers[:2])
    with pytest.raises(PlanError, match="layers for each of 3 stages"):
        partition_uniform(layers, extra_len=2)
    with pytest.raises(PlanError, match="an integer from 0 on for extra_len, got -1"):
        partition_uniform(layers, extra_len=-1)


def test_data_parallel_copies_are_none_in_one_process():
    net = Net()
    assert NaiveDDP(net, sync=False) is net


def test_names_that_the_door_lacks_say_what_to_use():
    for name, instead in torchdistpackage.MISSING.items():
        with pytest.raises(AttributeError, match=re.escape(instead)):
            getattr(torchdistpackage, name)
