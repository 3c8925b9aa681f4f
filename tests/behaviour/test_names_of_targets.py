"""Arguments of a forward that are called as the loss's target and the output are in ``batch_dims``."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import blockpipe as bp
from blockpipe.errors import MicrobatchError
from blockpipe.replicas import Replicas

from ..parity import assert_same_gradients
from ..stage_devices import assert_close, stages


class Seq2Seq(nn.Module):
    """Multiplies by what it is given under a name that Blockpipe uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        bp.BeginBlock(self.b, stage=1)

    def forward(self, x, target=None, output=None):
        y = self.b(self.a(x))
        y = y if target is None else y * target.mean(0)
        return y if output is None else y + output.mean(0)


def _pipe(model, copies=1, **options):
    if copies > 1:
        return Replicas(model, [stages(2)] * copies, chunks=2, **options)
    return bp.Pipeline(model, devices=stages(2), chunks=2, **options)


BY_KEYWORD = [False, True]
# The table has as many rows as the batch, and goes whole.
UNCLEAR = {"target": {"target": None}, "output": {"output": None}}


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("by_keyword", BY_KEYWORD)
@pytest.mark.parametrize("name", UNCLEAR)
def test_an_argument_when_named_by_position_leaves_target_and_output_alone(
    name, by_keyword, copies
):
    """The loss's target went whole as well."""
    model, x, y, table = Seq2Seq(), torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4)
    plain, position = copy.deepcopy(model), 1 if name == "target" else 2
    positional = (table,) if name == "target" else (None, table)
    args, kwargs = ((x,), {name: table}) if by_keyword else ((x, *positional), {})
    wanted = F.l1_loss(plain(*args, **kwargs), y)
    wanted.backward()
    output = plain(*args, **kwargs)
    for dims in ({position: None}, {position: None, name: 0}):
        model.zero_grad()
        pipe = _pipe(model, copies, batch_dims=dims)
        result = pipe.forward_backward(
            *args, target=y, loss_fn=F.l1_loss, model_kwargs=kwargs, return_outputs=True
        )
        assert_close(result.loss, wanted.detach())
        assert_close(result.outputs, output)
        assert_same_gradients(model, plain)


@pytest.mark.parametrize("by_keyword", BY_KEYWORD)
@pytest.mark.parametrize("name", UNCLEAR)
def test_a_name_that_two_things_have_when_both_are_there_is_refused(name, by_keyword):
    x, table, position = torch.randn(4, 4), torch.randn(4, 4), 1 if name == "target" else 2
    positional = (table,) if name == "target" else (None, table)
    args, kwargs = ((x,), {name: table}) if by_keyword else ((x, *positional), {})
    pipe = _pipe(Seq2Seq(), batch_dims=UNCLEAR[name])
    match = (
        rf"names '{name}', which may be the argument .*position as well: \{{{position}: …, '{name}'"
    )
    with pytest.raises(MicrobatchError, match=match):
        pipe.forward_backward(*args, target=x, loss_fn=F.l1_loss, model_kwargs=kwargs)


def test_the_name_target_when_only_one_thing_has_it_is_that_thing():
    """The argument where there is no loss, and the loss's target where the argument is left out."""
    model, x, table = Seq2Seq(), torch.randn(4, 4), torch.randn(4, 4)
    wanted, alone = model(x, table), model(x)
    pipe = _pipe(model, batch_dims={"target": None})
    assert_close(pipe(x, target=table), wanted)
    assert_close(pipe(x, table), wanted)
    shapes = []

    def loss_fn(output, target):
        shapes.append(target.shape)
        return output.sum() - target.sum()

    pipe.forward_backward(x, target=table, loss_fn=loss_fn)
    assert set(shapes) == {(4, 4)}
    assert_close(pipe(x), alone)
