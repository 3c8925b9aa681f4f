"""``GPipe``: what torchgpipe's tests pin, and none of its faults.

Against the plain ``nn.Sequential``, on the CPU's lanes and on the simulated accelerator.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.compat.torchgpipe import (
    BalanceError,
    GPipe,
    TooFewDevicesError,
)
from blockpipe.errors import PlanError, UsageError

from ...stage_devices import assert_close, device_type, stages
from .gpipe_models import MODES, gpipe, layers

# --- attributes, and what is refused


def test_the_plain_modules_checkpoint_is_refused_with_the_way() -> None:
    """The module that the pipeline is made of takes it, before and afterwards."""
    values = layers().state_dict()
    net = layers()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    model = gpipe(net, [2, 2], chunks=2)
    with pytest.raises(UsageError, match=r"got those of the plain module.*module\.load_state_dict"):
        model.load_state_dict(values)
    net.load_state_dict(values)
    assert_close(list(model.parameters()), list(values.values()), rtol=0, atol=0)


def test_attributes_are_coerced() -> None:
    """As torchgpipe does it: sequences to lists, 42.0 to 42, anything to a string."""

    class Always:
        def __str__(self) -> str:
            return "always"

    model = GPipe(
        nn.Sequential(nn.Linear(1, 1)),
        balance=(1,),
        devices=("cpu",),
        chunks=42.000,  # type: ignore[arg-type]
        checkpoint=Always(),  # type: ignore[arg-type]
    )
    assert model.balance == [1]
    assert model.devices == [torch.device("cpu")]
    assert (model.chunks, type(model.chunks)) == (42, int)
    assert (model.checkpoint, type(model.checkpoint)) == ("always", str)
    assert len(list(model.parameters())) == 2
    assert isinstance(model, bp.Pipeline)


@pytest.mark.parametrize("balance", [[2], [1, 1]])
def test_it_is_a_sequence(balance: list[int]) -> None:
    """Length, items from both ends, iteration: of layers, whatever the partitions are."""
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    model = gpipe(nn.Sequential(a, b), balance, chunks=2)
    assert len(model) == 2
    assert list(model) == [a, b]
    assert [model[0], model[1], model[-1], model[-2]] == [a, b, b, a]
    with pytest.raises(IndexError):
        model[2]


def test_extra_devices_are_left_over() -> None:
    """And ``None`` is all there are, or the CPU for each partition."""
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    assert len(GPipe(net, [1, 1], devices=[*stages(2), *stages(2)], chunks=2).devices) == 2
    assert len({d.type for d in GPipe(net, [1, 1], chunks=2).devices} & {device_type()}) == 1


@pytest.mark.parametrize(
    ("balance", "kind", "message"),
    [
        (None, BalanceError, r"positive integers, .* for balance, got None .*torchgpipe\.balance"),
        ([1], BalanceError, r"the module's 2 layers for balance, got \[1\] .*torchgpipe\.bal"),
        ([3], BalanceError, r"got \[3\]"),
        ([0, 2], BalanceError, "a list of positive integers"),
        ([-1, 3], BalanceError, "a list of positive integers"),
        (["1", 1], BalanceError, "a list of positive integers"),
        (2, BalanceError, "a list of positive integers, .* got 2"),
    ],
)
def test_a_wrong_balance_is_a_value_error(
    balance: Any, kind: type[Exception], message: str
) -> None:
    """Which is a kind of ours, too."""
    with pytest.raises(kind, match=message) as caught:
        GPipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), balance)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, PlanError)
    assert __file__ in str(caught.value)


def test_too_few_devices_is_an_index_error() -> None:
    """Which is a kind of ours, too."""
    net = nn.Sequential(*(nn.Linear(1, 1) for _ in range(4)))
    with pytest.raises(IndexError, match=r"a device for each of 4 partitions, got 1"):
        GPipe(net, [1, 1, 1, 1], devices=["cpu"])
    assert issubclass(TooFewDevicesError, PlanError)


@pytest.mark.parametrize("chunks", [0, -1, 1.5, "2"])
def test_wrong_chunks_are_a_value_error(chunks: Any) -> None:
    """From one micro-batch on."""
    with pytest.raises(ValueError, match="expected a positive integer for chunks, got "):
        GPipe(nn.Sequential(nn.Linear(1, 1)), [1], devices=["cpu"], chunks=chunks)


def test_an_unknown_mode_is_a_value_error() -> None:
    """The three are fine with one micro-batch, too."""
    for mode in MODES:
        GPipe(nn.Sequential(nn.Linear(1, 1)), [1], devices=["cpu"], checkpoint=mode)
    with pytest.raises(ValueError, match="'always' for checkpoint, got 'sometimes'"):
        GPipe(nn.Sequential(nn.Linear(1, 1)), [1], devices=["cpu"], checkpoint="sometimes")


def test_moves_are_denied_and_casts_allowed() -> None:
    """A TypeError for every way to name a device."""
    model = gpipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1], chunks=2)
    for move in (
        lambda: model.cuda(),
        lambda: model.cpu(),
        lambda: model.to(torch.device("cuda")),
        lambda: model.to(0),
        lambda: model.to("cuda"),
        lambda: model.to(device=0),
        lambda: model.to(torch.rand(1)),
        lambda: model.to(tensor=torch.rand(1)),
    ):
        with pytest.raises(TypeError, match="partitions have devices of their own"):
            move()
    model.double()
    model.to(torch.float)
    model.to(dtype=torch.double)
    assert model(torch.rand(2, 1, dtype=torch.double)).dtype == torch.double


def test_what_is_no_tensor_is_a_type_error() -> None:
    """And so is a second argument. Beside a tensor, other things are handed on."""
    model = gpipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], chunks=2)
    for wrong in ("hello", 42, (), None):
        with pytest.raises(
            UsageError, match="expected a tensor or a tuple of tensors for input, got"
        ):
            model(wrong)
    x = torch.rand(2, 1)
    with pytest.raises(
        UsageError, match=r"got 2 by position \(.*test_gpipe.*write .*model\(\(a, b"
    ):
        model(x, x)
    with pytest.raises(UsageError, match=r"one argument, .*got 0 by position and \['x'\] by name"):
        model(x=x)
    assert_close(model(input=x), x)
    x, word = model((torch.ones(2, 1), "hello"))
    assert (x.tolist(), word) == ([[1.0], [1.0]], "hello")


class OwnForward(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_a_forward_that_would_be_lost_is_refused() -> None:
    """torchgpipe drops what a sequential's own forward or hooks do."""
    with pytest.raises(UsageError, match="with a forward of its own .*mark_sequential"):
        GPipe(OwnForward(nn.Linear(1, 1)), [1])
    hooked = nn.Sequential(nn.Linear(1, 1))
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(UsageError, match="with hooks of its own"):
        GPipe(hooked, [1])


