"""Stages as modules: the plain model's numbers from a chain of them, in one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import blockpipe as bp
from blockpipe.distributed import build_stage
from blockpipe.errors import RouteError, StateError

from .chains import assert_like_plain
from .models import Glue, Integers, UNet, gpt, ids, llama, resnet, t5


def test_a_unet_with_long_skips_is_the_plain_one():
    """A skip goes through the stages between."""
    stages = assert_like_plain(UNet(), torch.randn(2, 3, 8, 8))
    assert [len(stage.input_metas) for stage in stages] == [1, 2, 3, 4]


def test_integers_go_past_stages_that_do_not_use_them():
    """They are handed on, and the tensors that need a gradient are trained."""
    assert_like_plain(Integers(), torch.randn(2, 4), index=torch.tensor([1, 3]))


@pytest.mark.parametrize("writes", [False, True])
def test_tensors_cross_in_one_order_whatever_the_order_of_the_calls(writes: bool) -> None:
    """A forward that goes through a set of strings has another order in each process."""

    class Masks(nn.Module):
        def __init__(self, names: str) -> None:
            super().__init__()
            self.names = names
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            masks = {}
            for name in self.names:
                masks[name] = torch.zeros(4) if writes else torch.full((4,), float(ord(name)))
                if writes:
                    masks[name].add_(ord(name))
            h = self.first(x)
            with bp.Block(1):
                return self.second(h * masks["a"] + masks["b"]) * masks["c"]

    nets = [Masks(names) for names in ("abc", "cab", "bca")]
    for net in nets[1:]:
        net.load_state_dict(nets[0].state_dict())
    x = torch.randn(3, 4)
    handed = [build_stage(net, 0, x)(x) for net in nets]
    for net, given in zip(nets, handed[1:] + handed[:1], strict=True):
        assert torch.equal(build_stage(net, 1, x)(*given)[0], net(x))


def test_a_residual_network_is_cut_inside_of_a_block():
    """Batch norm's running statistics are the plain model's as well."""
    stages = assert_like_plain(resnet(), torch.randn(2, 3, 64, 64))
    assert dict(stages[3].named_parameters()).keys() == {"fc.weight", "fc.bias"}


def test_a_gpt_with_tied_weights_has_them_on_both_stages():
    """Under both names."""
    stages = assert_like_plain(gpt(), input_ids=ids(2), labels=ids(2))
    first, last = (dict(s.named_parameters(remove_duplicate=False)) for s in (stages[0], stages[3]))
    assert first["transformer.wte.weight"] is last["lm_head.weight"]


def test_llama_with_rotary_embeddings_is_the_plain_one():
    """Their tables, and the mask, go to every stage."""
    mask = torch.ones(2, 8, dtype=torch.long)
    assert_like_plain(llama(), input_ids=ids(2), labels=ids(2), attention_mask=mask)


def test_t5_hands_the_encoders_result_to_every_decoder_stage():
    """With dropout, whose numbers are drawn in the same order here."""
    assert_like_plain(t5(dropout_rate=0.1), input_ids=ids(2), labels=ids(2))


class Experts(nn.Module):
    """Depends on data inside."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, 0] > 0
        out = torch.zeros_like(x)
        if mask.any():
            out[mask] = self.a(x[mask])
        rest = (~mask).nonzero()[:, 0]
        return out.index_add(0, rest, self.b(x[rest]))


def test_a_module_that_depends_on_data_is_called_live():
    """It takes another way with other data than those that were recorded."""
    net = nn.Sequential(nn.Linear(4, 4), Experts(), nn.Linear(4, 4))
    bp.begin_blocks(net, {"1": 1, "2": 2})
    stages = assert_like_plain(net, torch.randn(6, 4))
    x = torch.randn(6, 4)
    for given in (x, -x, x.abs()):
        handed: tuple[Tensor, ...] = (given,)
        for stage in stages:
            handed = stage(*handed)
        assert torch.equal(handed[0], net(given))


class Chooses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x[:, 0] > 0]


def test_a_size_that_depends_on_data_must_not_leave_its_module():
    """It is found when another micro-batch has another one."""
    net = nn.Sequential(nn.Linear(4, 4), Chooses(), nn.Linear(4, 4))
    bp.begin_blocks(net, {"1": 1, "2": 2})
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(4))
        net[0].bias.zero_()
    chosen = build_stage(net, 1, torch.ones(3, 4))
    assert chosen(torch.ones(3, 4))[0].shape == (3, 4)
    with pytest.raises(
        bp.BlockpipeError, match=r"shapes \[\(3, 4\)\] from module '1'.*got \[\(0, 4"
    ):
        chosen(-torch.ones(3, 4))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 3 * ctx.by, None


