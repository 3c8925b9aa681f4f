"""What several processes run together: a Pipeline in each, with a share of the batch."""

import copy
import time
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import blockpipe as bp
from blockpipe.distributed import ReplicatedPipeline
from blockpipe.errors import UsageError
from blockpipe.preparation import prepared

from .cases import deep, mean_square
from .models import gpt, ids


def shares_are_the_whole_batch(rank: int, ranks: int) -> None:
    """Of different sizes, on several schedules, two steps, also where a layer is frozen; weights
    begin as the first has them."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(10, 6, generator=generator), torch.randn(10, 6, generator=generator)
    index = torch.randint(0, 5, (10,), generator=generator)
    for schedule, frozen in (("1f1b", 0), ("zb-h1", 1), ("sequential", 0)):
        model = deep(3, frozen)
        plain = copy.deepcopy(model)
        if rank:
            with torch.no_grad():
                model.layers[0].weight.add_(1)
        pipe = bp.Pipeline(model, devices=["cpu"] * 3, chunks=2, schedule=schedule)
        mesh = init_device_mesh("cpu", (ranks,))
        shared = ReplicatedPipeline(pipe, mesh=mesh)
        share = slice(0, 6) if rank == 0 else slice(6, 10)
        for _ in range(2):
            given: dict[str, Any] = {"target": y[share], "loss_fn": mean_square}
            found = shared.forward_backward(x[share], index[share], **given)
            loss = mean_square(plain(x, index), y)
            loss.backward()
            torch.testing.assert_close(found.loss.item(), loss.item())
        expected = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            wanted = expected[name].grad
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-5, atol=1e-6)


def the_last_stage_is_summed_while_the_first_runs(rank: int, ranks: int) -> None:
    """In every process in one order; a profile is told of the step as well."""
    net = nn.Sequential(*[nn.Linear(60, 60) for _ in range(3)])
    bp.begin_blocks(net, {"1": 1, "2": 2})
    x = torch.randn(64, 60)
    pipe = bp.Pipeline(net, devices=["cpu"] * 3, chunks=4, sample=((x,), {}))
    shared = ReplicatedPipeline(pipe)
    calls = 0

    def wait(_: torch.Tensor) -> None:
        """In the first stage's last backward, for the last stage's sum."""
        nonlocal calls
        calls += 1
        ends = time.monotonic() + 60
        while calls == 4 and not (shared.sums and shared.sums.order) and time.monotonic() < ends:
            time.sleep(0.01)

    net[0].weight.register_hook(wait)
    for _ in range(2):
        calls = 0
        # A thread for each stage.
        with (
            mock.patch.multiple(prepared, SMALL_OPERATION=0.0, SMALL_HOP=0.0),
            shared.pipe.profile() as timeline,
        ):
            shared.forward_backward(x, loss_fn=lambda out: out.square().mean())
        assert shared.sums is not None
        assert [hops for hops, _ in shared.sums.order] == [(2,), (1,), (0,)]
        assert not shared.sums.order[0][1]
        assert timeline.actions()


def a_tied_weight_waits_for_all_its_stages(rank: int, ranks: int) -> None:
    """And the model's own loss counts."""
    model, plain = gpt(), gpt()
    given = {"input_ids": ids(8), "labels": ids(8)}
    shared = ReplicatedPipeline(bp.Pipeline(model, devices=["cpu"] * 4, chunks=2))
    share = {name: tensor.chunk(ranks)[rank] for name, tensor in given.items()}
    found = shared.forward_backward(**share)
    loss = plain(**given).loss
    loss.backward()
    torch.testing.assert_close(found.loss.item(), loss.item())
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-6)
    assert shared.sums is not None
    assert [hops for hops, _ in shared.sums.order] == [(2,), (1,), (0,), (0, 3)]


