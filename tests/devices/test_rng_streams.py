"""Random numbers: the result depends on seed and chunks, not on schedule, threads or timing."""

import copy
import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import blockpipe as bp
from blockpipe.costs.meter import Meter
from blockpipe.devices.rng_streams import RngStreams, current, every_source, moved, replayed
from blockpipe.errors import PlanError, StateError

from ..behaviour.drawing_models import Noisy, chain, trained
from ..models import WITH_INTERLEAVED, square
from ..parameter_sets import each_value, every_pair
from ..parity import difference, plain_step
from ..stage_devices import equal, stages

CPU = torch.device("cpu")


@every_pair(
    kinds=[("torch",), ("random",), ("numpy",), ("torch", "random", "numpy")],
    schedule=WITH_INTERLEAVED[1:],
    mode=["never", "always"],
)
def test_every_schedule_draws_what_sequential_draws(kinds, schedule, mode):
    """From torch's, Python's and numpy's generators; they go on from the same states after it."""
    net, x = chain(kinds=kinds), torch.randn(8, 6)
    first, expected, then = trained(net, x, schedule="sequential")
    other, loss, now = trained(net, x, schedule=schedule, checkpoint=mode)
    assert difference(other, first, loss, expected).same
    assert now == then


def test_random_routes_are_those_of_sequential():
    """LayerDrop by random numbers: which layers are skipped does not depend on timing."""
    net, x = nn.Sequential(chain(layerdrop=0.5), nn.Linear(6, 6)), torch.randn(8, 6)
    first, expected, _ = trained(net, x, schedule="sequential")
    for schedule in WITH_INTERLEAVED[1:]:
        other, loss, _ = trained(net, x, schedule=schedule)
        assert difference(other, first, loss, expected).same


def test_one_microbatch_draws_what_the_plain_loop_draws():
    """Its stream is the generator's own."""
    net, x = chain(), torch.randn(8, 6)
    piped, loss, after = trained(net, x, chunks=1, devices=["cpu:0"] * 3)
    plain = copy.deepcopy(net)
    torch.manual_seed(7)
    for _ in range(2):
        expected = plain_step(plain, (x,), {}, None, square, 1, device="cpu")
    assert difference(piped, plain, loss, expected).same
    assert after[0] == float(torch.rand(()))


def test_microbatches_and_steps_draw_different_numbers():
    """No two streams are alike, and a second step's are not the first's."""
    drawn = []

    class Drawing(nn.Linear):
        def forward(self, x):
            drawn.append(float(torch.rand(())))
            return super().forward(x)

    net = bp.begin_blocks(nn.Sequential(Drawing(6, 6), Drawing(6, 6)), {"1": 1})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, sample=(torch.randn(2, 6),))
    drawn.clear()
    for _ in range(3):
        pipe.forward_backward(torch.randn(8, 6), loss_fn=square)
    assert len(set(drawn)) == len(drawn) == 3 * 4 * 2


def test_steps_differ_where_the_first_microbatch_draws_nothing():
    """Else the others would draw the same numbers in each step."""
    drawn = []

    class Drawing(nn.Linear):
        def forward(self, x):
            if bp.current_microbatch() != 0:
                drawn.append(float(torch.rand(())))
            return super().forward(x)

    net = bp.begin_blocks(nn.Sequential(Drawing(6, 6), Drawing(6, 6)), {"1": 1})
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2, sample=(torch.randn(2, 6),))
    drawn.clear()
    for _ in range(3):
        pipe.forward_backward(torch.randn(4, 6), loss_fn=square)
    assert len(set(drawn)) == len(drawn) == 6


def test_a_loss_function_that_draws():
    """Nobody has recorded it: it is watched when it runs first."""

    def noisy(output):
        return (output * torch.rand_like(output)).square().mean()

    net, x = chain(), torch.randn(8, 6)
    first, expected, then = trained(net, x, loss_fn=noisy, schedule="sequential")
    for schedule in WITH_INTERLEAVED[1:]:
        other, loss, now = trained(net, x, loss_fn=noisy, schedule=schedule)
        assert difference(other, first, loss, expected).same
        assert now == then


