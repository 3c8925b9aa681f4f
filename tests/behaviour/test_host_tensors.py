"""What the user's code has on the host stays there; what follows the forward is what a model on one
accelerator would find on it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import blockpipe as bp

from ..alike import DEVICE, check_alike, ran, same
from ..models import ENGINES, Scripted, square
from ..parity import plain_step
from ..stage_devices import is_simulated, stages

B = bp.Block
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
TABLE = torch.linspace(0, 1, 8)
NUMBER = torch.tensor(2.0)
HERE = {torch.device(name) for name in stages(3)}


def moved_by_the_user(s, x):
    """``.cpu()`` on one stage, read as numpy on another."""
    with B(0):
        h = s.a(x)
        lengths = (h[:, 0].abs() * 3).long().clamp(0, 7).cpu()
    with B(1):
        assert lengths.device.type == "cpu"
        assert lengths.is_cpu
        assert lengths.get_device() == -1
        rows = [TABLE[n] for n in lengths.tolist()]
        h = s.b(h) * torch.stack(rows)[:, None].to(h.device)
    with B(2):
        picked = torch.from_numpy(TABLE.numpy()[lengths.numpy()])
        return s.c(h) + picked[:, None].to(h.device)


def made_without_a_device(s, x):
    """As torch makes it, so the user has it: it indexes, and is moved where it is needed."""
    with B(0):
        h = s.a(x)
        order = torch.arange(len(x)).flip(0)
    with B(1):
        h = s.b(h)[order]
        order = order + 0
    with B(2):
        assert order.device.type == "cpu"
        return s.c(h) * order.to(h.device)[:, None]


def with_a_gradient(s, x):
    """It is cut at every crossing, and its gradient goes back, all on the host."""
    with B(0):
        h = s.a(x)
        held = h.cpu()
    with B(1):
        held = held * held.exp()
        h = s.b(h) + held.sum().to(h.device)
    with B(2):
        h = s.c(h) + (held * 2).to(h.device)
    with B(0):
        return h + held.tanh().to(h.device)


def from_outside(s, x):
    """A global table and a number: left where they are."""
    with B(0):
        h = s.a(x) * NUMBER
    with B(1):
        table = TABLE.cpu()
        index = (h[:, 0].abs() * 3).long().clamp(0, 7).cpu()
        h = s.b(h) * table[index].to(h.device)[:, None] * NUMBER
    with B(2):
        assert TABLE.device.type == "cpu"
        assert table is TABLE
        return s.c(h) * TABLE.contiguous()[:4].to(h.device)


LEAF = torch.ones(4, requires_grad=True)


def leaf_from_outside(s, x):
    """It needs a gradient, and stays all the same."""
    with B(0):
        h = s.a(x)
    with B(1):
        h = s.b(h) * (LEAF * 2).to(h.device)
    with B(2):
        assert (LEAF + torch.arange(4)).device.type == "cpu"
        return s.c(h) * LEAF.exp().to(h.device)


def in_containers(s, x):
    """A module gets it in a list, and as a keyword."""

    class Picks(nn.Module):
        def forward(self, h, extra):
            assert extra["lengths"][0].device.type == "cpu"
            return h * extra["lengths"][0].sum().item()

    picks = Picks()
    with B(0):
        h = s.a(x)
        extra = {"lengths": [torch.arange(4)]}
    with B(1):
        h = picks(s.b(h), extra=extra)
    with B(2):
        return torch.cat([s.c(h), torch.stack([extra["lengths"][0] * 1.0] * len(x)).to(h.device)])


def written_in_place(s, x):
    """On any stage; every later reader sees it."""
    with B(0):
        h = s.a(x)
        held = torch.zeros(4)
    with B(1):
        held += 2
        held[0] = 3
        h = s.b(h) * held.clone().to(h.device)
    with B(2):
        held.mul_(2)
        h = s.c(h)
    with B(0):
        return h * held.to(h.device)


def where_it_is(s, x):
    """Each of the questions has one answer: where this stage would read the tensor."""
    with B(0):
        h, held = s.a(x), torch.zeros(3)
    for stage, layer in ((1, s.b), (2, s.c), (0, s.a)):
        with B(stage):
            y = layer(h)
            for tensor in (h, x, s.a.weight, s.b.weight):
                assert tensor.device == y.device
                assert tensor.get_device() == torch.get_device(y)
                assert tensor.is_cpu == y.is_cpu
            assert held.device.type == "cpu"
            h = h + y.tanh()
    return h


def packed(s, x):
    """``pack_padded_sequence`` wants the lengths on the host."""
    with B(0):
        h = s.a(x).unsqueeze(1) * torch.ones(3, 1, device=x.device)
        lengths = (x[:, 0] > 0).long() + 2
    with B(1):
        sequence = pack_padded_sequence(
            s.b(h), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
    with B(2):
        padded, found = pad_packed_sequence(sequence, batch_first=True, total_length=3)
        assert found.device.type == "cpu"
        return s.c(padded).tanh()


def recomputed(s, x):
    """A checkpoint reads it again as it was."""
    with B(0):
        h = s.a(x)
        held = h.detach().cpu()
    with B(1):

        def body(t):
            assert held.device.type == "cpu"
            return s.b(t).tanh() * held.exp().to(t.device)

        y = checkpoint(body, h, use_reentrant=False)
    with B(2):
        return s.c(y)


FORWARDS = [
    moved_by_the_user,
    made_without_a_device,
    with_a_gradient,
    from_outside,
    leaf_from_outside,
    in_containers,
    written_in_place,
    where_it_is,
    packed,
    recomputed,
]


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("forward", FORWARDS)
def test_it_stays_on_the_host(forward, engine):
    """The program of the plain loop on one device runs, with its gradients."""
    check_alike(Scripted(forward), X, **engine)


@pytest.mark.parametrize("schedule", ["1f1b", "uncut"])
def test_a_result_on_the_host(schedule):
    """Outputs come back where they were, and take gradients there."""

    def forward(s, x):
        with B(0):
            h = s.a(x)
        with B(1):
            y = s.b(h).cpu()
        with B(2):
            return s.c(h), y.exp()

    net = Scripted(forward)
    plain = copy.deepcopy(net).to(DEVICE)
    one, two = plain(X.to(DEVICE))
    (one.square().mean().cpu() + two.square().mean()).backward()
    pipe = bp.Pipeline(net, devices=stages(3), chunks=2, schedule=schedule)
    first, second = pipe(X)
    assert first.device == pipe.output_device
    assert second.device.type == "cpu"
    (first.square().mean().cpu() + second.square().mean()).backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad.cpu())


def test_a_loss_on_the_host():
    """The user's loss function may leave the device."""
    net = Scripted(lambda s, x: s.c(s.b(s.a(x)).tanh()))
    bp.begin_blocks(net, {"b": 1, "c": 2})
    plain = copy.deepcopy(net).to(DEVICE)

    def loss_fn(output, target):
        return F.mse_loss(output.cpu(), target.cpu())

    expected = plain_step(plain, (X.to(DEVICE),), {}, X.to(DEVICE), loss_fn, 3)
    pipe = bp.Pipeline(net, devices=stages(3), chunks=3)
    loss = pipe.forward_backward(X, target=X, loss_fn=loss_fn).loss
    same(net, plain, (loss, expected))


