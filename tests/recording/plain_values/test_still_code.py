"""Hooks that set what a forward, or another stage's hook, reads: no backward runs in a recording."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError
from blockpipe.recording.plain_values.still_code import frames_of

from ...parity import assert_same_gradients, plain_step
from ...stage_devices import stages

# torch 2.11 warns of a hook on a module whose inputs need no gradient.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing when gradients are computed"
)


class Net(nn.Module):
    """Two layers on two stages, with values that hooks may set."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale, self.seen, self.norms = 1.0, 0, {}

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(self.a(x).tanh())
        with bp.Block(stage=1):
            return self.b(h)

    def first(self, h: Tensor) -> Tensor:
        return h

    def follow(self, gradient: Tensor) -> None:
        self.scale = float(gradient.norm())

    def count(self, gradient: Tensor) -> Tensor:
        self.seen += 1
        return gradient * self.seen


class Scaled(Net):
    """Its forward reads the value."""

    def first(self, h: Tensor) -> Tensor:
        return h * self.scale


class Hooked(Scaled):
    """Its forward registers the hook."""

    def first(self, h: Tensor) -> Tensor:
        h.register_hook(self.follow)
        return h * self.scale


class Measures(Net):
    """Its forward sets what a hook reads."""

    def first(self, h: Tensor) -> Tensor:
        self.scale = h.detach().abs().max().item()
        return h


class Inherits(Scaled):
    """Its hook is its base class's."""

    def follow(self, gradient: Tensor) -> None:
        super().follow(gradient)


def _module_hook(net: Net) -> None:
    net.b.register_full_backward_hook(lambda module, given, got: net.follow(got[0]))


def _pre_hook(net: Net) -> None:
    net.b.register_full_backward_pre_hook(lambda module, got: net.follow(got[0]))


def _parameter_hook(net: Net) -> None:
    net.b.weight.register_hook(net.follow)


class _Follows:
    """A hook that is an object."""

    def __init__(self, net: Net) -> None:
        self.net = net

    def __call__(self, gradient: Tensor) -> None:
        self.net.scale = float(gradient.norm())


def _object(net: Net) -> None:
    net.b.weight.register_hook(_Follows(net))


def _set_scale(name: str, module: Net, *gradients: object) -> None:
    module.scale = len(name)


def _partial(net: Net) -> None:
    net.register_full_backward_pre_hook(functools.partial(_set_scale, "a name"))


def _stepping_hook(net: Net) -> None:
    net.b.weight.register_post_accumulate_grad_hook(functools.partial(Net.follow, net))


def _counts_on_both(net: Net) -> None:
    net.a.weight.register_hook(net.count)
    net.b.weight.register_hook(net.count)


def _reads(net: Net) -> None:
    net.a.register_full_backward_pre_hook(lambda module, got: (got[0] / (1 + net.scale),))


def _nothing(net: Net) -> None:
    pass


def _step(net: Net, **options: object) -> Tensor:
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, **options)
    return pipe.forward_backward(X, target=X, loss_fn=mse_loss).loss


X = torch.randn(8, 4)


@pytest.mark.every
@pytest.mark.parametrize(
    ("kind", "hook", "what"),
    [
        (Scaled, _module_hook, r"'scale' of the model in a backward on hops \[1\].*reads it on"),
        (Scaled, _pre_hook, r"'scale' of the model in a backward on hops \[1\].*reads it on"),
        (Scaled, _parameter_hook, r"'scale' of the model in a backward on hops \[1\].*reads it on"),
        (Scaled, _object, r"'scale' of the model in a backward on hops \[1\].*reads it on"),
        (Scaled, _partial, r"'scale' of the model in a backward on hops \[\d\].*reads it on"),
        (Scaled, _stepping_hook, r"'scale' of the model in a backward on hops \[1\].*reads it on"),
        (
            Inherits,
            _parameter_hook,
            r"'scale' of the model in a backward on hops \[1\].*reads it on",
        ),
        (Hooked, _nothing, r"'scale' of the model in a backward on hops \[0\].*reads it on"),
        (Measures, _reads, r"'scale' of the model on hops \[0\].*reads it in a backward on"),
        (Net, _counts_on_both, r"'seen' of .* in a backward on hops \[0, 1\].*in a backward on"),
    ],
)
def test_what_a_hook_sets_and_another_stage_or_a_forward_reads_is_refused(
    kind: type[Net], hook: Callable[[Net], None], what: str
) -> None:
    """Micro-batches under way read one another's, without a word."""
    net = kind()
    hook(net)
    with pytest.raises(StateError, match=rf"{what}.*code\.py:\d+\).*set it between steps"):
        _step(net)


