"""Copies of a pipeline in one process: one set of parameters, and the gradients of the whole batch."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import blockpipe as bp
from blockpipe.errors import PlanError, RecordingError, UsageError
from blockpipe.replicas import Replicas

from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close, equal, host, stages


def make_net(middle: nn.Module | None = None) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 8), middle or nn.ReLU(), nn.Linear(8, 2))
    return bp.begin_blocks(net, {"2": 1})


def groups(copies: int = 2) -> list[list[str]]:
    """Two stages for each copy, on devices of their own."""
    devices = stages(2 * copies)
    return [devices[2 * copy : 2 * copy + 2] for copy in range(copies)]


@pytest.mark.parametrize(
    "reduction", ["mean", "sum", lambda args, kwargs, target: len(target) ** 2]
)
@pytest.mark.parametrize("copies", [1, 2, 3])
def test_training_is_the_plain_loops(copies, reduction):
    """Weights after some steps; to rounding, for each copy sums up its own share first. The batch
    is uneven, and smaller in the last step than there are copies."""
    net = make_net()
    plain = copy.deepcopy(net)
    many = Replicas(net, groups(copies), chunks=2, loss_reduction=reduction)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.05) for model in (net, plain)]
    for size in (7, 7, 2 if copies == 3 else 5):
        x, y = torch.randn(size, 4), torch.randint(0, 2, (size,))
        for optimizer in optimizers:
            optimizer.zero_grad()
        found = many.forward_backward(x, target=y, loss_fn=F.cross_entropy, return_outputs=True)
        # A callable weighs the shares, and in each of them the micro-batches.
        expected = _nested_step(plain, x, y, reduction, copies)
        assert_close(found.loss, expected)
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert_close(one, other, rtol=1e-5, atol=1e-6)


def _nested_step(plain, x, y, reduction, copies):
    weighted = []

    def loss_fn(output, target):
        return F.cross_entropy(output, target) * weighted[0]

    total = 0
    shares = [*zip(x.tensor_split(copies), y.tensor_split(copies), strict=True)]
    shares = [(a, b) for a, b in shares if len(a)]
    counts = [reduction((), {}, b) if callable(reduction) else len(b) for _, b in shares]
    for (a, b), count in zip(shares, counts, strict=True):
        weighted[:] = [1 if reduction == "sum" else count / sum(counts)]
        total = total + plain_step(plain, (a,), {}, b, loss_fn, 2, reduction)
    return total


def test_gradients_add_up_and_the_copies_have_none():
    net = make_net()
    two = Replicas(net, groups(), chunks=2)
    x = torch.randn(8, 4)
    two.forward_backward(x, loss_fn=torch.mean)
    once = [host(p.grad).clone() for p in net.parameters()]
    two.forward_backward(x, loss_fn=torch.mean)
    for parameter, gradient in zip(net.parameters(), once, strict=True):
        assert_close(parameter.grad, 2 * gradient)
    assert all(p.grad is None for p in two.pipes[1].module.parameters())


def test_a_share_that_counts_for_nothing_adds_nothing():
    """Though its loss is no number."""
    net = make_net()
    plain = copy.deepcopy(net)
    two = Replicas(
        net, groups(), chunks=2, loss_reduction=lambda args, kwargs, target: (target >= 0).sum()
    )
    x, y = torch.randn(8, 4), torch.tensor([-1, -1, -1, -1, 0, 1, 0, 1])
    found = two.forward_backward(
        x, target=y, loss_fn=lambda o, t: F.cross_entropy(o, t, ignore_index=-1)
    )
    loss = F.cross_entropy(plain(x), y, ignore_index=-1)
    loss.backward()
    assert_close(found.loss, loss.detach())
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert_close(one.grad, other.grad)


def test_inputs_get_their_gradients():
    """Each copy gives its share's."""
    net = make_net()
    x = torch.randn(6, 4, requires_grad=True)
    plain = copy.deepcopy(net)
    many = Replicas(net, groups(), chunks=2, loss_reduction="sum")
    many.forward_backward(x, loss_fn=torch.sum)
    found, x.grad = x.grad, None
    plain(x).sum().backward()
    assert_close(found, x.grad)