def test_what_another_method_makes_on_the_host_stays_there():
    """``pipe.run``: what it makes on the host stays there, between its calls of the model too."""

    class Generating(Scripted):
        def generate(self, x):
            seen = torch.zeros(4)
            for _ in range(3):
                x = self(x)
                seen += x.detach().cpu().sum(0)
            return x, seen

    def forward(s, x):
        with B(0):
            h = s.a(x)
        with B(1):
            return s.b(h).tanh() * NUMBER

    net = Generating(forward)
    plain = copy.deepcopy(net).to(DEVICE)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, sample=(X,))
    with torch.no_grad():
        expected, expected_seen = plain.generate(X.to(DEVICE))
        found, seen = pipe.run(net.generate, X)
    assert seen.device.type == "cpu"
    torch.testing.assert_close((found.cpu(), seen), (expected.cpu(), expected_seen))


def test_a_constant_that_an_operation_returns_belongs_to_nobody():
    """``to``, ``contiguous`` and ``cpu`` return what they are given where there is nothing to do:
    another micro-batch may read it on another stage."""
    table = torch.linspace(0, 1, 4)

    def forward(s, x):
        with B(0):
            h = s.a(x) * table.contiguous().to(x.device)
        with B(1):
            return s.b(h) * table.cpu().to(h.device)

    for isolate in (False, True):
        check_alike(Scripted(forward), X, count=2, chunks=3, isolate=isolate)


