"""What a batch's loss is made of: weights, micro-batches that count for nothing, joined numbers."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import blockpipe as bp
from blockpipe.batches.losses import own_or_mean_square
from blockpipe.errors import UsageError
from blockpipe.schedules.builders import SCHEDULES

from ..parameter_sets import every_pair
from ..parity import assert_same_gradients
from ..stage_devices import assert_close, equal, stages

IGNORED = -100
# Micro-batches of two rows: five labels count, none in the first.
LABELS = torch.tensor([IGNORED, IGNORED, 0, IGNORED, 2, 1, IGNORED, 4])


class Own(nn.Module):
    """Computes its own loss where it is given labels."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)
        self.reduction = reduction

    def forward(self, x, labels=None):
        with bp.Block(0):
            h = self.first(x).tanh()
        with bp.Block(1):
            logits = self.last(h)
            if labels is None:
                return {"logits": logits}
            loss = F.cross_entropy(logits, labels, reduction=self.reduction)
            return {"loss": loss, "logits": logits}


def labels_that_count(args, kwargs, target):
    return ((kwargs["labels"] if target is None else target) != IGNORED).sum()


def masked_mean(output, target):
    """By hand, so that nothing over nothing has gradients that are no numbers."""
    logits = output["logits"] if isinstance(output, dict) else output
    counts = (target != IGNORED).float()
    each = F.cross_entropy(logits, target.clamp(min=0), reduction="none")
    return (each * counts).sum() / counts.sum()


def piped(net, reduction, **options):
    return bp.Pipeline(net, devices=stages(2), chunks=4, loss_reduction=reduction, **options)


@pytest.mark.parametrize(("own", "reduction"), [("mean", labels_that_count), ("sum", "sum")])
def test_a_call_weighs_as_forward_backward_does(own, reduction):
    """The loss that a model returns is the whole batch's: in training, and under ``no_grad``."""
    net, x = Own(own), torch.randn(8, 6)
    plain, called = copy.deepcopy(net), copy.deepcopy(net)
    labels = LABELS.roll(1)  # in each micro-batch of two at least one counts
    expected = plain(x, labels=labels)["loss"]
    expected.backward()
    assert_close(piped(net, reduction).forward_backward(x, labels=labels).loss, expected)
    pipe = piped(called, reduction)
    loss = pipe(x, labels=labels)["loss"]
    loss.backward()
    with torch.no_grad():
        assert_close(pipe(x, labels=labels)["loss"], expected)
    assert_close(loss, expected)
    assert_same_gradients(net, plain)
    assert_same_gradients(called, plain)


def test_a_loss_reduction_that_needs_the_target():
    """A call has none: that is an error where the model returns a number, and else no matter."""
    pipe = piped(Own(), lambda args, kwargs, target: (target != IGNORED).sum())
    x = torch.randn(8, 6)
    assert pipe(x)["logits"].shape == (8, 5)
    with pytest.raises(UsageError, match="loss_reduction fails without a target"):
        pipe(x, labels=LABELS)


@pytest.mark.parametrize("loss_fn", [F.cross_entropy, masked_mean])
@pytest.mark.parametrize("schedule", [*SCHEDULES, "uncut"])
def test_a_microbatch_of_weight_0_contributes_nothing(schedule, loss_fn):
    """Neither its loss, which is no number, nor its gradients."""
    net = bp.begin_blocks(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5)), {"1": 1})
    plain, x = copy.deepcopy(net), torch.randn(8, 6)
    pipe = piped(net, labels_that_count, schedule=schedule)
    for _ in range(2):
        net.zero_grad()
        loss = pipe.forward_backward(x, target=LABELS, loss_fn=loss_fn).loss
    expected = loss_fn(plain(x), LABELS)
    expected.backward()
    assert_close(loss, expected)
    assert_same_gradients(net, plain)