def a_step_that_fails_in_one_process_ends_in_all(rank: int, ranks: int) -> None:
    """With where it failed, before the first sum and after some; the next one works."""
    net = bp.begin_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"1": 1})
    shared = ReplicatedPipeline(bp.Pipeline(net, devices=["cpu"] * 2, chunks=2))
    x, y, last = torch.ones(4, 4), torch.ones(4, 4), ranks - 1

    def fails(output: Any, target: Any) -> Any:
        raise ValueError("no luck")

    def fails_backwards(gradient: Tensor) -> None:
        raise ValueError("no luck with gradients")

    shared.forward_backward(x, target=y, loss_fn=mean_square)
    before = [p.grad.clone() for p in net.parameters()]
    hook = net[0].weight.register_hook(fails_backwards) if rank == last else None
    for text, loss_fn in (
        ("no luck with gradients", mean_square),
        ("no luck", fails if rank == last else mean_square),
    ):
        try:
            shared.forward_backward(x, target=y, loss_fn=loss_fn)
        except ValueError as error:
            assert rank == last, str(error)
        except bp.BlockpipeError as error:
            assert rank < last, str(error)
            for said in (f"rank {last} failed in a step", f"ValueError: {text}", "micro-batch"):
                assert said in str(error), str(error)
            assert "replica_cases.py" in str(error), str(error)
        else:
            raise AssertionError("it went on")
        if hook is not None:
            hook.remove()
    try:
        shared.forward_backward(x[:3] if rank == last else x, target=y, loss_fn=mean_square)
    except bp.BlockpipeError as error:
        assert "expected a shape with the batch's 3 samples" in str(error)
    else:
        raise AssertionError("it went on")
    for parameter in net.parameters():
        parameter.grad = None
    shared.forward_backward(x, target=y, loss_fn=mean_square)
    for parameter, wanted in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad, wanted)


def each_process_has_dropout_of_its_own(rank: int, ranks: int) -> None:
    """The same one in a second run; generators that began alike are alike after each step."""

    def numbers() -> Any:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(6, 32), nn.Dropout(), nn.Linear(32, 32), nn.Dropout())
        bp.begin_blocks(net, {"2": 1})
        shared = ReplicatedPipeline(bp.Pipeline(net, devices=["cpu"] * 2, chunks=2))
        found, after = [], []
        for _ in range(2):
            result = shared.forward_backward(
                torch.ones(4, 6), loss_fn=lambda out: out.sum(), return_outputs=True
            )
            found.append(result.outputs == 0)
            after.append(torch.default_generator.get_state())
        return torch.stack(found), torch.stack(after)

    dropped, states = numbers()
    again, states_again = numbers()
    assert torch.equal(dropped, again)
    assert torch.equal(states, states_again)
    assert not torch.equal(dropped[0], dropped[1])
    for tensor, alike in ((dropped.to(torch.uint8), False), (states, True)):
        every = [torch.empty_like(tensor) for _ in range(ranks)]
        dist.all_gather(every, tensor)
        assert torch.equal(every[0], every[1]) is alike
    if rank == 0:  # those of a pipeline alone
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(6, 32), nn.Dropout(), nn.Linear(32, 32), nn.Dropout())
        pipe = bp.Pipeline(bp.begin_blocks(net, {"2": 1}), devices=["cpu"] * 2, chunks=2)
        alone = pipe.forward_backward(
            torch.ones(4, 6), loss_fn=lambda out: out.sum(), return_outputs=True
        )
        assert torch.equal(alone.outputs == 0, dropped[0])