@pytest.mark.skipif(not is_simulated(), reason="needs accelerators beside the CPU: --simulated")
class TestMixed:
    """Some stages on the CPU: what they compute follows the forward; what it asks for on the host
    in so many words stays there."""

    @pytest.mark.parametrize("schedule", ["1f1b", "uncut"])
    def test_glue_on_a_stage_on_the_cpu_follows(self, schedule):
        """Arithmetic and views on the way, and a layer of the accelerator behind them."""

        def forward(s, x):
            with B(0):
                h = s.a(x)
            with B(1):
                p = (h * 2).view_as(h)[:]
            with B(0):
                return s.b(p) + h

        net = Scripted(forward)
        plain = copy.deepcopy(net)
        expected = plain_step(plain, (X,), {}, None, square, 3)
        piped, loss = ran(net, X, devices=[stages(1)[0], "cpu"], schedule=schedule)
        same(piped, plain, (loss, expected))

    @pytest.mark.parametrize("order", [0, 1])
    def test_a_recomputed_module_writes_to_what_it_gets_from_another_kind(self, order):
        """The recording has seen that it does: its input is kept from before."""
        net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)))
        bp.begin_blocks(net, {"1": 1})
        plain = copy.deepcopy(net)
        expected = plain_step(plain, (X,), {}, None, square, 3)
        devices = [stages(1)[0], "cpu"][:: -1 if order else 1]
        piped, loss = ran(net, X, devices=devices, checkpoint="always")
        same(piped, plain, (loss, expected))

    def test_what_a_stage_on_the_cpu_computes_follows(self):
        """Also where its own device was asked for."""

        def forward(s, x):
            with B(0):
                h = s.a(x)
                ones = torch.ones(h.shape, device=h.device)
                plain_ones = torch.ones(4)
            with B(1):
                assert h.device == ones.device == plain_ones.device == s.b.weight.device
                h = s.b(h) * ones + plain_ones
            with B(2):
                return s.c(h) + ones

        net = Scripted(forward)
        plain = copy.deepcopy(net)
        expected = plain_step(plain, (X,), {}, None, square, 3, device="cpu")
        for schedule in ("1f1b", "uncut"):
            for devices in (["cpu", *stages(2)], ["cpu", stages(2)[1], "cpu"]):
                piped, loss = ran(net, X, devices=devices, schedule=schedule)
                same(piped, plain, (loss, expected))

    @pytest.mark.parametrize(
        "ask",
        [
            lambda h: h.cpu(),
            lambda h: h.to("cpu"),
            lambda h: h.to(device="cpu"),
            lambda h: torch.zeros(4, device="cpu") + h.detach().cpu(),
            lambda h: torch.ones(6, 4, device=torch.device("cpu")),
            lambda h: torch.ones(4, device=h.cpu().device) * h.detach().cpu(),
        ],
    )
    @pytest.mark.parametrize("schedule", ["1f1b", "uncut"])
    def test_what_is_asked_for_on_the_host_stays(self, ask, schedule):
        """And the tensor that it was asked of follows all the same."""

        def forward(s, x):
            with B(0):
                h = s.a(x)
                held = ask(h)
            with B(1):
                assert held.device.type == "cpu"
                y = s.b(h) * held[: len(x)].to(h.device)
            with B(2):
                return s.c(y) + h + held.sum().item()

        net = Scripted(forward)
        plain = copy.deepcopy(net)
        expected = plain_step(plain, (X,), {}, None, square, 3)
        piped, loss = ran(net, X, devices=["cpu", *stages(2)], schedule=schedule)
        same(piped, plain, (loss, expected))

    @pytest.mark.parametrize("schedule", ["1f1b", "uncut"])
    def test_what_a_stage_on_the_cpu_computes_from_what_stays_stays(self, schedule):
        """As an accelerator's stage would have it on the host."""

        def forward(s, x):
            with B(0):
                h = s.a(x)
                held = h.detach().cpu()
            with B(1):
                h, twice = s.b(h), held * 2
            with B(2):
                assert twice.device.type == "cpu"
                return s.c(h) * twice.to(h.device)

        net = Scripted(forward)
        plain = copy.deepcopy(net)
        expected = plain_step(plain, (X,), {}, None, square, 3)
        devices = [stages(2)[0], "cpu", stages(2)[1]]
        piped, loss = ran(net, X, devices=devices, schedule=schedule)
        same(piped, plain, (loss, expected))

    def test_a_tensor_of_another_device_made_outside(self):
        """It follows, a number in a tensor too: two accelerators never read each other's."""
        scale = torch.ones(4, device=stages(1)[0]) * 2
        number = torch.tensor(3.0, device=stages(1)[0])

        def forward(s, x):
            with B(0):
                h = s.a(x) * scale * number
            with B(1):
                assert scale.device == number.device == s.b.weight.device
                return s.b(h) * scale * number

        for schedule in ("1f1b", "uncut"):
            net = Scripted(forward).to(DEVICE)
            pipe = bp.Pipeline(net, devices=stages(2), chunks=2, schedule=schedule)
            pipe.forward_backward(X.to(DEVICE), loss_fn=square)

    @pytest.mark.parametrize("schedule", ["1f1b", "sequential", "zb-h1", "uncut"])
    def test_a_leaf_of_another_device_that_needs_a_gradient(self, schedule):
        """It follows as well: weights of a loss that are learned, and what several stages read."""
        one, other = (torch.ones(4, device=stages(1)[0]).mul_(2).requires_grad_() for _ in "ab")

        def forward(s, x):
            with B(0):
                h = s.a(x)
            with B(1):
                h = s.b(h) * one
            with B(2):
                return s.c(h) * one

        def loss_fn(output):
            return (output.square() * other).mean()

        net = Scripted(forward).to(DEVICE)
        plain = copy.deepcopy(net)
        expected = plain_step(plain, (X,), {}, None, loss_fn, 3)
        gradients = [one.grad, other.grad]
        one.grad = other.grad = None
        pipe = bp.Pipeline(net, devices=stages(3), chunks=3, schedule=schedule)
        loss = pipe.forward_backward(X, loss_fn=loss_fn).loss
        same(net, plain, (loss, expected))
        torch.testing.assert_close([one.grad.cpu(), other.grad.cpu()], [g.cpu() for g in gradients])
