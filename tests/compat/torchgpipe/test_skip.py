"""Skips by name: what torchgpipe's tests pin of them."""

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockpipe.compat.torchgpipe import GPipe
from blockpipe.compat.torchgpipe.skip import (
    Namespace,
    pop,
    skippable,
    stash,
    verify_skippables,
)
from blockpipe.errors import RecordingError, UsageError

from ...parameter_sets import each_value
from ...stage_devices import assert_close, stages

Commands = Any  # of a generator


@skippable(stash=["1to3"])
class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, input: Tensor) -> Commands:
        yield stash("1to3", input)
        return self.conv(input).tanh()


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, input: Tensor) -> Tensor:
        return self.conv(input).tanh().sigmoid()


@skippable(pop=["1to3"])
class Third(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, input: Tensor) -> Commands:
        skip = yield pop("1to3")
        return (self.conv(input) + skip).tanh()


def gpipe(net: nn.Sequential, balance: list[int], **options: Any) -> GPipe:
    return GPipe(net, balance, devices=stages(len(balance)), **options)


@each_value(
    mode=["never", "always", "except_last"],
    balance=[[3], [1, 2], [2, 1], [1, 1, 1]],
)
def test_1_to_3(mode: str, balance: list[int]) -> None:
    """Over four balances and three modes: outputs and gradients are the plain sequential's."""
    net = nn.Sequential(First(), Second(), Third())
    plain = copy.deepcopy(net)
    model = gpipe(net, balance, chunks=3, checkpoint=mode)
    x = torch.rand(6, 3, 4, 4, requires_grad=True)
    for _ in range(2):
        x.grad = None
        output = model(x)
        output.mean().backward()
        found, x.grad = x.grad, None
        expected = plain(x)
        expected.mean().backward()
        assert_close(output, expected)
        assert_close(found, x.grad)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)


def test_it_trains_with_forward_backward() -> None:
    """Under 1F1B, where a pop may come before the stash of the next micro-batch."""
    net = nn.Sequential(First(), Second(), Third())
    plain, x = copy.deepcopy(net), torch.rand(8, 3, 4, 4)
    model = gpipe(net, [1, 1, 1], chunks=8)
    model.forward_backward(x, loss_fn=torch.mean)
    plain(x).mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("mode", ["never", "always"])
def test_two_skips_of_different_lengths_and_one_that_is_not_given(mode: str) -> None:
    """Computed ones as well as inputs; ``None`` is handed on, too."""

    @skippable(stash=["short", "long", "none"])
    class Both(nn.Linear):
        def forward(self, input: Tensor) -> Commands:
            yield stash("short", input.exp())
            y = super().forward(input)
            yield stash("long", y.sin())
            yield stash("none", None)
            return y.tanh()

    @skippable(pop=["short"])
    class Short(nn.Linear):
        def forward(self, input: Tensor) -> Commands:
            return (super().forward(input) * (yield pop("short"))).tanh().sigmoid()

    @skippable(pop=["long", "none"])
    class Long(nn.Linear):
        def forward(self, input: Tensor) -> Commands:
            assert (yield pop("none")) is None
            return (super().forward(input) * (yield pop("long"))).tanh()

    for balance in ([3], [2, 1], [1, 2], [1, 1, 1]):
        net = nn.Sequential(Both(4, 4), Short(4, 4), Long(4, 4))
        plain, x = copy.deepcopy(net), torch.rand(6, 4)
        model = gpipe(net, balance, chunks=3, checkpoint=mode)
        model(x).sum().backward()
        plain(x).sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(ours.grad, theirs.grad)


@each_value(
    mode=[None, "never", "always", "except_last"],
    train=[True, False],
)
def test_no_skip_outlives_its_forward_and_backward(mode: str | None, train: bool) -> None:
    """Of a pipeline, and of a bare sequential; in training and in evaluation."""
    kept: list[weakref.ref[Tensor]] = []

    @skippable(stash=["skip"])
    class Stash(nn.Module):
        def forward(self, input: Tensor) -> Commands:
            skip = input * 2
            kept.append(weakref.ref(skip))
            yield stash("skip", skip)
            return input.tanh()

    @skippable(pop=["skip"])
    class Pop(nn.Module):
        def forward(self, input: Tensor) -> Commands:
            return input + (yield pop("skip"))

    model: nn.Module = nn.Sequential(Stash(), Pop())
    if mode is not None:
        assert isinstance(model, nn.Sequential)
        model = gpipe(model, [1, 1], chunks=2, checkpoint=mode)
    model.train(train)
    x = torch.rand(4, 4, requires_grad=True)
    for _ in range(2):
        if train:
            model(x).norm().backward()
        else:
            with torch.no_grad():
                model(x)
    gc.collect()
    assert len(kept) >= 2
    assert not [ref for ref in kept if ref() is not None]