class Single:
    """All calls of the class give one object."""

    one: "Single | None" = None

    def __new__(cls) -> "Single":
        if cls.one is None:
            cls.one = super().__new__(cls)
            cls.one.scale = 1.0
        return cls.one


class SetsInSingle(Net):
    def first(self, h: Tensor) -> Tensor:
        single = Single()
        single.scale = h.detach().abs().max().item()
        h.register_hook(_scaled_by_single)
        return h


class ReadsSingle(Net):
    def first(self, h: Tensor) -> Tensor:
        single = Single()
        h.register_hook(_scaled_by_single)
        return h * single.scale


def _scaled_by_single(gradient: Tensor) -> Tensor:
    single = Single()
    return gradient * single.scale


def test_a_singleton_when_the_first_forward_makes_it_is_known_to_a_hook() -> None:
    Single.one = None
    with pytest.raises(StateError, match=r"'scale' of a Single .*reads it in a backward"):
        _step(SetsInSingle())


@pytest.mark.parametrize("is_made", [False, True])
def test_a_singleton_when_it_is_only_read_is_fine(is_made: bool) -> None:
    Single.one = None
    if is_made:
        Single()
    _step(ReadsSingle())


def _notes(net: Net, name: str, gradient: Tensor) -> None:
    net.norms[name] = float(gradient.norm())
    net.scale = net.norms[name]


def _logs(net: Net) -> None:
    for name, layer in net.named_children():
        layer.register_full_backward_pre_hook(
            lambda module, got, name=name: _notes(net, name, got[0])
        )


def _counts(net: Net) -> None:
    net.a.weight.register_hook(net.count)


def _sets_before_it_reads(net: Net) -> None:
    def hook(gradient: Tensor) -> Tensor:
        net.scale = float(gradient.norm())
        return gradient / net.scale

    net.a.weight.register_hook(hook)
    net.b.weight.register_hook(hook)


class Names(Net):
    """A hook has a variable of the forward's, and calls a function with a local one of that name."""

    def first(self, h: Tensor) -> Tensor:
        stage = bp.current_stage()
        h.register_hook(lambda gradient: self.note(stage))
        return h

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=1):
            return self.first(super().forward(x))

    def note(self, stage: int | None) -> None:
        self.norms[stage] = str(stage)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_local_variable_is_no_global_one(schedule: str) -> None:
    """Before it was set, it was taken for the module's of that name."""
    _step(Names(), schedule=schedule)


@pytest.mark.every
@pytest.mark.parametrize("hook", [_logs, _counts, _sets_before_it_reads])
def test_what_hooks_keep_for_themselves_is_fine(hook: Callable[[Net], None]) -> None:
    net, plain = Net(), Net()
    plain.load_state_dict(net.state_dict())
    for model in (net, plain):
        hook(model)
    _step(net)
    plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert_same_gradients(net, plain)


def test_hooks_that_set_what_the_forward_reads_are_the_plain_loops_one_by_one() -> None:
    net, plain = Scaled(), Scaled()
    plain.load_state_dict(net.state_dict())
    for model in (net, plain):
        _module_hook(model)
    _step(net, schedule="sequential")
    plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert_same_gradients(net, plain)


def _in_library(source: str) -> dict[str, Any]:
    """Return the names that code of a library has defined."""
    names: dict[str, Any] = {"__name__": "torch.utils.made_up"}
    exec(source, names)
    return names


