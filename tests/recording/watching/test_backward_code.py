"""State of the code that autograd calls in a backward: no backward runs in a recording."""

import copy
import cProfile
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import blockpipe as bp
from blockpipe.errors import CrossingError, StateError

from ...parity import assert_same_gradients, plain_step
from ...stage_devices import assert_close, stages
from .backward_models import (
    COUNTS,
    CountsAll,
    CountsByOtherName,
    CountsInOperation,
    CountsInReentrant,
    CountsOnBoth,
    CrossesByOtherName,
    Follows,
    Net,
    OfClass,
    Reads,
    ReadsByLaterName,
    ReadsByProperty,
    ReadsByVjp,
    ReadsInCallback,
    ReadsInGenerator,
    ReadsInHelper,
    ReadsOnce,
    ReadsUncast,
    counting,
    operation,
)

X = torch.randn(8, 4)


class Hooked(Net):
    """Its forward hooks into nodes."""

    def follow(self, *gradients: Any) -> None:
        self.scale = 1.0 + float(gradients[-1][0].norm())


class NodeHook(Hooked):
    def first(self, h: Tensor) -> Tensor:
        h.grad_fn.register_hook(self.follow)
        return h * self.scale


class NodePreHook(Hooked):
    def first(self, h: Tensor) -> Tensor:
        h.grad_fn.register_prehook(self.follow)
        return h * self.scale


class EdgeHook(Hooked):
    def first(self, h: Tensor) -> Tensor:
        get_gradient_edge(h).node.register_prehook(self.follow)
        return h * self.scale


class HookOfOtherStage(Hooked):
    def first(self, h: Tensor) -> Tensor:
        self.kept = h
        return h * self.scale

    def second(self, h: Tensor) -> Tensor:
        self.kept.grad_fn.register_prehook(self.follow)
        return h


class HooksModule(Hooked):
    """Its first forward registers the hook of a module."""

    def first(self, h: Tensor) -> Tensor:
        if not self.a._backward_hooks:
            self.a.register_full_backward_hook(self.follow)
        return h * self.scale


class Contexts(Net):
    """The context in which its checkpoint runs again sets what the forward reads."""

    def __enter__(self) -> None:
        self.scale = 2.0

    def __exit__(self, *failure: object) -> None:
        pass

    def contexts(self) -> Any:
        return nullcontext(), self

    def first(self, h: Tensor) -> Tensor:
        h = h * self.scale
        return checkpoint(torch.sin, h, use_reentrant=False, context_fn=self.contexts)


class MadeContexts(Contexts):
    @contextmanager
    def made(self) -> Iterator[None]:
        self.scale = 2.0
        yield

    def contexts(self) -> Any:
        return nullcontext(), self.made()


class Policies(Contexts):
    """A selective checkpoint, which asks the same function again."""

    def policy(self, context: object, operation: object, *args: Any, **kwargs: Any) -> Any:
        self.seen += 1
        keeps = self.seen % 3 == 0
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts(self) -> Any:
        return create_selective_checkpoint_contexts(self.policy)


@pytest.fixture(autouse=True)
def _counts_from_zero() -> None:
    COUNTS["calls"] = 0


def _step(net: Net, **options: Any) -> None:
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4, **options)
    pipe.forward_backward(X, target=X, loss_fn=mse_loss)


_SEEN = r"'seen' of the model on hops \[0\] \(.*, and reads it in a backward on hops \[0\]"
_SCALE = r"'scale' of the model in a backward on hops \[0\] \(.*, and reads it on hops \[0\]"
_CALLS = r"entry 'calls' of a dict in a backward on hops"