def test_copies_run_at_the_same_time():
    """From the second step on: each waits for the other in its forward."""
    barrier = threading.Barrier(2, timeout=20)

    class Meets(nn.Module):
        meets = bytearray(1)  # whose content nobody compares

        def forward(self, x):
            if self.meets[0]:
                barrier.wait()
            return x

    net = make_net(Meets())
    two = Replicas(net, groups(), chunks=2)
    x = torch.randn(4, 4)
    two.forward_backward(x, loss_fn=torch.mean)
    Meets.meets[0] = 1
    two.forward_backward(x, loss_fn=torch.mean)


def test_threads_of_copies_do_not_end_with_the_interpreter():
    """A thread that ends then gives back what torch keeps for it, and the process aborts."""
    before = set(threading.enumerate())
    two = Replicas(make_net(), groups(), chunks=2)
    for _ in range(2):
        two.forward_backward(torch.ones(8, 4), loss_fn=torch.mean)
    assert all(thread.daemon for thread in set(threading.enumerate()) - before)


def test_random_numbers_depend_on_the_seed_alone():
    """And are other ones in each copy, and in the next step."""
    net = make_net(nn.Dropout())
    two = Replicas(net, groups(), chunks=2, batch_dims={"output": None})
    x = torch.ones(8, 4)

    def drawn():
        return host(two.forward_backward(x, loss_fn=torch.mean, return_outputs=True).outputs)

    drawn()
    torch.manual_seed(3)
    first, second = drawn(), drawn()
    torch.manual_seed(3)
    for one, other in zip(first, drawn(), strict=True):
        assert all(equal(a, b) for a, b in zip(one, other, strict=True))
    parts = [*first[0], *first[1], *second[0], *second[1]]
    for i, part in enumerate(parts):
        assert not any(equal(part, other) for other in parts[:i])


def test_modes_frozen_parameters_and_values_reach_the_copies():
    net = make_net(nn.BatchNorm1d(8))
    two = Replicas(net, groups(), chunks=2)
    x = torch.randn(8, 4)
    two.forward_backward(x, loss_fn=torch.sum)
    net[0].weight.requires_grad_(False)
    net.eval()
    with torch.no_grad():
        net[2].bias.fill_(100.0)
        assert host(two(x)).min() > 50
    plain = copy.deepcopy(net).cpu()
    with torch.no_grad():
        assert_close(two(x), plain(x))
    net.zero_grad()
    two.forward_backward(x, loss_fn=torch.sum)
    assert net[0].weight.grad is None


class Settings:
    """Numbers of the user's own object, and a list of some."""

    def __init__(self) -> None:
        self.scale, self.shifts = 1.0, [0.0, 0.0]


class Set(nn.Module):
    """A module that reads what is set on it, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.settings, self.calls = 1.0, Settings(), 0
        self.mask, self.dropout = torch.ones(8), nn.Dropout(0.0)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        self.calls += 1
        h = self.norm(x * self.scale) * self.mask.to(x.device) + self.settings.shifts[1]
        return self.dropout(h) * self.settings.scale


def _doubles(module, args, output):
    return output * 2


def _doubles_gradients(module, inputs, outputs):
    return tuple(gradient * 2 for gradient in inputs)


SETS = {
    "number": lambda net: setattr(net[1], "scale", 3.0),
    "object": lambda net: setattr(net[1].settings, "scale", 3.0),
    "list": lambda net: net[1].settings.shifts.__setitem__(1, 3.0),
    "eps": lambda net: setattr(net[1].norm, "eps", 1.0),
}
CHANGES = {
    "mask": lambda net: net[1].mask.mul_(3.0),
    "another object": lambda net: setattr(net[1], "settings", Settings()),
    "new attribute": lambda net: (setattr(net[1], "more", 1), setattr(net[1], "scale", 2.0)),
    "forward hook": lambda net: net[0].register_forward_hook(_doubles),
    "backward hook": lambda net: net[2].register_full_backward_hook(_doubles_gradients),
    "forward": lambda net: setattr(net[2], "forward", lambda x: x[:, :2] * 2.0),
    "layer": lambda net: net.__setitem__(2, bp.BeginBlock(nn.Linear(8, 2, bias=False), stage=1)),
    "no bias": lambda net: setattr(net[0], "bias", None),
    "tied": lambda net: setattr(net[1].norm, "bias", net[1].norm.weight),
    "weight_norm": lambda net: nn.utils.parametrizations.weight_norm(net[0]),
    "buffer": lambda net: net[1].register_buffer("mask", torch.full((8,), 2.0)),
    "dtype": lambda net: net.double(),
}


def _after(change, steps=2):
    """A step before a change, and some after it, beside the plain loop's."""
    torch.manual_seed(0)
    net = make_net(Set())
    plain = copy.deepcopy(net)
    two = Replicas(net, groups(), chunks=2)
    copies = [two.pipes[1]]
    for number in range(1 + steps):
        if number == 1:
            torch.manual_seed(1)
            if change is CHANGES["buffer"]:
                del net[1].mask, plain[1].mask
            change(net)
            torch.manual_seed(1)
            change(plain)
        x, y = torch.randn(8, 4, dtype=next(net.parameters()).dtype), torch.randint(0, 2, (8,))
        net.zero_grad()
        plain.zero_grad()
        found = two.forward_backward(x, target=y, loss_fn=F.cross_entropy)
        assert_close(found.loss, plain_step(plain, (x,), {}, y, F.cross_entropy, 4))
        for one, other in zip(net.parameters(), plain.parameters(), strict=True):
            if one.grad is not None or other.grad is not None:
                assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)
        copies.append(two.pipes[1])
    return copies