def test_what_draws_nothing_leaves_the_generator_alone():
    """Not a number is taken from it, in training mode too."""
    net = bp.begin_blocks(
        nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)), {"2": 1}
    )
    pipe = bp.Pipeline(net.eval(), devices=stages(2), chunks=4)
    before = torch.get_rng_state()
    for _ in range(2):
        pipe.forward_backward(torch.randn(8, 6, generator=torch.Generator()), loss_fn=square)
        assert equal(torch.get_rng_state(), before)


class Early(nn.Module):
    """Draws from Python's or numpy's generator before its first operation."""

    def __init__(self, draw):
        super().__init__()
        self.layer, self.draw = nn.Linear(6, 6), draw

    def forward(self, x):
        factor = self.draw()
        return self.layer(x * factor).tanh()


def numpys():
    return np.random.rand()  # a method of the generator itself would be copied with its module


@pytest.mark.parametrize(("kind", "draw"), [("random", random.random), ("numpy", numpys)])
@pytest.mark.parametrize("mode", ["never", "always"])
def test_what_is_drawn_right_behind_a_mark_is_of_its_stage(kind, draw, mode):
    """A hop begins with its first operation, and what its code does before that belongs to it."""
    net = bp.begin_blocks(nn.Sequential(nn.Linear(6, 6), Early(draw), Early(draw)), {"2": 1})
    x = torch.randn(8, 6)
    assert [hop.draws for hop in bp.record(net, x).hops] == [{kind}, {kind}]
    net = bp.begin_blocks(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Early(draw)), {"2": 1})
    assert [hop.draws for hop in bp.record(net, x).hops] == [set(), {kind}]
    first, expected, then = trained(net, x, schedule="sequential")
    for schedule in WITH_INTERLEAVED[1:]:
        other, loss, now = trained(net, x, schedule=schedule, checkpoint=mode)
        assert difference(other, first, loss, expected).same
        assert now == then


class Asked(nn.Module):
    """Drops out what its micro-batch asks for: the recorded one asks for nothing."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, given):
        x, wants = given
        x = self.layer(x).tanh()
        return (nn.functional.dropout(x, 0.5) if wants.any() else x), wants


@each_value(
    schedule=WITH_INTERLEAVED,
    mode=["never", "always"],
)
def test_what_the_recording_did_not_draw_is_covered_in_the_first_step(schedule, mode):
    """Every hop has its turn there; what turns out to draw has it from then on."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = Asked(), Asked(), nn.Linear(6, 6)

        def forward(self, x):
            given = self.a((x, x[:, 0] > 5))
            with bp.Block(1):
                given = self.b(given)
            with bp.Block(2):
                return self.c(given[0])

    net, x = Net(), torch.randn(8, 6)
    x[2:, 0] = 10.0
    first, expected, then = trained(net, x, 1, schedule="sequential")
    other, loss, now = trained(net, x, 1, schedule=schedule, checkpoint=mode)
    assert difference(other, first, loss, expected).same
    assert now == then
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4, schedule=schedule)
    pipe.forward_backward(x, loss_fn=square)
    assert [hop.draws for hop in pipe.recording.hops] == [{"torch"}, {"torch"}, set()]


@each_value(
    schedule=WITH_INTERLEAVED,
    p=[0.0, 0.5],
)
def test_a_step_that_fails_draws_nothing(schedule, p):
    """Generators are where they were, as the parameters' gradients are: it can be tried again."""

    class Fails(nn.Module):
        def forward(self, x):
            x = nn.functional.dropout(x, p)
            if bp.current_microbatch() == 2:
                raise ValueError("on purpose")
            return x

    net = nn.Sequential(nn.Linear(6, 6), bp.BeginBlock(Fails(), stage=1))
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
    torch.rand(3, device=stages(2)[1])  # no two generators are in one state
    before = current(every_source())
    with pytest.raises(ValueError, match="on purpose"):
        pipe.forward_backward(torch.randn(8, 6, generator=torch.Generator()), loss_fn=square)
    assert not moved(before)


def test_a_loss_that_draws_is_no_stage_that_draws():
    net = chain(kinds=())
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4)
    pipe.forward_backward(
        torch.randn(8, 6), loss_fn=lambda y: (y * torch.rand(6, device=y.device)).sum()
    )
    assert [hop.draws for hop in pipe.recording.hops] == [set(), set(), set()]