def test_outside_of_a_pipeline_each_thread_has_its_own() -> None:
    """Two threads, both between a stash and its pop."""
    both = threading.Barrier(2, timeout=30)

    @skippable(stash=["skip"])
    class Stash(nn.Module):
        def forward(self, input: Tensor) -> Commands:
            yield stash("skip", input)
            both.wait()
            return input * 10

    @skippable(pop=["skip"])
    class Pop(nn.Module):
        def forward(self, input: Tensor) -> Commands:
            return input + (yield pop("skip"))

    net, found = nn.Sequential(Stash(), Pop()), {}

    def run(number: float) -> None:
        found[number] = net(torch.tensor(number)).item()

    threads = [threading.Thread(target=run, args=(number,)) for number in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {1.0: 11.0, 2.0: 22.0}


def test_a_failure_leaves_no_skip_for_the_next_call() -> None:
    """A micro-batch that ends between stash and pop."""

    class Fails(nn.Linear):
        armed = threading.Event()  # what is in it is no reason to record anew

        def forward(self, x: Tensor) -> Tensor:
            if self.armed.is_set():
                raise ValueError("between")
            return super().forward(x)

    net = nn.Sequential(First(), Second(), Third())
    net[1].conv = nn.Sequential(net[1].conv, Fails(4, 4))
    model = gpipe(net, [1, 1, 1], chunks=3)
    x = torch.rand(6, 3, 4, 4)
    expected = model(x)
    Fails.armed.set()
    with pytest.raises(ValueError, match="between"):
        model(x)
    Fails.armed.clear()
    assert_close(model(x), expected)


def test_keys_have_the_decorated_module_in_them() -> None:
    """As torchgpipe's have: it is a module of its own inside."""
    model = gpipe(nn.Sequential(First(), Second(), Third()), [1, 2], chunks=2)
    assert list(model.state_dict()) == [
        *("partitions.0.0.module.conv.weight", "partitions.0.0.module.conv.bias"),
        *("partitions.1.1.conv.weight", "partitions.1.1.conv.bias"),
        *("partitions.1.2.module.conv.weight", "partitions.1.2.module.conv.bias"),
    ]
    assert "stash=['1to3']" in repr(model[0])
    assert type(model[0]).__name__ == "First"


# --- what does not match


def declared(**names: list[str]) -> nn.Module:
    return skippable(**names)(nn.Identity)()


def problems(*layers: nn.Module) -> str:
    with pytest.raises(UsageError) as caught:
        verify_skippables(nn.Sequential(*layers))
    assert isinstance(caught.value, TypeError)
    assert __file__ in str(caught.value)
    return str(caught.value)


def test_pairs_match() -> None:
    """Also where one layer pops one skip and stashes another, and inside of sequentials."""
    verify_skippables(nn.Sequential(declared(stash=["a"]), declared(pop=["a"])))
    chain = declared(stash=["a"]), declared(pop=["a"], stash=["b"]), declared(pop=["b"])
    verify_skippables(nn.Sequential(*chain))
    verify_skippables(nn.Sequential(nn.Sequential(*chain[:2]), nn.ReLU(), chain[2]))


def test_all_that_does_not_match_is_in_one_error() -> None:
    """Each mistake by layer and name."""
    assert "'a' is stashed by '0', and popped by no layer" in problems(declared(stash=["a"]))
    assert "'a' is popped by '0', and stashed by no layer before it" in problems(
        declared(pop=["a"])
    )
    a, b = {"stash": ["a"]}, {"pop": ["a"]}
    assert "'a' is stashed by '0' and again by '1'" in problems(
        declared(**a), declared(**a), declared(**b)
    )
    assert "'a' is popped by '1' and again by '2'" in problems(
        declared(**a), declared(**b), declared(**b)
    )
    assert "'a' is both stashed and popped by '0'" in problems(declared(**a, **b))
    assert "no layer before it" in problems(declared(**b), declared(**a))
    text = problems(declared(**a), declared(**b), declared(**a), declared(**b))
    assert "stashed by '0' and again by '2'" in text
    assert "popped by '1' and again by '3'" in text


def test_a_pipeline_checks_it_when_it_is_made() -> None:
    """Before anything runs."""
    with pytest.raises(TypeError, match="'1to3' is stashed by '0', and popped by no layer"):
        GPipe(nn.Sequential(First(), Second()), [1, 1], devices=["cpu"] * 2)


def test_namespaces_keep_names_apart() -> None:
    """One after the other, one inside of the other, and of some names only."""
    one, other = Namespace(), Namespace()
    assert one != other
    assert copy.deepcopy(one) == one
    net = nn.Sequential(
        First().isolate(one),
        First().isolate(other),
        Second(),
        Third().isolate(other),
        Third().isolate(one),
    )
    verify_skippables(net)
    plain, x = copy.deepcopy(net), torch.rand(4, 3, 4, 4)
    model = gpipe(net, [1, 1, 2, 1], chunks=2)
    model(x).sum().backward()
    plain(x).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)
    both = skippable(stash=["alice", "bob"])(nn.Identity)()
    both.isolate(one, only="alice").isolate(other, only=["bob"])
    assert list(both.stashable()) == [(one, "alice"), (other, "bob")]


