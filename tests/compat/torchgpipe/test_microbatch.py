"""Where a forward is, in torchgpipe's words: what its tests pin, and one key a micro-batch."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.compat.torchgpipe import GPipe, current_microbatch, is_checkpointing, is_recomputing

from ...parameter_sets import each_value
from ...stage_devices import assert_close, stages


def gpipe(net: nn.Sequential, balance: list[int], **options: Any) -> GPipe:
    return GPipe(net, balance, devices=stages(len(balance)), **options)


skips: dict[Tensor | None, Tensor] = {}


class KeepsByMicrobatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.GELU())

    def forward(self, input: Tensor) -> Tensor:
        skips[current_microbatch()] = input
        return self.body(input).sin()


class TakesByMicrobatch(KeepsByMicrobatch):
    def forward(self, input: Tensor) -> Tensor:
        skip = skips.pop(current_microbatch())
        skip = skip.to(input.device)
        return (self.body(input) + skip).sin()


@each_value(
    mode=["never", "always", "except_last"],
    balance=[[3], [1, 2], [2, 1], [1, 1, 1]],
)
def test_a_long_skip_by_microbatch(mode: str, balance: list[int]) -> None:
    """A dictionary by ``current_microbatch()``: right, and empty afterwards."""
    net = nn.Sequential(KeepsByMicrobatch(), nn.Linear(4, 4), TakesByMicrobatch())
    plain, x = copy.deepcopy(net), torch.rand(6, 4)
    model = gpipe(net, balance, chunks=3, checkpoint=mode)
    for _ in range(2):
        model(x).square().mean().backward()
        plain(x).square().mean().backward()
        assert not skips
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)


def test_a_microbatch_is_one_object_and_may_be_referred_to_weakly() -> None:
    """The same in all partitions of one forward, another in each other; nothing keeps it alive."""
    seen: list[tuple[int | None, Any]] = []
    names: list[str] = []

    class Look(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            key = current_microbatch()
            if bp.current_microbatch() is not None:
                seen.append((bp.current_microbatch(), weakref.ref(key)))
                names.append(f"{id(key)}")
            return super().forward(input)

    model = gpipe(nn.Sequential(Look(4, 4), Look(4, 4)), [1, 1], chunks=3, checkpoint="never")
    x = torch.rand(6, 4)
    output = model(x)
    groups = {index: {id(ref()) for i, ref in seen if i == index} for index in range(3)}
    assert all(len(group) == 1 for group in groups.values())
    assert len(set.union(*groups.values())) == 3
    output.sum().backward()
    del output
    gc.collect()
    assert not any(ref() is not None for _, ref in seen)
    assert current_microbatch() is None


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counter = 0
        self.flags: list[tuple[bool, bool]] = []

    def forward(self, input: Tensor) -> Tensor:
        self.flags.append((is_checkpointing(), is_recomputing()))
        if not is_recomputing():
            self.counter += 1
        return input.tanh().sigmoid().tanh()


@pytest.mark.parametrize(("mode", "again"), [("never", 0), ("except_last", 2), ("always", 3)])
def test_the_flags(mode: str, again: int) -> None:
    """``is_checkpointing()`` in a call that runs again later, ``is_recomputing()`` when it does;
    neither in evaluation, outside, or afterwards."""
    counter = Counter()
    model = gpipe(nn.Sequential(nn.Linear(4, 4), counter), [1, 1], chunks=3, checkpoint=mode)
    x = torch.rand(6, 4)
    model(x)  # the recording's calls are not counted
    counter.counter, counter.flags = 0, []
    model(x).sum().backward()
    assert counter.counter == 3
    assert sorted(counter.flags) == sorted(
        [(False, True), (True, False)] * again + [(False, False)] * (3 - again)
    )
    model.eval()
    counter.flags = []
    with torch.no_grad():
        model(x)
    assert not any(map(any, counter.flags))
    assert not is_checkpointing()
    assert not is_recomputing()


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_except_last_counts_the_microbatches_that_there_are(samples: int) -> None:
    """torchgpipe compares with ``chunks``: of a batch of 2 in 4 chunks it recomputes both."""
    counter = Counter()
    model = gpipe(nn.Sequential(nn.Linear(4, 4), counter), [1, 1], chunks=4)
    x = torch.rand(samples, 4)
    model(x).sum().backward()
    counter.flags = []
    model(x).sum().backward()
    assert counter.flags.count((False, True)) == samples - 1


def test_nothing_is_checkpointed_in_evaluation() -> None:
    """Nor under ``no_grad``, which reaches every layer."""
    counter = Counter()
    grads: list[bool] = []
    net = nn.Sequential(nn.Linear(4, 4), counter, nn.Linear(4, 4))
    net[0].register_forward_hook(lambda *_: grads.append(torch.is_grad_enabled()))
    model = gpipe(net, [1, 2], chunks=2, checkpoint="always")
    x = torch.rand(4, 4)
    latent: list[Tensor] = []
    model.partitions[0].register_forward_hook(lambda *found: latent.append(found[-1]))
    with torch.no_grad():
        model(x)
        grads.clear()
        latent.clear()
        model(x)
    assert grads == [False, False]
    assert all(not tensor.requires_grad for tensor in latent)
    assert not any(map(any, counter.flags[-2:]))