@pytest.mark.parametrize("balance", [[4], [1, 3], [2, 2], [1, 2, 1]])
def test_layers_may_repeat_and_share_parameters(balance: list[int]) -> None:
    """Both are ValueErrors in torchgpipe."""
    shared, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = shared.weight
    net = nn.Sequential(shared, nn.Tanh(), shared, last)
    plain, x = copy.deepcopy(net), torch.rand(6, 4)
    model = gpipe(net, balance, chunks=3)
    assert len(model) == 4
    model(x).square().mean().backward()
    plain(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)


def test_an_empty_sequential_is_legal() -> None:
    """It gives what it is given, if that is a tensor."""
    model = GPipe(nn.Sequential(), [])
    assert model(torch.tensor(42)) == torch.tensor(42)
    assert model((torch.tensor(42),)) == (torch.tensor(42),)
    with pytest.raises(TypeError, match="expected a tensor"):
        model(42)


def test_partitions_that_do_nothing_are_legal() -> None:
    """Wherever they are; each device's part is still its own."""
    net = nn.Sequential(
        *(nn.Identity(), nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4), nn.ReLU(inplace=True)),
        nn.Identity(),
    )
    plain, x = copy.deepcopy(net), torch.rand(6, 4)
    model = gpipe(net, [1] * 6, chunks=3)
    y = model(x)
    y.sum().backward()
    plain(x).sum().backward()
    assert_close(y, plain(x))
    assert_close(model[1].weight.grad, plain[1].weight.grad)
    assert str(y.device).startswith(device_type())
    twin = gpipe(nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], chunks=2)
    assert [t.shape for t in twin((torch.rand(4, 1), torch.rand(4, 2)))] == [(4, 1), (4, 2)]


def test_the_module_is_left_unmarked() -> None:
    """And may be wrapped again with another balance; its layers' modes stay their own."""
    net = layers()
    net.eval()
    net[2].train()
    first = gpipe(net, [2, 2], chunks=2)
    second = gpipe(net, [1, 3], chunks=2)
    x = torch.rand(4, 4)
    assert_close(first(x), second(x))
    assert bp.record(net, x).num_stages == 1
    assert (first.training, net[2].training, net[0].training) == (False, True, False)
