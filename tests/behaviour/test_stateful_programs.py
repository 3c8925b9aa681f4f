"""Random models that keep state, on stages, in branches and in code for autograd: a step has the
plain loop's numbers, or it says that it cannot."""

import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

import blockpipe as bp
from blockpipe.errors import BlockpipeError
from blockpipe.preparation import prepared

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, examples, stages
from .stateful_programs import STAGES, StatefulProgram, imported, stateful_programs

CALM, WILD = -torch.rand(8, 4), torch.rand(8, 4)
ONE_WILD = torch.cat([CALM[:2], WILD[2:4], CALM[4:]])
BATCHES = [CALM, CALM * 0.5, ONE_WILD, CALM, torch.cat([WILD[:6], CALM[6:]]), WILD]
Y = torch.ones(8, 4)


@settings(max_examples=examples(25), deadline=None)
@given(stateful_programs(), st.sampled_from(["gpipe", "1f1b"]), st.booleans())
def test_a_step_is_the_plain_loops_or_it_says_so(
    program: StatefulProgram, schedule: str, on_lanes: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        if on_lanes:
            patch.setattr(prepared, "SMALL_OPERATION", 0.0)
            patch.setattr(prepared, "SMALL_HOP", 0.0)
        event(_outcome(program, schedule, Path(folder), patch))


def _outcome(
    program: StatefulProgram, schedule: str, folder: Path, patch: pytest.MonkeyPatch
) -> str:
    ours, plains = (imported(program.source, folder) for _ in range(2))
    for module in (ours, plains):
        patch.setitem(sys.modules, module.__name__, module)
    net, plain = ours.Net(), plains.Net()
    plain.load_state_dict(net.state_dict())
    pipe = bp.Pipeline(net, devices=stages(STAGES), chunks=4, schedule=schedule)
    for batch in BATCHES:
        for each in (net, plain):
            each.zero_grad()
            each.train(batch is not WILD)
        expected = plain_step(plain, (batch.clone(),), {}, Y, plain.loss, 4)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                loss = pipe.forward_backward(batch.clone(), target=Y, loss_fn=net.loss).loss
            except BlockpipeError:
                return "refused"
            except RuntimeError as error:  # torch's own, as crossings.md has it
                assert "modified by an inplace operation" in str(error)
                return "refused by torch"
        if any("gradients are others" in str(one.message) for one in told):
            return "warned"
        assert_close(loss, expected)
        assert_same_gradients(net, plain)
        assert_close(_kept(ours, net), _kept(plains, plain))
    return "as plain"


def _kept(module: object, net: object) -> Tensor:
    return torch.as_tensor(module.read_of(net), dtype=torch.float64)  # type: ignore[attr-defined]
