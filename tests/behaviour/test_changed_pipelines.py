"""Pipelines whose process, model or options change between two calls."""

import copy
import warnings

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.errors import BlockpipeError, PlanError

from ..models import linears, square
from ..parameter_sets import each_value
from ..parity import difference, plain_step
from ..stage_devices import assert_close, device_type, is_simulated, stages
from .pipelines import pipeline


@pytest.mark.cpu("a forked child cannot use an accelerator that its parent has used")
def test_a_forked_child_can_use_a_pipeline():
    """The pool's threads are not in the child; it makes its own. (torch itself forbids a backward
    there, once its parent has run one.)"""
    import os

    pipe = pipeline(linears(3))
    x = torch.randn(6, 4)
    pipe.forward_backward(x, loss_fn=square)
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads
        child = os.fork()
    if child == 0:
        try:
            with torch.no_grad():
                pipe(x)
            os.write(write, b"fine")
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    assert os.read(read, 9) == b"fine"
    os.close(read)


@each_value(
    how=["back", "one", "another pipeline"],
    look=["forward_backward", "call", "summary", "memory"],
)
def test_a_model_that_was_moved_is_placed_anew(how, look):
    """To export it, by hand, or by another pipeline: said, and mended."""
    model = linears(3)
    plain, x = copy.deepcopy(model), torch.randn(6, 4)
    pipe = pipeline(model)
    pipe.forward_backward(x, loss_fn=square)
    model.zero_grad()
    if how == "back":
        model.cpu()
    elif how == "one":
        model[2].cpu()
    else:
        pipeline(model, devices=stages(3)[::-1]).forward_backward(x, loss_fn=square)
        model.zero_grad()
    expected = plain_step(plain, (x,), {}, None, square, 3)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if look == "call":
            pipe(x)
        elif look != "forward_backward":
            getattr(pipe, look)(x)
        loss = pipe.forward_backward(x, loss_fn=square).loss
    assert any("placed anew" in str(w.message) for w in seen) == is_simulated()
    assert difference(model, plain, loss, expected).same
    assert [p.device for p in model.parameters()][::2] == pipe.devices


@pytest.mark.parametrize("devices", [{0: "cpu"}, {"cpu"}, map(str, ["cpu"]), (d for d in ["cpu"])])
def test_devices_without_an_order_are_refused(devices):
    """A dictionary, a set or a generator is no list of them."""
    with pytest.raises(
        PlanError, match="expected a list with one device for each stage for devices"
    ):
        bp.Pipeline(linears(3), devices=devices)


@pytest.mark.skipif(not is_simulated(), reason="needs accelerators: --simulated")
def test_a_device_without_a_number_is_the_current_one():
    """As torch has it."""
    torch.accelerator.set_device_index(2)
    try:
        assert (
            pipeline(linears(3), devices=[device_type()] * 3).devices
            == [torch.device(stages(3)[2])] * 3
        )
    finally:
        torch.accelerator.set_device_index(0)


def test_a_device_that_the_forward_names_is_told():
    """Where its own fakes, or its own tensors, are elsewhere."""

    class Names(nn.Linear):
        def forward(self, x):
            return super().forward(x.to(stages(4)[3] if is_simulated() else "meta"))

    with pytest.raises(bp.BlockpipeError, match=r"leave the move out|forward fails"):
        bp.record(nn.Sequential(nn.Linear(4, 4), Names(4, 4)), torch.randn(2, 4))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("chunks", 4),
        ("schedule", "gpipe"),
        ("in_flight", 1),
        ("checkpoint", "always"),
        ("offload", [0]),
        ("deferred_batch_norm", True),
        ("batch_dims", 1),
        ("loss_reduction", "sum"),
        ("isolate", True),
    ],
)
def test_an_option_that_is_assigned_is_that_of_the_constructor(option, value):
    """From the next step on: the same schedule, memory and loss as of a pipeline made with it."""
    found = []
    for later in (False, True):
        torch.manual_seed(0)
        parts = (nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(3))
        model = bp.begin_blocks(nn.Sequential(*parts), {"1": 1, "2": 2})
        pipe = pipeline(model, **({} if later else {option: value}))
        x = torch.randn(8, 8, 4)
        if later:
            pipe.forward_backward(x, loss_fn=square)
            pipe.zero_grad()
            setattr(pipe, option, value)
        result = pipe.forward_backward(x, loss_fn=square)
        gradients = [p.grad for p in pipe.parameters()]
        (prepared,) = pipe._preparer.known.values()
        schedule = prepared.schedule(pipe.schedule, prepared.microbatches)
        about = getattr(pipe, option), prepared.batch_norm is None, prepared.offloaded
        found.append((about, schedule, str(pipe.memory(x)), result.loss, gradients))
    (*alike, loss, gradients), (*also, other_loss, others) = found
    assert alike == also
    assert_close(loss, other_loss)
    for one, other in zip(gradients, others, strict=True):
        assert_close(one, other)


