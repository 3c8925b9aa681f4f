"""PopTorch's executors and options, and what has no meaning here."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import blockpipe as bp
from blockpipe.compat import keras, poptorch
from blockpipe.compat.poptorch import MISSING, options
from blockpipe.errors import MicrobatchError, UsageError

from ..stage_devices import assert_close, host, stages
from .poptorch_models import Network, WithLoss, accumulating, batch, two_parts, two_stages

PAGE = Path(__file__).parents[2] / "docs/how-to/from-poptorch.md"


# --- which results come back


MODES = poptorch.OutputMode


# --- the executor


def test_the_backward_of_a_returned_loss_is_refused() -> None:
    """The call has run it. The loss is an ordinary tensor otherwise."""
    model = poptorch.trainingModel(WithLoss(two_stages()), accumulating(2))
    _, loss = model(*batch(4))
    for number in (loss, loss / 2):
        with pytest.raises(UsageError, match=r"training model.*test_poptorch_executor\.py.*remove"):
            number.backward()
    assert not (loss + 1).requires_grad
    assert f"{loss:.1f}" == f"{float(loss):.1f}"


def test_the_module_of_optimizers_says_what_to_import() -> None:
    for line in (
        "import blockpipe.compat.poptorch.optim",
        "from blockpipe.compat.poptorch import optim",
        "from blockpipe.compat.poptorch.optim import AdamW",
    ):
        with pytest.raises(ImportError, match=r"use torch\.optim.*from torch\.optim import AdamW"):
            exec(line)


def test_an_executor_stands_for_its_model() -> None:
    net = WithLoss(two_stages())
    model = poptorch.trainingModel(net, accumulating(2))
    assert not model.isCompiled()
    with pytest.raises(UsageError, match="expected a model that has been called"):
        model.pipeline  # noqa: B018
    model.compile(*batch(4))
    assert model.isCompiled()
    model(*batch(4))
    assert model.model is net
    assert [*model.state_dict()] == [*net.state_dict()]
    assert model.eval() is net
    assert not net.training
    model.train()
    saved = copy.deepcopy(net.state_dict())
    model(*batch(4))
    model.load_state_dict(saved)
    assert_close(host(net.state_dict()), host(saved))
    for method in (model.copyWeightsToHost, model.copyWeightsToDevice, model.attachToDevice):
        method()
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        model.absent  # noqa: B018


def test_a_destroyed_model_is_where_it_was_and_starts_anew() -> None:
    net = WithLoss(two_stages())
    model = poptorch.trainingModel(net, accumulating(2, 2))
    model(*batch(4))
    model.destroy()
    assert {p.device.type for p in net.parameters()} == {"cpu"}
    assert not model.isCompiled()
    net(*batch(4))
    model(*batch(4))
    model.detachFromDevice()
    assert not model.isCompiled()


def test_training_and_inference_share_a_model() -> None:
    """Its weights, and its mode, which nobody changes."""
    net = WithLoss(two_stages())
    training = poptorch.trainingModel(net, accumulating(2))
    inference = poptorch.inferenceModel(net, two_parts())
    x, y = batch(4)
    before = inference(x)
    training(x, y)
    assert (inference(x) - before).abs().max() > 0
    assert net.training


def test_options_of_the_pipeline_go_along() -> None:
    model = poptorch.trainingModel(
        WithLoss(two_stages()), accumulating(2), checkpoint="always", devices=stages(2)
    )
    model(*batch(4))
    assert model.pipeline.checkpoint == "always"
    with pytest.raises(UsageError, match=r"got chunks= .*; call options.Training.gradient"):
        poptorch.trainingModel(two_stages(), chunks=3)


def test_a_batch_of_another_size_than_the_inputs_is_an_error() -> None:
    """But any number of samples is a batch."""
    model = poptorch.trainingModel(WithLoss(two_stages()), accumulating(4))
    model(*batch(3))
    with pytest.raises((MicrobatchError, ValueError)):
        model(torch.randn(4, 4), torch.randint(0, 3, (3,)))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: poptorch.trainingModel(3), "expected an nn.Module, got int"),
        (lambda: poptorch.trainingModel(two_stages(), "o"), "expected Options, got str"),
        (
            lambda: poptorch.trainingModel(two_stages(), None, 0.1),
            "expected an optimizer of torch.optim, got float",
        ),
        (
            lambda: poptorch.inferenceModel(two_stages(), accumulating(2)),
            r"expected no gradient accumulation for inference, got gradientAccumulation\(2\)",
        ),
        (
            lambda: poptorch.inferenceModel(two_stages()).setOptimizer(None),
            "expected a training model, got one for inference",
        ),
        (lambda: poptorch.Options().replicationFactor(0), r"got replicationFactor\(0\)"),
        (lambda: poptorch.Options().deviceIterations(True), r"got deviceIterations\(True\)"),
        (lambda: poptorch.Options().outputMode("All"), "expected an OutputMode, got 'All'"),
        (lambda: poptorch.Options().outputMode(MODES.EveryN), r"got output_return_period\(None\)"),
        (
            lambda: poptorch.Options().setExecutionStrategy(poptorch.PipelinedExecution),
            "got type .*; pass one of them, with its brackets",
        ),
        (
            lambda: poptorch.Options().Training.accumulationReductionType(
                poptorch.ReductionType.NoReduction
            ),
            "expected ReductionType.Mean or ReductionType.Sum",
        ),
        (lambda: poptorch.Stage(0), r"expected names of blocks, got \[0\]"),
        (lambda: poptorch.PipelinedExecution(0), "expected a Stage, a block's name, or a list"),
        (
            lambda: poptorch.PipelinedExecution("A", poptorch.Stage("B", "A")),
            "got 'A' in stage 0 and in stage 1",
        ),
        (lambda: poptorch.recomputationCheckpoint(3), "expected tensors, got int"),
        (lambda: poptorch.Block(ipu_id=-1), "for stage, got -1"),
    ],
)
def test_mistakes_are_told(mistake: Any, message: str) -> None:
    """What was expected, what came, and the line."""
    with pytest.raises(poptorch.Error, match=message) as caught:
        mistake()
    assert re.search(r"test_poptorch_executor\.py:\d+", str(caught.value))


# --- options, and what has no meaning here


def test_options_chain_and_print_what_is_changed() -> None:
    opts = poptorch.Options().deviceIterations(2).anchorMode(poptorch.AnchorMode.All).randomSeed(1)
    assert repr(opts) == "Options(deviceIterations=2, outputMode=OutputMode.All)"
    training = opts.Training.gradientAccumulation(3)
    assert training is opts.Training
    assert (opts.device_iterations, training.gradient_accumulation) == (2, 3)
    assert torch.initial_seed() == 1
    assert repr(poptorch.Options()) == "Options()"


@pytest.mark.parametrize("name", options.ACCEPTED)
def test_what_has_no_meaning_is_accepted_with_a_warning(name: str) -> None:
    opts = poptorch.Options()
    is_group = name in ("Jit", "Precision", "TensorLocations", "_Popart")
    called = f"{name}.set" if is_group else name
    option = getattr(opts, name)
    with pytest.warns(UserWarning, match=re.escape(f"{called} does nothing here: ")) as caught:
        found = option.set("anything", 1) if is_group else option(1)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert found is (option if is_group else opts)


@pytest.mark.parametrize("name", options.ACCEPTED_IN_TRAINING)
def test_what_has_no_meaning_in_training_too(name: str) -> None:
    with pytest.warns(UserWarning, match=f"{name} does nothing here"):
        getattr(poptorch.Options().Training, name)(True)


def test_what_would_change_the_script_is_refused() -> None:
    """With what to do instead; a name that nobody knows has one that is near."""
    for group, table in (
        (poptorch.Options(), options.REFUSED),
        (poptorch.Options().Training, options.REFUSED_IN_TRAINING),
    ):
        for name, remedy in table.items():
            with pytest.raises(UsageError, match=rf"{name} cannot .*; {re.escape(remedy)}"):
                getattr(group, name)
    with pytest.raises(AttributeError, match="did you mean 'deviceIterations'"):
        poptorch.Options().deviceIteration(3)
    with pytest.raises(AttributeError, match="has no attribute 'optim'; use torch.optim"):
        poptorch.optim  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'no_such'$"):
        poptorch.no_such  # noqa: B018


def test_recomputation_checkpoints_are_handed_back() -> None:
    one, other = torch.ones(2), torch.zeros(2)
    with pytest.warns(UserWarning, match="keeps nothing here"):
        assert poptorch.recomputationCheckpoint(one) is one
    with pytest.warns(UserWarning, match="keeps nothing here"):
        assert poptorch.recomputationCheckpoint(one, other) == (one, other)
    with pytest.warns(UserWarning, match="keeps nothing here"):
        assert poptorch.recomputationCheckpoint([one]) == [one]


def test_batches_of_the_loader_are_those_of_a_call() -> None:
    """Of two iterations, two copies, three micro-batches; the rest is dropped unless asked for."""
    opts = accumulating(3, 2).deviceIterations(2)
    data = TensorDataset(torch.arange(50.0))
    loader = poptorch.DataLoader(opts, data, batch_size=2)
    assert loader.combinedBatchSize == 24
    assert [len(rows) for (rows,) in loader] == [24, 24]
    assert [len(r) for (r,) in poptorch.DataLoader(opts, data, 2, drop_last=False)] == [24, 24, 2]
    with pytest.warns(UserWarning, match=r"DataLoader\(mode=…\) does nothing here"):
        poptorch.DataLoader(opts, data, mode=None)


@pytest.mark.parametrize(
    ("tried", "hint"),
    [
        (lambda: poptorch.Options().Training.deviceIterations(2), r"call Options\(\)\.deviceIt"),
        (lambda: poptorch.Options().Training.enableProfiling(), r"call Options\(\)\.enableProf"),
        (lambda: poptorch.inferenceModel(two_stages()).isAttachedToDevice(), "leave it out"),
        (lambda: poptorch.inferenceModel(two_stages()).getTensorNames(), "return the tensor"),
        (lambda: poptorch.CTCBeamSearchDecoder, "decode the outputs of a call"),
        (lambda: keras.IPUStrategy, r"Pipeline\(model, devices="),
    ],
)
def test_what_scripts_call_and_doors_lack_says_what_to_write(tried: Any, hint: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute .*; .*{hint}"):
        tried()


def test_the_page_has_every_name() -> None:
    """What is there, what is accepted, and what is refused."""
    page = PAGE.read_text()
    tables = (options.ACCEPTED, options.ACCEPTED_IN_TRAINING, options.REFUSED)
    for table in (*tables, options.REFUSED_IN_TRAINING, MISSING, dict.fromkeys(poptorch.__all__)):
        assert [name for name in table if name not in page] == []


def test_stages_are_those_of_the_core() -> None:
    """The marks mean the same to a pipeline without the door."""
    assert bp.record(Network(), torch.zeros(1, 5)).route == [0, 1, 2, 3]
