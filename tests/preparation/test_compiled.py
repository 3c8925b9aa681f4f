"""``pipe.compile()``: the same results, by compiled modules that only the steps see."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe._common.threads.thread_state import intra_operation_threads
from blockpipe.errors import UsageError
from blockpipe.schedules.builders import make_schedule

from ..models import square
from ..parity import assert_same_gradients, difference, plain_step


def make_net():
    """Two stages; the border is in the glue."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    )
    return bp.begin_blocks(net, {"1": 1})


class Counting:
    """A backend of torch.compile that counts graphs and calls."""

    def __init__(self):
        self.graphs = self.calls = 0

    def __call__(self, graph, inputs):
        self.graphs += 1

        def run(*args):
            self.calls += 1
            return graph.forward(*args)

        return run


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "sequential", "uncut"])
def test_compiled_modules_run_in_the_steps_and_nowhere_else(schedule):
    """One graph a sealed module, called for each micro-batch; gradients are the plain ones."""
    net, counting = make_net(), Counting()
    plain, x = copy.deepcopy(net), torch.randn(8, 6)
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4, schedule=schedule)
    pipe.compile(backend=counting)
    for _ in range(3):
        loss = pipe.forward_backward(x, loss_fn=square).loss
        expected = plain_step(plain, (x,), {}, None, square, 4)
    assert difference(net, plain, loss, expected).same
    assert (counting.graphs, counting.calls) == (2, 3 * 4 * 2)
    net(x)
    assert counting.calls == 3 * 4 * 2, "outside of the steps the model is as it was"
    assert list(net.state_dict()) == list(plain.state_dict())
    assert "compiled: 0, 1" in str(pipe.summary())


def test_one_stage_is_compiled_whole():
    """Where nothing is cut, the whole model is one compiled module."""
    net, counting = bp.remove_blocks(make_net()), Counting()
    pipe = bp.Pipeline(net, devices=["cpu"], chunks=2)
    pipe.compile(backend=counting)
    for _ in range(2):
        pipe.forward_backward(torch.randn(4, 6), loss_fn=square)
    assert (counting.graphs, counting.calls) == (1, 2 * 2)


def test_small_models_are_compiled_too(monkeypatch):
    """The plain loop that small operations run in goes through the doors then."""
    monkeypatch.setattr("blockpipe.preparation.prepared.SMALL_OPERATION", 1.0)
    net, counting = make_net(), Counting()
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
    pipe.compile(backend=counting)
    for _ in range(3):
        pipe.forward_backward(torch.randn(4, 6), loss_fn=square)
    assert counting.calls == 3 * 2 * 2