def test_what_is_assigned_is_checked():
    """As by the constructor, with the other options; the old value stays."""
    pipe = pipeline(linears(3), isolate=True)
    for option, value, message in [
        ("chunks", 0, "expected a positive integer for chunks, got 0"),
        ("in_flight", 0, "expected a positive integer or None for in_flight"),
        ("checkpoint", "sometimes", "for checkpoint, got"),
        ("offload", 3, "expected True, False or a list of stages for offload, got 3"),
        ("batch_dims", "x", "expected an integer, None, or a mapping"),
        ("schedule", "uncut", "isolate=True proves that stages are cut apart"),
        (
            "devices",
            stages(3),
            r"devices cannot be assigned .* call unplace\(\).*test_changed_pipelines.py",
        ),
        ("plan", None, "plan cannot be assigned .* set_pipeline_stage_assignment"),
        ("module", nn.Linear(1, 1), "module cannot be assigned .* make another Pipeline"),
    ]:
        before = getattr(pipe, option)
        with pytest.raises(BlockpipeError, match=message):
            setattr(pipe, option, value)
        assert getattr(pipe, option) == before


class Steered(nn.Module):
    """A number decides which of stage 0's tensors stage 1 reads: on the same route."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, step):
        with bp.Block(0):
            left = self.a(x)
            h = left.tanh()
        with bp.Block(1):
            return self.b(left if step > 4 else h) * step


def test_a_number_that_changes_at_each_call(monkeypatch):
    """It steers the forward rightly, and its recordings are bounded; a warning says why it is slow."""
    monkeypatch.setattr("blockpipe.preparation.preparer.MOST_RECORDINGS", 3)
    model = Steered()
    plain, x = copy.deepcopy(model), torch.randn(4, 4)
    pipe = pipeline(model, devices=stages(2), chunks=2)

    def train(steps):
        for step in steps:
            loss = pipe.forward_backward(x, step, loss_fn=square).loss
            expected = plain_step(plain, (x, step), {}, None, square, 2)
            assert difference(model, plain, loss, expected).same

    train(range(3))
    with pytest.warns(
        UserWarning, match=r"here \[3\]\) .* as a tensor .*test_changed_pipelines.py"
    ):
        train([3])
    train(range(4, 8))  # a warning would be an error
    assert len(pipe._preparer.known) == 3
    latest = pipe.recording
    pipe.forward_backward(x, 6, loss_fn=square)
    assert pipe.recording is not latest
    pipe.forward_backward(x, 9, loss_fn=square)
    pipe.forward_backward(x, 10, loss_fn=square)
    assert [key[0][-1][-1][-1] for key in pipe._preparer.known] == [6, 9, 10], (
        "the latest used are kept"
    )


class Joins(nn.Module):
    """Returns a weight, the same for all micro-batches, and what each has one of."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with bp.Block(0):
            h = self.a(x)
        with bp.Block(1):
            return self.b(h), self.b.weight, h.square().mean(0)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_gradients_through_each_way_of_joining(part):
    """Concatenated; the same tensor for all, whose gradient counts once; a list."""
    model = Joins()
    plain, x = copy.deepcopy(model), torch.randn(6, 4)
    outs = [plain(rows) for rows in x.split(2)]
    expected = [torch.cat([out[0] for out in outs]), outs[0][1], [out[2] for out in outs]][part]
    found = pipeline(model, devices=stages(2))(x)[part]
    for value in (found, expected):
        weighed = value if isinstance(value, list) else [value]
        sum((i + 1) * v.square().sum() for i, v in enumerate(weighed)).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if other.grad is not None:
            assert_close(one.grad.to(x.device), other.grad)