def test_a_call_with_a_microbatch_of_weight_0():
    """Through the joined loss as well."""
    net, x = Own(), torch.randn(8, 6)
    plain = copy.deepcopy(net)
    loss = piped(net, labels_that_count)(x, labels=LABELS)["loss"]
    loss.backward()
    expected = plain(x, labels=LABELS)["loss"]
    expected.backward()
    assert_close(loss, expected)
    assert_same_gradients(net, plain)


def test_verify_knows_of_weight_0():
    """Its plain loop is as good."""
    net, x = Own(), torch.randn(8, 6)
    assert piped(net, labels_that_count).verify(x, labels=LABELS).ok


def test_labels_that_are_all_ignored_are_named():
    """The micro-batch, the likely cause, the remedy; nothing where all losses are no numbers."""
    net = bp.begin_blocks(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5)), {"1": 1})
    pipe, x = piped(net, "mean"), torch.randn(8, 6)
    with pytest.warns(
        UserWarning, match=r"micro-batch 0 of 4 is not a number.*test_losses\.py:\d+"
    ):
        pipe.forward_backward(x, target=LABELS, loss_fn=F.cross_entropy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.forward_backward(x, target=LABELS.clone().fill_(-100), loss_fn=F.cross_entropy)


class Means(nn.Module):
    """Returns what has no batch: a mean of the micro-batch's rows, and a weight."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x):
        with bp.Block(0):
            h = self.first(x)
        with bp.Block(1):
            return self.head(h).mean(0), self.head.bias


def test_outputs_that_are_alike_by_chance_stay_apart():
    """A head that begins at zero: each micro-batch's mean gets its gradient."""
    net, x = Means(), torch.randn(12, 6)
    plain = copy.deepcopy(net)
    pipe = piped(net, "mean")
    for _ in range(2):
        means, bias = pipe(x)
        assert len(means) == 4
        sum((mean - 1).square().sum() for mean in means).backward()
        assert equal(bias, net.head.bias)
        for part in x.chunk(4):
            (plain(part)[0] - 1).square().sum().backward()
        assert_same_gradients(net, plain)
        for model in (net, plain):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.1 * parameter.grad)


def test_a_weight_that_is_returned_gets_its_gradient_once():
    """Each micro-batch returns the same one."""
    net = Means()
    piped(net, "mean")(torch.randn(12, 6))[1].sum().backward()
    assert equal(net.head.bias.grad, torch.ones(5))


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "sequential", "uncut"])
@pytest.mark.filterwarnings("ignore:chunks=1")
def test_an_input_that_comes_twice_gets_both_gradients(schedule, chunks):
    """As two arguments, in a list, and whole for each micro-batch."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, a, b, more, scale, again):
            with bp.Block(0):
                h = self.first(a) * scale
            with bp.Block(1):
                return self.last(h + b + more[0] * more[1]) * again

    net, x, scale = Sum(), torch.randn(8, 6), torch.tensor(2.0)
    plain, given = copy.deepcopy(net), [t.clone().requires_grad_() for t in (x, scale)]
    for model in (plain, bp.Pipeline(net, devices=stages(2), chunks=chunks, schedule=schedule)):
        a, s = given
        model(a, a, [a, a], s, s).square().sum().backward()
        if model is plain:
            expected = [t.grad.clone() for t in given]
            for t in given:
                t.grad = None
    assert_close([t.grad for t in given], expected)
    assert_same_gradients(net, plain)


class First(Own):
    """Returns its loss as the first of several."""

    def forward(self, x, labels):
        found = super().forward(x, labels)
        return found["loss"], found["logits"]


def test_a_loss_that_is_the_first_output():
    """A 0-d first element is the model's own loss."""
    net, x = First("sum"), torch.randn(8, 6)
    plain = copy.deepcopy(net)
    expected = plain(x, LABELS)[0]
    expected.backward()
    assert_close(piped(net, "sum").forward_backward(x, LABELS).loss, expected)
    assert_same_gradients(net, plain)