def widening(widths):
    """A stage boundary in the middle of modules that are each of another kind."""
    pairs = list(itertools.pairwise(widths))
    net = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairs))
    return bp.begin_blocks(net, {str(len(pairs) // 2): 1})


def test_more_kinds_of_modules_than_torch_compiles_versions_of_one():
    """Each stays compiled: in the first step, on lanes with their share of the threads, without
    gradients."""
    net, counting = widening([2, 3, 4, 5, 6]), Counting()
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
    pipe.compile(backend=counting)
    x = torch.randn(4, 2)
    with torch._dynamo.config.patch(recompile_limit=2), intra_operation_threads(2):
        for step in range(1, 4):
            pipe.forward_backward(x, loss_fn=square)
            assert (counting.graphs, counting.calls) == (4, step * 2 * 4)
        with torch.no_grad():
            pipe(x)
    assert counting.calls == 4 * 2 * 4
    assert str(pipe.summary()).endswith("note: compiled: 0, 1, 2, 3")


def test_modules_of_one_kind_share_what_is_compiled():
    """A deep model of like blocks is compiled once."""
    net, counting = widening([4] * 7), Counting()
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
    pipe.compile(backend=counting)
    pipe.forward_backward(torch.randn(4, 4, requires_grad=True), loss_fn=square)
    assert (counting.graphs, counting.calls) == (1, 2 * 6)


HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda m, given, result: result * 2),
    "before": lambda m: m.register_forward_pre_hook(lambda m, given: (given[0] * 2,)),
    "before backward": lambda m: m.register_full_backward_pre_hook(
        lambda m, given: (given[0] * 2,)
    ),
}


class Logs(nn.Sequential):
    """Asks for a value, so that torch compiles the rest of its forward apart."""

    def forward(self, x):
        self.level = x.detach().mean().item()
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # a hook of a backward
@pytest.mark.parametrize("kind", [nn.Sequential, Logs])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("block", [0, 1, 3])
@pytest.mark.parametrize("add", HOOKS.values(), ids=HOOKS)
def test_a_hook_inside_of_one_of_several_like_modules_runs_there_alone(add, block, at, kind):
    """What is compiled runs the hooks that are inside, and torch does not compare them: like
    modules ran those of the one that was compiled first."""
    blocks = [kind(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
    net = bp.begin_blocks(nn.Sequential(*blocks), {"2": 1})
    plain, x = copy.deepcopy(net), torch.randn(4, 4)
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
    pipe.compile(backend="eager")
    for step in range(3):
        if step == at:
            add(blocks[block][0])
            add(plain[block][0])
        loss = pipe.forward_backward(x, target=x, loss_fn=mse_loss).loss
        expected = plain_step(plain, (x,), {}, x, mse_loss, 2)
        torch.testing.assert_close(loss, expected)
        assert_same_gradients(net, plain)
    notes = [line for line in str(pipe.summary()).splitlines() if "have hooks" in line]
    assert notes == [f"note: not compiled, for modules inside of them have hooks: {block}"]


class Counted(nn.Linear):
    """Code that is compiled for one value of ``calls`` does not fit the next."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 if self.calls < 1000 else 2)


def test_the_summary_names_what_runs_uncompiled():
    """torch gives up on a module that would be compiled anew at each call."""
    net = bp.begin_blocks(nn.Sequential(nn.Linear(2, 2), Counted(2, 2)), {"1": 1})
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4)
    pipe.compile(backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(2):
            pipe.forward_backward(torch.randn(4, 2), loss_fn=square)
    summary = str(pipe.summary())
    assert "note: compiled: 0\n" in summary
    assert "run uncompiled: 1, some calls or all" in summary


class Steps(nn.Linear):
    """Counts its forwards, as the page on memory says, and torch compiles it for each count."""

    calls = 0

    def forward(self, x):
        if not bp.is_recomputing():
            self.calls += 1
        return torch.tanh(super().forward(x)) + x


def test_a_recomputation_says_that_torch_may_have_stopped_compiling():
    """It compiled a forward, and no more its recomputation, which saves other tensors."""
    net = bp.begin_blocks(nn.Sequential(*[Steps(4, 4) for _ in range(4)]), {"2": 1})
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4, checkpoint="always")
    pipe.compile(backend="aot_eager")

    def four_steps():
        for _ in range(4):
            pipe.forward_backward(torch.randn(8, 4), loss_fn=square)

    with pytest.raises(bp.BlockpipeError, match="torch has stopped compiling it in between"):
        four_steps()


def test_compiling_a_pipeline_that_runs_already():
    """From the next step on, in recordings made later too."""
    net, counting = make_net(), Counting()
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
    x = torch.randn(4, 6)
    pipe.forward_backward(x, loss_fn=square)
    pipe.compile(backend=counting)
    pipe.forward_backward(x, loss_fn=square)
    assert counting.calls == 2 * 2
    with torch.no_grad():
        found = pipe.eval()(x)
    assert counting.calls == 2 * 2 * 2
    assert torch.equal(found, net(x))


def test_a_compiled_hop_is_not_split():
    """Its backward is one function; the summary says so."""
    pipe = bp.Pipeline(make_net(), devices=["cpu"] * 2, chunks=2, schedule="zb-h1")
    x = torch.randn(4, 6)
    pipe.forward_backward(x, loss_fn=square)
    assert pipe.recording.splits_backward == [False, True]
    pipe.compile(backend="eager")
    assert pipe.recording.hops[1].whole == "compiled module 1"


def test_as_many_captures_as_micro_batches_in_flight():
    """An own schedule runs as it says, however small the model: each micro-batch has its slot."""
    own = make_schedule("gpipe", [0, 1], 4)
    for schedule, slots in ((own, 4), ("gpipe", 4), ("1f1b", 2), ("sequential", 1)):
        pipe = bp.Pipeline(make_net(), devices=["cpu"] * 2, chunks=4, schedule=schedule)
        pipe.compile(backend="eager")
        pipe.forward_backward(torch.randn(8, 6), loss_fn=square)
        (prepared,) = pipe._preparer.known.values()
        assert prepared.compiled.captures.slots == slots
    one_lane = make_schedule("gpipe", [0, 0], 4)
    pipe = bp.Pipeline(make_net(), devices=["cpu:0"] * 2, chunks=4, schedule=one_lane)
    pipe.compile(backend="eager")
    pipe.forward_backward(torch.randn(8, 6), loss_fn=square)
    (prepared,) = pipe._preparer.known.values()
    assert prepared.compiled.captures.slots == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_graphs_need_cuda():
    """Said at once."""
    pipe = bp.Pipeline(make_net(), devices=["cpu"] * 2)
    with pytest.raises(UsageError, match="cuda_graphs=True needs a CUDA device"):
        pipe.compile(cuda_graphs=True)


@pytest.mark.slow
def test_inductor_gives_plain_gradients_to_rounding():
    """The default backend, to its rounding."""
    net = make_net()
    plain, x = copy.deepcopy(net), torch.randn(8, 6)
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4)
    pipe.compile()
    for _ in range(2):
        loss = pipe.forward_backward(x, loss_fn=square).loss
        expected = plain_step(plain, (x,), {}, None, square, 4)
    assert difference(net, plain, loss, expected).gradients < 1e-6


class Holding(nn.Module):
    """A module of the user's that holds a pipeline, with layers before and after it."""

    def __init__(self, net):
        super().__init__()
        self.pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=4)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(2, 2)

    def forward(self, x):
        return self.last(self.pipe(self.first(x))).relu()


def test_a_compiled_module_runs_the_pipeline_that_it_holds_as_it_is():
    """The compiler takes what is around the pipeline, and gradients are those without it."""
    counting = Counting()
    model, x = Holding(make_net()), torch.randn(8, 6)
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend=counting)
    for _ in range(3):
        square(compiled(x)).backward()
        square(plain(x)).backward()
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad, expected.grad)
    assert counting.calls == 3 * 2


def test_a_compiled_step_runs_the_pipeline_as_it_is():
    """``forward_backward`` and ``run`` in a function that the user compiles."""
    net, counting, x = make_net(), Counting(), torch.randn(8, 6)
    plain, pipe = copy.deepcopy(net), bp.Pipeline(net, devices=["cpu"] * 2, chunks=4)

    @torch.compile(backend=counting)
    def step(x):
        loss = pipe.forward_backward(x * 2, loss_fn=square).loss
        return loss, pipe.run(pipe.module, x * 3) + 1

    loss, output = step(x)
    expected = plain_step(plain, (x * 2,), {}, None, square, 4)
    assert difference(net, plain, loss, expected).same
    assert torch.equal(output, net(x * 3) + 1)
    assert counting.graphs > 0