def classes_weigh_as_in_the_whole_batch(rank: int, ranks: int) -> None:
    """CrossEntropyLoss(weight=…) divides by the weights of the targets, which differ."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    plain = copy.deepcopy(net)
    x, y = torch.randn(8, 6), torch.tensor([0, 0, 0, 1, 2, 2, 1, 2])
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.2]))
    bp.begin_blocks(net, {"1": 1})
    shared = ReplicatedPipeline(bp.Pipeline(net, devices=["cpu"] * 2, chunks=2))
    share = slice(0, 5) if rank == 0 else slice(5, 8)
    found = shared.forward_backward(x[share], target=y[share], loss_fn=loss_fn)
    loss = loss_fn(plain(x), y)
    loss.backward()
    torch.testing.assert_close(found.loss.item(), loss.item())
    for parameter, wanted in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad)


class Hides(nn.Module):
    """Has a layer in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.hidden = nn.Linear(4, 4), nn.Linear(4, 4), [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.hidden[0](self.a(x))
        with bp.Block(stage=1):
            return self.b(h)


def a_hidden_parameter_is_refused_in_all(rank: int, ranks: int) -> None:
    """Nothing would sum its gradient; frozen, it is a constant."""
    net = Hides()
    shared = ReplicatedPipeline(bp.Pipeline(net, devices=["cpu"] * 2, chunks=2))
    x = torch.ones(4, 4)
    with pytest.raises(UsageError, match=r"parameters that are registered.*nn\.ModuleList"):
        shared.forward_backward(x, target=x, loss_fn=mean_square)
    net.hidden[0].requires_grad_(False)
    shared.forward_backward(x, target=x, loss_fn=mean_square)
    assert net.a.weight.grad is not None


class Scaled(nn.Module):
    """A loss that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return mean_square(output, target) * self.scale


def a_trained_loss_is_refused_in_all(rank: int, ranks: int) -> None:
    """Each process would train another one."""
    net = bp.begin_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"1": 1})
    shared = ReplicatedPipeline(bp.Pipeline(net, devices=["cpu"] * 2, chunks=2))
    x, loss = torch.ones(4, 4), Scaled()
    for loss_fn in (loss, loss.forward, partial(loss)):
        with pytest.raises(UsageError, match=r"loss without trained parameters.*'scale'"):
            shared.forward_backward(x, target=x, loss_fn=loss_fn)
    loss.requires_grad_(False)
    shared.forward_backward(x, target=x, loss_fn=loss)
    assert net[0].weight.grad is not None


class Experts(nn.Module):
    """The data chooses the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.layers[int(x[0, 0] > 0)](h)


class Chosen(nn.Module):
    """Has experts on its first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.experts, self.c = nn.Linear(4, 4), Experts(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.experts(self.a(x), x)
        with bp.Block(stage=1):
            return self.c(h)


def a_layer_that_one_process_uses_is_trained_in_all(rank: int, ranks: int) -> None:
    """Each process has recorded other reads: in the first step, and the other way about."""
    torch.manual_seed(0)
    net = Chosen()
    plain = copy.deepcopy(net)
    shared = ReplicatedPipeline(bp.Pipeline(net, devices=["cpu"] * 2, chunks=2))
    for sign in (1, -1, 1):
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        x[:4, 0], x[4:, 0] = -sign, sign
        share = slice(0, 4) if rank == 0 else slice(4, 8)
        found = shared.forward_backward(x[share], target=y[share], loss_fn=mean_square)
        parts = zip(x.chunk(4), y.chunk(4), strict=True)
        loss = sum((mean_square(plain(a), b) / 4 for a, b in parts), torch.zeros(()))
        loss.backward()
        torch.testing.assert_close(found.loss.item(), loss.item())
        for mine, wanted in zip(net.parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (wanted.grad is None)
            if wanted.grad is not None:
                torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-4, atol=1e-6)


def a_hook_that_steps_by_a_share_is_refused_in_all(rank: int, ranks: int) -> None:
    net = bp.begin_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"1": 1})
    shared = ReplicatedPipeline(bp.Pipeline(net, devices=["cpu"] * 2, chunks=2))
    net[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    x = torch.ones(4, 4)
    with pytest.raises(UsageError, match=r"register_post_accumulate_grad_hook.*'0.weight'"):
        shared.forward_backward(x, target=x, loss_fn=mean_square)


class Centered(torch.autograd.Function):
    """Subtracts the mean over the samples of all processes, as normalization over them does."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h - _mean_of_all(h)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - _mean_of_all(gradient)


def _mean_of_all(h: Tensor) -> Tensor:
    total = h.sum(0)
    dist.all_reduce(total)
    return total / (len(h) * dist.get_world_size())


class Center(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return Centered.apply(h)


def collectives_in_a_backward_are_not_mixed_with_the_sums(rank: int, ranks: int) -> None:
    """Those of the first stage come while gradients of the others are summed: in the user's own
    group each process would make them in another order, and both abort."""
    layers = [nn.Linear(6, 6) for _ in range(4)]
    net = bp.begin_blocks(nn.Sequential(layers[0], Center(), *layers[1:]), {"2": 1, "3": 2})
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ranks, 16, 6, generator=generator)
    shared = ReplicatedPipeline(bp.Pipeline(net, devices=["cpu"] * 3, chunks=4))
    plain = copy.deepcopy(nn.ModuleList(layers))  # as the first process has them
    with mock.patch.multiple(prepared, SMALL_OPERATION=0.0, SMALL_HOP=0.0):
        for _ in range(5):
            shared.forward_backward(x[rank], loss_fn=lambda out: out.square().mean())
    for _ in range(5):
        for part in x.chunk(4, dim=1):
            h = plain[0](part.flatten(0, 1))
            h = h - h.mean(0)
            for layer in plain[1:]:
                h = layer(h)
            (h.square().mean() / 4).backward()
    for layer, own in zip(layers, plain, strict=True):
        torch.testing.assert_close(layer.weight.grad, own.weight.grad, rtol=1e-4, atol=1e-5)