@pytest.mark.parametrize("name", SETS)
def test_a_value_that_is_set_reaches_the_copies(name):
    """They stay the same ones, though each forward counts."""
    first, *later = _after(SETS[name])
    assert all(pipe is first for pipe in later)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")
@pytest.mark.parametrize("name", CHANGES)
def test_another_change_makes_the_copies_anew(name):
    """Once: the next step finds them as they should be."""
    first, *later = _after(CHANGES[name])
    assert later[0] is first
    assert later[1] is not first
    assert later[2] is later[1]


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_is_refused(kind):
    """It would see the gradients of the first copy alone."""
    net = make_net()
    two = Replicas(net, groups(), chunks=2)
    handle = getattr(net[2].weight, kind)(lambda _: None)
    with pytest.raises(UsageError, match=r"without hooks, got one on '2\.weight'.*change \.grad"):
        two.forward_backward(torch.ones(8, 4), loss_fn=torch.mean)
    handle.remove()
    two.forward_backward(torch.ones(8, 4), loss_fn=torch.mean)


def test_a_model_that_cannot_be_copied_any_more_is_refused():
    """As one that keeps a tensor with a gradient path."""
    net = make_net()
    two = Replicas(net, groups(), chunks=2)
    net[0].cached = net[0].weight * 2
    with pytest.raises(UsageError, match=r"copy\.deepcopy can copy.*keep no tensor on it"):
        two.forward_backward(torch.ones(8, 4), loss_fn=torch.mean)
    del net[0].cached
    two.forward_backward(torch.ones(8, 4), loss_fn=torch.mean)


def _pruned_steps(net, step):
    """Some steps, with a layer that is pruned, pruned once more, and made a plain one again."""
    for number in range(5):
        if number in (1, 2):
            prune.custom_from_mask(
                net[0], "weight", torch.eye(8, 4).roll(number, 0) + torch.eye(8, 4)
            )
        if number == 4:
            prune.remove(net[0], "weight")
        net.zero_grad()
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        step(x)
        yield [p.grad.clone() for p in net.parameters()]
        torch.optim.SGD(net.parameters(), lr=0.1).step()


def test_a_layer_may_be_pruned_between_steps():
    """Its weight has a gradient path, and is computed anew by each copy's forward."""
    net = make_net()
    plain = copy.deepcopy(net)
    two = Replicas(net, [["cpu"] * 2] * 2, chunks=2)
    found = _pruned_steps(net, lambda x: two.forward_backward(x, loss_fn=torch.mean))
    expected = _pruned_steps(plain, lambda x: plain(x).mean().backward())
    for own, other in zip(found, expected, strict=True):
        for one, gradient in zip(own, other, strict=True):
            assert_close(one, gradient, rtol=1e-5, atol=1e-6)