def test_custom_functions_in_the_glue_keep_their_backward():
    """They are one call."""
    assert_like_plain(Glue(lambda _, h: Scaled.apply(h, 2.0)), torch.randn(3, 4))


class Within(nn.Linear):
    """A module whose forward ends with something of torch's that a recording watches."""

    def __init__(self, end: Any) -> None:
        super().__init__(4, 4)
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(super().forward(x))


def _sets_rng_state(h: Tensor) -> Tensor:
    torch.set_rng_state(torch.get_rng_state())
    return h


def _hooks_node(h: Tensor) -> Tensor:
    if h.grad_fn is not None:
        h.grad_fn.register_hook(lambda *_: None)
    return h


@pytest.mark.parametrize(
    "end",
    [
        lambda h: Scaled.apply(h, 2.0),
        lambda h: checkpoint(torch.tanh, h, use_reentrant=False),
        _sets_rng_state,
        _hooks_node,
    ],
    ids=["function", "checkpoint", "generator", "hook"],
)
def test_what_a_recording_watches_inside_of_a_module_is_called_live(end: Any) -> None:
    """To build a stage failed with ``AttributeError`` for each module with a custom function."""
    net = bp.begin_blocks(nn.Sequential(Within(end), nn.Linear(4, 4)), {"1": 1})
    assert_like_plain(net, torch.randn(3, 4))