def test_a_function_of_a_library_that_has_itself_in_its_closure_is_passed_once() -> None:
    """To look for the user's functions in closures went on for ever."""
    source = "def wrap(user):\n    def again(*args):\n        return user(*args) or again\n    return again"

    def hook(gradient: Tensor) -> None:
        pass

    found = frames_of(_in_library(source)["wrap"](hook))
    assert [still.f_code for still in found] == [hook.__code__]


def _loops_over_calls(gradient: Tensor) -> Tensor:
    for factor in (gradient.norm(), gradient.amax()):
        gradient = gradient / factor
    return gradient


MANY = [*range(8)]


def _loops_again_and_again(gradient: Tensor) -> None:
    several = MANY
    for first in several:
        str(first)
    for second in several:
        str(second)
    for third in several:
        str(third)
    for fourth in several:
        str(fourth)


def _lambda_on_the_line_of_a_loop() -> Callable[..., Any]:
    hooks: list[Callable[..., Any]] = []
    for each in (str(1), str(2)): hooks.append(lambda each: str(each))  # noqa: E701 # fmt: skip
    return hooks[0]


def _chooses_one_of_two(gradient: Tensor, number: int = 1) -> None:
    several, member = MANY, number
    member = 3 if several else member
    member = 3 if several else member
    member = (several and member) or member
    member = (several and member) or member
    str(member)


@pytest.mark.parametrize(
    ("hook", "most"),
    [
        (_loops_over_calls, 3),
        (_loops_again_and_again, 200),
        (_chooses_one_of_two, 3),
        (_lambda_on_the_line_of_a_loop(), 1),
    ],
)
def test_a_function_is_looked_at_in_a_few_turns_of_its_loops(
    hook: Callable[..., Any], most: int
) -> None:
    """A turn with a member that is not known was no turn, so that it was turned for ever; loops
    that follow each other multiplied, and turns in which all names are what they were counted."""
    assert len([*itertools.islice(frames_of(hook), 1_000)]) <= most


def _weighted(weight: float, term: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda outputs, target: weight * term(outputs, target)


def _total(*terms: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda outputs, target: sum(term(outputs, target) for term in terms)  # type: ignore[return-value]


class Levels(Net):
    """Leaves a plain number for the loss."""

    level = 0.0

    def first(self, h: Tensor) -> Tensor:
        self.level = float(h.detach().abs().max())
        return h


def _by_level(net: Levels) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda outputs, target: mse_loss(outputs, target) / net.level


def _cached(net: Levels) -> Callable[[Tensor, Tensor], Tensor]:
    level = functools.lru_cache(None)(lambda _: net.level)
    return lambda outputs, target: mse_loss(outputs, target) / level(0)


def _dispatched(net: Levels) -> Callable[[Tensor, Tensor], Tensor]:
    loss = functools.singledispatch(mse_loss)
    loss.register(Tensor, _by_level(net))
    return loss


class HandsOn(nn.Module):
    """Hands reads on to the model that it is around, as adapters do."""

    def __init__(self, net: Levels) -> None:
        super().__init__()
        self.inner = net

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


def _around(net: Levels) -> Callable[[Tensor, Tensor], Tensor]:
    wrapper = HandsOn(net)
    return lambda outputs, target: mse_loss(outputs, target) / wrapper.level


LOSSES: dict[str, Callable[[Levels], Callable[..., Tensor]]] = {
    "the first term": lambda net: _total(_weighted(1, _by_level(net)), _weighted(1, mse_loss)),
    "the last term": lambda net: _total(_weighted(1, mse_loss), _weighted(1, _by_level(net))),
    "around itself": lambda net: _weighted(1, _weighted(1, _by_level(net))),
    "in a cache": _cached,
    "by its class": _dispatched,
    "behind a wrapper": _around,
}


@pytest.mark.parametrize("where", LOSSES)
def test_each_function_of_a_decorator_is_looked_at(where: str) -> None:
    """Attack 20: a second closure of one function was taken for the first."""
    net, x = Levels(), torch.randn(8, 4)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"attribute 'level' of the model.* and reads it"):
        pipe.forward_backward(x, target=x, loss_fn=LOSSES[where](net))