@pytest.mark.parametrize(
    ("names", "command", "message"),
    [
        ({"stash": ["a"]}, stash("b", None), r"Odd to stash 'a', got 'b' .*stash=\['b'\]"),
        ({"pop": ["a"]}, pop("b"), r"Odd to pop 'a', got 'b'"),
        ({"pop": ["a"]}, pop("a"), r"'a' to be stashed before Odd pops it"),
        ({"stash": ["a", "b"]}, stash("a", None), r"Odd to stash 'b', as declared"),
    ],
)
def test_what_a_forward_does_wrong_is_a_runtime_error(
    names: dict[str, list[str]], command: object, message: str
) -> None:
    """With the layer, the name and the line."""

    class Odd(nn.Module):
        def forward(self, input: Tensor) -> Commands:
            yield command
            return input

    with pytest.raises(RecordingError, match=message) as caught:
        skippable(**names)(Odd)()(torch.rand(1))
    assert isinstance(caught.value, RuntimeError)


def test_other_values_are_refused_and_none_is_needed() -> None:
    """A forward may yield nothing at all, if nothing is declared."""

    class Odd(nn.Module):
        def forward(self, input: Tensor) -> Commands:
            yield 42

    with pytest.raises(TypeError, match=r"stash\(…\) or pop\(…\) for a yield of Odd, got 42"):
        skippable()(Odd)()(torch.rand(1))
    x = torch.rand(1)
    assert skippable()(nn.Identity)()(x) is x


def test_a_skip_around_a_boundary_of_integers_has_its_gradient() -> None:
    """torchgpipe hangs the skip's gradient off the boundary's first tensor, and loses it."""

    @skippable(stash=["vectors"])
    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4)

        def forward(self, words: Tensor) -> Commands:
            yield stash("vectors", self.table(words))
            return words * 2

    class Lengths(nn.Module):
        def forward(self, words: Tensor) -> Tensor:
            return words % 3

    @skippable(pop=["vectors"])
    class Sums(nn.Module):
        def forward(self, lengths: Tensor) -> Commands:
            vectors = yield pop("vectors")
            return vectors * lengths[..., None]

    for mode in ("never", "always", "except_last"):
        net = nn.Sequential(Embeds(), Lengths(), Sums())
        plain, words = copy.deepcopy(net), torch.randint(0, 8, (6, 5))
        gpipe(net, [1, 1, 1], chunks=3, checkpoint=mode)(words).square().sum().backward()
        plain(words).square().sum().backward()
        table = plain[0].module.table.weight.grad
        assert table.abs().sum() > 0
        assert_close(net[0].module.table.weight.grad, table)