def test_autocast_in_the_glue_is_there_again():
    """For the operations under it, and for no others."""

    def between(_: Any, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            product = h @ h.T
        return product.float() @ h

    assert_like_plain(Glue(between), torch.randn(3, 4))


def test_what_is_computed_from_constants_may_be_read():
    """``linspace(…).tolist()`` is the same for every micro-batch."""

    def between(_: Any, h: Tensor) -> Tensor:
        rates = [r.item() for r in torch.tensor([0.5, 1.0])]
        return h * rates[0] + rates[1]

    assert_like_plain(Glue(between), torch.randn(3, 4))


def test_a_question_about_the_arguments_is_asked_again():
    """Of a mask, for example; another answer is an error, and not another result."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            hidden = mask.eq(0)
            h = self.first(x)
            h = h.masked_fill(hidden, 0.0) if hidden.any() else h
            with bp.Block(1):
                return self.second(h)

    net, x, ones = Masked(), torch.randn(3, 4), torch.ones(3, 4)
    assert_like_plain(net, x, ones.tril())
    stage = build_stage(net, 0, (x, ones))
    assert torch.equal(stage(x, 2 * ones)[0], net.first(x))
    with pytest.raises(
        bp.BlockpipeError, match=r"expected False.*test_build\.py:.*got True.*alike"
    ):
        stage(x, ones.tril())


def test_a_size_that_follows_from_the_arguments_is_asked_for_again():
    """As that of the rows that a mask leaves, of whatever they are; another one is an error."""

    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor, *, by_rows: bool) -> Tensor:
            h = self.first(x)[mask != 0].contiguous()
            if not by_rows:
                h = h.view(-1, h.size(-1)).sum(0)
            with bp.Block(1):
                return self.second(h / h.shape[0] if by_rows else h)

    net, x, mask = Picks(), torch.randn(3, 4), torch.tensor([1, 0, 1])
    for by_rows in (False, True):
        assert_like_plain(net, x, mask, by_rows=by_rows)
        net.zero_grad()
    width, rows = (build_stage(net, 0, (x, mask), {"by_rows": by}) for by in (False, True))
    assert torch.equal(rows(x, mask.flip(0))[0], net.first(x)[mask != 0])
    assert torch.equal(width(x, 1 - mask)[0], net.first(x)[1])
    with pytest.raises(
        bp.BlockpipeError, match=r"expected .*\[2, 4\].*test_build\.py:.*got .*\[1, 4\]"
    ):
        rows(x, 1 - mask)


def test_glue_is_told_that_it_is_traced():
    """It need not look at values then; a sealed module, which runs each time, is not told."""

    def between(_: Any, h: Tensor) -> Tensor:
        return h if torch.jit.is_tracing() or h.isfinite().all() else h.nan_to_num()

    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert not torch.jit.is_tracing()
            return super().forward(x)

    net = Glue(between)
    net.second = Asks(4, 4)
    assert_like_plain(net, torch.randn(3, 4))
    assert not torch.jit.is_tracing()


def test_users_hooks_around_a_module_run_once():
    """On the tape, where they are glue, and not again with the module."""
    net = Glue(lambda _, h: h)
    net.first.register_forward_hook(lambda module, args, output: output * 2)
    assert_like_plain(net, torch.randn(3, 4))


def test_an_outer_tensor_is_taken_along():
    """One that no module registered."""
    outside = torch.randn(4)
    assert_like_plain(Glue(lambda _, h: h + outside), torch.randn(3, 4))


def test_two_tensors_when_the_sample_had_one_for_both_arguments_are_refused() -> None:
    """The stage has one input for them. A view of the whole is the same tensor to it."""

    class Adds(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with bp.Block(stage=0):
                h = super().forward(x)
            with bp.Block(stage=1):
                return h + y

    x = torch.ones(2, 4)
    first = build_stage(Adds(4, 4), 0, (x, x))
    assert len(first.arguments(x, x[:])) == 1
    with pytest.raises(RouteError, match=r"expected one tensor for two arguments"):
        first.arguments(x, x.clone())


def test_a_parameter_that_only_a_function_reads_is_its_stages():
    """A reentrant checkpoint is one call; the layer in it was in no process."""

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.second = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(0):
                h = self.first(x)
            with bp.Block(1):
                h = checkpoint(lambda h: self.inner(h).relu(), h, use_reentrant=True)
                return self.second(h)

    stages = assert_like_plain(Inside(), torch.randn(3, 4))
    names = {name for name, _ in stages[1].named_parameters()}
    assert names == {"inner.weight", "inner.bias", "second.weight", "second.bias"}


def test_a_generator_of_the_users_when_two_stages_draw_from_it_is_refused():
    """Each process has one of its own."""
    generator = torch.Generator()

    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(0):
                h = self.first(x) + torch.rand(4, generator=generator)
            with bp.Block(1):
                return self.second(h) + torch.rand(4, generator=generator)

    with pytest.raises(bp.BlockpipeError, match=r"a torch\.Generator is drawn from on hops"):
        build_stage(Draws(), 0, torch.randn(3, 4))


def test_a_write_to_one_of_two_views_that_cross_is_refused():
    """In another process they are no views of one memory."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            flat = h.view(-1)
            with bp.Block(1):
                flat.mul_(2)
                return h + 1

    with pytest.raises(
        bp.BlockpipeError, match="written in place on a later stage through another view"
    ):
        build_stage(Views(), 0, torch.randn(3, 4))


def test_a_model_on_the_meta_device_gets_one_stages_values():
    """The others' stay there."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    bp.begin_blocks(net, {"1": 1})
    last = build_stage(net, -1, torch.zeros(3, 4), init="reset_parameters")
    assert {n: p.device.type for n, p in net.named_parameters()} == {
        "0.weight": "meta",
        "0.bias": "meta",
        "1.weight": "cpu",
        "1.bias": "cpu",
    }
    assert last(torch.zeros(3, 8))[0].shape == (3, 2)


def test_a_stage_that_is_not_there_is_an_error():
    """With those that are."""
    net = bp.begin_blocks(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), {"1": 1})
    with pytest.raises(bp.BlockpipeError, match="expected a stage from 0 to 1, got 2"):
        build_stage(net, 2, torch.zeros(3, 4))


class Parts(nn.Module):
    """Sets the parts of a complex tensor of another stage, or takes it as another class."""

    def __init__(self, *, parts: bool) -> None:
        super().__init__()
        self.a, self.b, self.parts = nn.Linear(4, 4), nn.Linear(4, 4), parts

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        c = torch.complex(h, x)
        with bp.Block(1):
            if self.parts:
                c.real = c.real * 2
                c.imag = c.real * 3
                return self.b(c.real + c.imag)
            return self.b((h.as_subclass(Own) * 2).as_subclass(Tensor))


class Own(Tensor):
    """A class of the user's."""


@pytest.mark.parametrize("parts", [False, True])
def test_what_no_function_mode_sees_when_stages_are_modules_is_the_plain_ones(parts: bool) -> None:
    """An assignment to a part was a write to a leaf in the second stage."""
    assert_like_plain(Parts(parts=parts), torch.randn(3, 4))


class Normalizes(nn.Module):
    """Has one batch norm on two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        with bp.Block(1):
            y: Tensor = self.norm(h.tanh())
            return y


def test_a_remedy_that_only_a_pipeline_has_is_said_to_be_one():
    """Its errors name the schedules of a Pipeline."""
    with pytest.raises(StateError, match="or use schedule='uncut'") as caught:
        build_stage(Normalizes(), 0, torch.randn(3, 4))
    assert "have no schedule='uncut'" in caught.value.__notes__[0]
