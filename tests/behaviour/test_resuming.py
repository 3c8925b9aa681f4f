"""Training that is resumed from a checkpoint is equal to the bit."""

import copy

import pytest
import torch

from blockpipe.errors import UsageError

from ..stage_devices import equal
from ..weights.saved_models import X, copies, make, pipeline, same_state, step

OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_training_is_equal_to_the_bit(name, tmp_path):
    """Weights, optimizer state and learning-rate scheduler, saved and loaded in another cut."""

    def start(cuts, **options):
        torch.manual_seed(1)
        pipe = pipeline(cuts=cuts, **options)
        optimizer = OPTIMIZERS[name](pipe.parameters())
        return pipe, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    pipe, optimizer, scheduler = start((2, 4))
    losses = []
    for n in range(6):
        losses.append(step(pipe, optimizer))
        scheduler.step()
        if n == 2:
            pipe.save_weights(tmp_path)
            states = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
            torch.save(states, tmp_path / "training.pt")

    pipe2, optimizer, scheduler = start((1, 2, 3), weights=tmp_path)
    saved = torch.load(tmp_path / "training.pt", weights_only=True)
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    for expected in losses[3:]:
        assert equal(step(pipe2, optimizer), expected)
        scheduler.step()
    assert same_state(pipe2.state_dict(), pipe.state_dict())


def test_training_resumed_from_meta_is_equal(tmp_path):
    """The model on meta, placed by its sample; then the optimizer loads what was saved."""
    pipe = pipeline()
    optimizer = OPTIMIZERS["adam"](pipe.parameters())
    step(pipe, optimizer)
    state, weights = copy.deepcopy(optimizer.state_dict()), copies(pipe.state_dict())
    expected = step(pipe, optimizer), step(pipe, optimizer)
    with torch.device("meta"):
        net = make((1, 3))
    late = pipeline(net, cuts=(1, 3), weights=weights, sample=((X,), {}))
    optimizer = OPTIMIZERS["adam"](late.parameters())
    optimizer.load_state_dict(state)
    assert equal(step(late, optimizer), expected[0])
    assert equal(step(late, optimizer), expected[1])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_loaded_on_meta_is_refused(name):
    """It has no values any more: the next step says so, instead of training with what it lost."""
    pipe = pipeline()
    optimizer = OPTIMIZERS[name](pipe.parameters())
    step(pipe, optimizer)
    with torch.device("meta"):
        net = make()
    late = pipeline(net, weights=copies(pipe.state_dict()))
    saved, optimizer = optimizer.state_dict(), OPTIMIZERS[name](late.parameters())
    optimizer.load_state_dict(copy.deepcopy(saved))
    with pytest.raises(UsageError, match="is on the meta device: .* after the placement .pass sam"):
        step(late, optimizer)
    optimizer.load_state_dict(saved)
    step(late, optimizer)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints_of_model_and_optimizer_round_trip(tmp_path):
    """``torch.distributed.checkpoint`` saves and loads a pipeline's model and optimizer."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    pipe = pipeline()
    optimizer = OPTIMIZERS["adam"](pipe.parameters())
    step(pipe, optimizer)
    model_state, optimizer_state = get_state_dict(pipe.module, optimizer)
    dcp.save(
        {"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path, no_dist=True
    )
    expected = step(pipe, optimizer), step(pipe, optimizer)

    other = pipeline(cuts=(1, 3))
    other(X)
    optimizer = OPTIMIZERS["adam"](other.parameters())
    model_state, optimizer_state = get_state_dict(other.module, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(
        other.module,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    assert equal(step(other, optimizer), expected[0])
    assert equal(step(other, optimizer), expected[1])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_takes_the_pipeline_itself(tmp_path):
    """It is stateful: ``dcp.save`` and ``dcp.load`` take it as it is, in other cuts too."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    pipe, other = pipeline(), pipeline(cuts=(1, 3))
    pipe(X)
    dcp.save({"model": pipe}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load({"model": other}, checkpoint_id=tmp_path, no_dist=True)
    assert same_state(other.state_dict(), pipe.state_dict())