def test_a_generator_that_two_stages_draw_from_is_refused():
    """Which of them comes first would depend on timing. In the plain loop's order it is allowed."""
    generator = torch.Generator()

    class Draws(nn.Linear):
        def forward(self, x):
            return super().forward(x) * torch.rand(6, generator=generator).to(x.device)

    net = bp.begin_blocks(nn.Sequential(Draws(6, 6), Draws(6, 6)), {"1": 1})
    x = torch.randn(8, 6)
    for schedule in WITH_INTERLEAVED[1:]:
        pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
        with pytest.raises(StateError, match=r"a torch.Generator is drawn from on hops \[0, 1\]"):
            pipe.forward_backward(x, loss_fn=square)
    plain = copy.deepcopy(net)
    generator.manual_seed(5)
    expected = plain_step(plain, (x,), {}, None, square, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule="sequential")
    pipe.summary(x)
    generator.manual_seed(5)
    loss = pipe.forward_backward(x, loss_fn=square).loss
    assert difference(net, plain, loss, expected).same
    with pytest.raises(PlanError, match="several stages draw from one generator"):
        bp.balance(bp.remove_blocks(net), x, 2, measure=False)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_attention_without_dropout_does_not_draw(p):
    """The operation could: whether it does is in its arguments."""
    drew = []
    q = torch.randn(2, 4, 8, 16, requires_grad=True)
    with Meter(None, drew=drew.append):
        nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=p)
    assert bool(drew) == (p > 0)


def test_a_generator_that_is_passed_goes_through_the_microbatches_in_order():
    """It is state of the model's: a lane takes micro-batches in order."""

    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.rand(6, generator=self.generator).to(x.device)

    nets = []
    for schedule in WITH_INTERLEAVED:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), bp.BeginBlock(Own(6, 6), stage=1))
        pipe = bp.Pipeline(net, devices=stages(2), chunks=4, schedule=schedule)
        net[1].generator = torch.Generator().manual_seed(3)
        x = torch.linspace(0, 1, 48).view(8, 6)
        pipe.summary(x)
        net[1].generator.manual_seed(3)
        nets.append((net, pipe.forward_backward(x, loss_fn=square).loss))
    for net, loss in nets[1:]:
        assert difference(net, nets[0][0], loss, nets[0][1]).same


def test_a_failed_step_can_be_followed_by_another():
    """No thread keeps the turn to draw."""

    class Fails(Noisy):
        fails = True

        def forward(self, x):
            x = super().forward(x)
            if self.fails and bp.current_microbatch() == 1:
                raise KeyError("once")
            return x

    net = bp.begin_blocks(nn.Sequential(Noisy(), Fails(), Noisy()), {"1": 1, "2": 2})
    pipe = bp.Pipeline(net, devices=stages(3), chunks=4)
    with pytest.raises(KeyError, match="once"):
        pipe.forward_backward(torch.randn(8, 6), loss_fn=square)
    Fails.fails = False
    done = threading.Thread(
        target=pipe.forward_backward, args=(torch.randn(8, 6),), kwargs={"loss_fn": square}
    )
    done.start()
    done.join(60)
    assert not done.is_alive()


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=20),
    st.randoms(use_true_random=False),
)
@settings(deadline=None)
def test_streams_do_not_depend_on_the_order(visits, rng):
    """Each micro-batch's numbers are the same in whatever order they take turns."""
    begin = torch.random.get_rng_state()

    def numbers(order):
        torch.set_rng_state(begin)
        streams = RngStreams([CPU], 4)
        drawn = {m: [] for m in range(4)}
        for m, count in order:
            streams.enter(m, [CPU])
            drawn[m] += torch.rand(count).tolist()
            streams.leave(m)
        streams.finish()
        return drawn, float(torch.rand(()))

    queues = {m: [v for v in visits if v[0] == m] for m in range(4)}
    shuffled = []
    while any(queues.values()):
        m = rng.choice([m for m, queue in queues.items() if queue])
        shuffled.append(queues[m].pop(0))
    assert numbers(visits) == numbers(shuffled)


def test_replaying_leaves_no_trace():
    """The same numbers again, and then as if nothing had been drawn."""
    sources = [CPU, "random", "numpy"]
    states = current(sources)

    def draw():
        return float(torch.rand(())), random.random(), float(np.random.rand())

    first = draw()
    expected = current(sources)
    with replayed(states):
        assert draw() == first
    after = draw()
    with replayed(expected):
        assert draw() == after