@pytest.mark.every
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (Follows, _SCALE),
        (counting(Reads), _SEEN),
        (counting(ReadsInGenerator), _SEEN),
        (counting(ReadsByProperty), _SEEN),
        (counting(ReadsOnce), _SEEN),
        (counting(ReadsUncast), _SEEN),
        (counting(ReadsInHelper), _SEEN),
        (counting(ReadsByVjp), _SEEN),
        (counting(ReadsInCallback), _SEEN),
        (counting(ReadsByLaterName), _SEEN),
        (CountsByOtherName, _SEEN),
        (HooksModule, _SCALE),
        (CountsInReentrant, _SEEN),
        (CountsOnBoth, rf"{_CALLS} \[0, 1\]"),
        (CountsInOperation, rf"{_CALLS} \[0\]"),
        (OfClass, r"SetsOwn\.factor in a backward on hops \[0\] \(.*, and reads it on hops \[0\]"),
        (NodeHook, _SCALE),
        (NodePreHook, _SCALE),
        (EdgeHook, _SCALE),
        (HookOfOtherStage, _SCALE),
        (Contexts, _SCALE),
        (MadeContexts, _SCALE),
        (Policies, r"'seen' of the model .*, and reads it .*in a backward on hops \[0\]"),
    ],
)
def test_code_of_a_backward_that_shares_a_value_with_a_forward_is_refused(
    kind: type[Net], what: str
) -> None:
    """Later forwards come before a backward, and in the plain loop after it."""
    with pytest.raises(StateError, match=what):
        _step(kind())


def test_a_backward_that_a_profiler_looks_at_is_looked_at_as_well() -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        with pytest.raises(StateError, match=_SEEN):
            _step(CountsInReentrant())
    finally:
        profiler.disable()


def test_a_profiler_that_leaves_no_room_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "getprofile", object)
    with pytest.raises(StateError, match="begin to profile after the first step"):
        _step(CountsInReentrant())


class Scaled(Function):
    """Its backward reads a number that nobody sets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: Net) -> Tensor:
        ctx.net, ctx.scale = net, net.scale
        ctx.save_for_backward(x)
        return x * net.scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * ctx.net.scale * ctx.scale + 0.1 * x, None


class Logged(Function):
    """Its backward sets what nobody reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: Net) -> Tensor:
        ctx.net = net
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.net.norms.append(float(gradient.norm()))
        COUNTS["calls"] += 1
        return gradient * 2.0, None


class ScalesBoth(Net):
    def first(self, h: Tensor) -> Tensor:
        return Scaled.apply(h, self)

    second = first


class LogsBoth(Net):
    def first(self, h: Tensor) -> Tensor:
        h.grad_fn.register_hook(lambda *gradients: self.norms.append(len(gradients)))
        return Logged.apply(h, self)

    second = first


class CountsOnOne(Net):
    """Only the backwards of one stage read their count, which are in the plain loop's order."""

    def second(self, h: Tensor) -> Tensor:
        return CountsAll.apply(h)


class Keeps(Net):
    """What its backwards read is of one micro-batch."""

    def first(self, h: Tensor) -> Tensor:
        self.seen += 1
        seen, state = self.seen, {"calls": 0}

        def hook(given: Any, got: Any) -> Any:
            state["calls"] += 1
            return tuple(None if g is None else g * (seen + state["calls"]) for g in given)

        h.grad_fn.register_hook(hook)
        return h


class Selects(Contexts):
    def policy(self, context: object, operation: object, *args: Any, **kwargs: Any) -> Any:
        return CheckpointPolicy.PREFER_RECOMPUTE

    def contexts(self) -> Any:
        return create_selective_checkpoint_contexts(self.policy)


class Operates(Net):
    def first(self, h: Tensor) -> Tensor:
        return operation()(h)


@pytest.mark.every
@pytest.mark.parametrize("options", [{}, {"isolate": True}, {"checkpoint": "always"}])
@pytest.mark.parametrize("kind", [ScalesBoth, LogsBoth, CountsOnOne, Keeps, Selects, Operates])
def test_code_of_a_backward_that_shares_nothing_runs_as_in_the_plain_loop(
    kind: type[Net], options: dict[str, Any]
) -> None:
    net = kind()
    plain = copy.deepcopy(net)
    _step(net, **options)
    COUNTS["calls"] = 0
    plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert_same_gradients(net, plain)


@pytest.mark.parametrize("kind", [Follows, counting(Reads), NodeHook])
def test_code_of_a_backward_that_shares_a_value_runs_where_micro_batches_come_one_by_one(
    kind: type[Net],
) -> None:
    net = kind()
    plain = copy.deepcopy(net)
    _step(net, schedule="sequential")
    plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert_same_gradients(net, plain)