class Accurate(Own):
    """Returns something that has no gradient before its loss."""

    def __init__(self, measure):
        super().__init__()
        self.measure = measure

    def forward(self, x, labels):
        found = super().forward(x, labels)
        right = found["logits"].argmax(-1) == labels
        return self.measure(right), found["loss"]


@pytest.mark.parametrize("measure", [torch.sum, lambda right: right.float().mean()])
def test_a_loss_when_an_accuracy_is_the_first_output_is_the_models_own(measure):
    """The accuracy was taken for it, and refused."""
    net, x, labels = Accurate(measure), torch.randn(8, 6), torch.arange(8) % 5
    plain = copy.deepcopy(net)
    expected = plain(x, labels)[1]
    expected.backward()
    assert_close(piped(net, "mean").forward_backward(x, labels).loss, expected)
    assert_same_gradients(net, plain)


def test_an_output_when_a_micro_batch_is_one_sample_is_not_taken_for_the_loss():
    """Without a loss_fn the mean of the outputs was trained, with batches of this size only."""
    net = bp.begin_blocks(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1)), {"1": 1})
    with pytest.raises(UsageError, match=r"0-d tensor for .* own loss, got one of shape \(1, 1\)"):
        piped(net, "mean").forward_backward(torch.randn(4, 6))


def test_a_complex_loss_is_refused():
    """As plain PyTorch refuses it; its real part was trained."""
    net = bp.begin_blocks(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5)), {"1": 1})
    with pytest.raises(
        UsageError, match=r"a real number for the loss, got one of torch\.complex64"
    ):
        piped(net, "mean").forward_backward(
            torch.randn(8, 6), loss_fn=lambda out: torch.complex(out.mean(), out.sum())
        )


def test_a_mapping_when_it_has_no_key_for_the_loss_is_told_which():
    with pytest.raises(UsageError, match="returned dict without a loss .*under the key 'loss'"):
        piped(Own(), "mean").forward_backward(torch.randn(8, 6))


def test_a_mean_square_of_what_has_a_gradient():
    """Where a model has no loss; other outputs are none of it."""
    a, b = torch.ones(3, requires_grad=True), torch.full((3,), 5.0)
    assert own_or_mean_square((a, b, torch.arange(3))) == 1
    with pytest.raises(UsageError, match="gradient path"):
        own_or_mean_square(b)


@every_pair(
    schedule=["1f1b", "zb-h1", "sequential", "uncut"],
    stage_of_last=[0, 1],
    chunks=[1, 3],
)
@pytest.mark.filterwarnings("ignore:chunks=1")
def test_a_target_that_needs_a_gradient_gets_it(schedule, stage_of_last, chunks):
    """A leaf and one with a graph of its own, beside one that needs none, and also an input."""
    net = nn.Sequential(nn.Linear(4, 4), bp.BeginBlock(nn.Linear(4, 4), stage=stage_of_last))
    plain, x, fixed = copy.deepcopy(net), torch.randn(6, 4), torch.randn(6, 4)
    leaf, behind = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    x.requires_grad_()

    def loss_fn(output, target):
        return sum(F.mse_loss(output, t) * (i + 1) for i, t in enumerate(target.values()))

    devices = stages(stage_of_last + 1)
    pipe = bp.Pipeline(net, devices=devices, chunks=chunks, schedule=schedule)
    for step in (loss_fn, None, None):
        target = {"leaf": leaf, "behind": behind * 2, "fixed": fixed, "x": x, "again": leaf}
        if step is not None:
            step(plain(x), target).backward()
            expected = [t.grad for t in (leaf, behind, x)]
        else:
            pipe.forward_backward(x, target=target, loss_fn=loss_fn)
            assert_close([t.grad for t in (leaf, behind, x)], expected)
        leaf.grad = behind.grad = x.grad = None


@pytest.mark.parametrize("given", ["max", 3, lambda target: 1.0])
def test_a_loss_reduction_that_is_none_is_refused_at_once(given):
    with pytest.raises(UsageError, match=r"'sum' or a callable with three arguments .*target\) ->"):
        piped(Own("mean"), given)