def test_replicas_have_the_models_parameters_and_state():
    """As a pipeline has; other methods are those of one of the pipelines, or the model's."""
    net = make_net(nn.BatchNorm1d(8))
    two = Replicas(net, groups(), chunks=2)
    optimizer = torch.optim.SGD(two.parameters(), lr=0.1)
    two.forward_backward(torch.randn(8, 4), loss_fn=torch.mean)
    optimizer.step()
    assert [*two.named_parameters()] == [*net.named_parameters()]
    assert [*two.named_buffers()] == [*net.named_buffers()]
    assert all(one is other for one, other in zip(two.buffers(), net.buffers(), strict=True))
    two.zero_grad()
    assert net[0].weight.grad is None
    state = {name: value.clone() for name, value in two.state_dict().items()}
    assert state.keys() == net.state_dict().keys()
    with torch.no_grad():
        assert two.eval() is two
        assert not net.training
        assert not two.training
        before = host(two(torch.ones(8, 4)))
        net[0].weight.zero_()
        two.load_state_dict(state)
        assert_close(two(torch.ones(8, 4)), before)
    assert two.train().training
    with pytest.raises(AttributeError, match=r"each copy's pipeline has it: pipes\[0\]\.summary"):
        two.summary(torch.ones(8, 4))
    with pytest.raises(AttributeError, match=r"the model has it: module\.append"):
        two.append(nn.ReLU())
    with pytest.raises(AttributeError, match="no attribute 'nothing'$"):
        _ = two.nothing


def test_lazy_modules_are_refused_as_by_a_pipeline():
    """Before anything is copied."""
    net = bp.begin_blocks(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)), {"1": 1})
    with pytest.raises(RecordingError, match=r"lazy modules.*0\.weight.*run the plain model once"):
        Replicas(net, groups())


def test_the_first_failure_reaches_the_caller():
    """And the next step works: nothing of the failed one is in the copies."""

    class Fails(nn.Module):
        fails = bytearray(1)  # whose content nobody compares

        def forward(self, x):
            if self.fails[0]:
                raise ValueError("too cold")
            return x

    net = make_net(Fails())
    two = Replicas(net, groups(), chunks=2)
    x = torch.randn(4, 4)
    two.forward_backward(x, loss_fn=torch.mean)
    Fails.fails[0] = 1
    with pytest.raises(ValueError, match="too cold"):
        two.forward_backward(x, loss_fn=torch.mean)
    Fails.fails[0] = 0

    calls = []

    def fails_last(out):
        calls.append(out.shape)
        if len(calls) == 4:
            raise ValueError("too hot")
        return torch.mean(out)

    with pytest.raises(ValueError, match="too hot"):
        two.forward_backward(x, loss_fn=fails_last)
    net.zero_grad()
    two.forward_backward(x, loss_fn=torch.mean)
    plain = copy.deepcopy(net).to(stages(1)[0])
    plain.zero_grad()
    plain_step(plain, (x,), {}, None, torch.mean, 4)
    assert_same_gradients(net, plain)


def test_what_cannot_be_copied_is_refused():
    net = make_net()
    with pytest.raises(PlanError, match=r"groups of \[2, 1\] \(.*\); write \[\['cuda:0'"):
        Replicas(net, [["cpu"] * 2, ["cpu"]])
    with pytest.raises(PlanError, match=r"groups of \[\]"):
        Replicas(net, [])
    with pytest.raises(UsageError, match="call blockpipe.materialize"):
        Replicas(make_net().to("meta"), groups())
    with pytest.raises(UsageError, match=r"under torch.no_grad\(\), or forward_backward"):
        Replicas(net, groups(), chunks=2)(torch.ones(4, 4))


def test_unplaced_models_are_where_they_were():
    net = make_net()
    two = Replicas(net, groups(), chunks=2)
    two.forward_backward(torch.ones(4, 4), loss_fn=torch.mean)
    assert two.unplace() is net
    two.close()
    assert {p.device.type for p in net.parameters()} == {"cpu"}


def test_a_compiled_step_when_it_calls_replicas_then_runs_them_as_they_are():
    """The compiler takes what is around the copies."""
    torch.compiler.reset()  # what it has given up in this process does not count
    net, x, y = make_net(), torch.randn(8, 4), torch.randint(0, 2, (8,))
    plain, graphs = copy.deepcopy(net), []
    many = Replicas(net, groups(), chunks=2)

    def backend(graph, _):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    @torch.compile(backend=backend)
    def step(x, y):
        return many.forward_backward(x * 2, target=y, loss_fn=F.cross_entropy).loss

    loss = step(x, y)
    expected = F.cross_entropy(plain(x * 2), y)
    expected.backward()
    assert_close(loss, expected)
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert_close(one.grad, other.grad)
    assert [len(graph) for graph in graphs] == [1], torch._dynamo.utils.counters