def test_a_custom_function_that_crosses_by_another_name_of_its_apply_is_refused() -> None:
    """Nobody sees the call, and the graphs of two stages would be one."""
    with pytest.raises(
        CrossingError, match=r"'Reads' .*on hop 1, but its apply.*call Reads\.apply"
    ):
        _step(CrossesByOtherName())


@pytest.mark.cpu("nobody sees the call, and moves the tensor")
def test_a_custom_function_that_crosses_by_another_name_of_its_apply_runs_in_one_graph() -> None:
    net = CrossesByOtherName()
    plain = copy.deepcopy(net)
    _step(net, schedule="uncut")
    plain_step(plain, (X,), {}, X, mse_loss, 4)
    assert_same_gradients(net, plain)


def _over(parameters: Callable[[Net], list[Tensor]], mode: str) -> Net:
    net = Net()
    hook: Callable[[Any], None] = lambda gradients: net.norms.append(len(gradients))  # noqa: E731
    register_multi_grad_hook(parameters(net), hook, mode=mode)  # type: ignore[arg-type]
    return net


@pytest.mark.every
@pytest.mark.parametrize("schedule", ["1f1b", "sequential"])
@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_over_parameters_of_two_stages_is_refused(mode: str, schedule: str) -> None:
    """Each stage's backward called it, with the gradients of that stage alone."""
    net = _over(lambda net: [net.a.weight, net.b.weight], mode)
    with pytest.raises(CrossingError, match=r"over tensors of hops \[0, 1\].*schedule='uncut'"):
        _step(net, schedule=schedule)


@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_over_parameters_of_two_stages_runs_in_one_graph(mode: str) -> None:
    net = _over(lambda net: [net.a.weight, net.b.weight], mode)
    _step(net, schedule="uncut")
    assert len(net.norms) == 4


@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_over_parameters_of_one_stage_is_called_once_for_each_micro_batch(mode: str) -> None:
    net = _over(lambda net: [net.a.weight, net.a.bias], mode)
    _step(net)
    assert len(net.norms) == 4


def _reversible(dropout: float) -> nn.Module:
    pytest.importorskip("transformers")
    from transformers import ReformerConfig, ReformerModelWithLMHead

    heads = {"attention_head_size": 8, "num_attention_heads": 2, "local_attn_chunk_length": 4}
    places = {
        "max_position_embeddings": 16,
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [8, 8],
    }
    sizes = {"vocab_size": 32, "hidden_size": 16, "feed_forward_size": 16, "attn_layers": ["local"]}
    options = {"hidden_dropout_prob": dropout, "local_attention_probs_dropout_prob": 0.0}
    config = ReformerConfig(**sizes, **heads, **places, **options, is_decoder=True)
    return bp.begin_blocks(ReformerModelWithLMHead(config).train(), {"lm_head": 1})


@pytest.mark.filterwarnings("ignore:`torch.cuda.*default_generators")
@pytest.mark.filterwarnings("ignore:while a step ran")  # its backward seeds the generator
def test_a_librarys_backward_that_reads_what_its_forward_sets_is_refused():
    """Attack 19: a Reformer's layers keep the seed of their dropout, by which the backward computes
    them again. Another micro-batch had set another one by then."""
    ids = torch.randint(1, 32, (4, 16))
    call = {"input_ids": ids, "labels": ids}
    pipe = bp.Pipeline(_reversible(0.1), devices=stages(2), chunks=2)
    found = r"changes reformer\.encoder\.layers\.0\.\w+_seed, and reads it in a backward on hops"
    with pytest.raises(StateError, match=found + r".*sequential"):
        pipe.forward_backward(**call)
    # Nothing is drawn: the seed makes no difference.
    net = _reversible(0.0)
    plain = copy.deepcopy(net)
    loss = bp.Pipeline(net, devices=stages(2), chunks=2).forward_backward(**call).loss
    expected = sum(plain(input_ids=i, labels=i).loss / 2 for i in ids.chunk(2))
    expected.backward()
    assert_close(loss, expected.detach())
    assert_same_gradients(net, plain)
