"""What several processes run together: what fails in some of them is an error in all."""

from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import blockpipe as bp
from blockpipe.distributed import DistributedPipeline, kinds

from .cases import batch_of, deep, mean_square

_TORCH = str(torch.__version__)


def _raises(what: str, function: Any) -> None:
    try:
        function()
    except bp.BlockpipeError as error:
        assert what in str(error), str(error)
    else:
        raise AssertionError(f"not refused: {what}")


def other_shapes_are_found_before_anything_is_sent(rank: int, ranks: int) -> None:
    """In every process, and the next step works."""
    args, _ = batch_of(8)
    pipe = DistributedPipeline(deep(ranks), sample=args, chunks=4)
    wrong, other = batch_of(8 + 4 * rank)
    _raises(
        "expected all processes to do the same",
        lambda: pipe.forward_backward(*wrong, target=other, loss_fn=mean_square),
    )
    again, wanted = batch_of(12)  # another size, for all: recorded anew
    pipe.forward_backward(*again, target=wanted, loss_fn=mean_square)


def a_process_that_fails_before_a_step_ends_it_for_all(rank: int, ranks: int) -> None:
    args, target = batch_of(8)
    pipe = DistributedPipeline(deep(ranks), sample=args, chunks=4)
    bad = target[:5] if rank == ranks - 1 else target
    what = "target" if rank == ranks - 1 else f"rank {ranks - 1} failed before the step began"
    _raises(what, lambda: pipe.forward_backward(*args, target=bad, loss_fn=mean_square))
    pipe.forward_backward(*args, target=target, loss_fn=mean_square)


def a_call_that_is_refused_in_one_process_is_heard_of(rank: int, ranks: int) -> None:
    """In all: otherwise the others would take its next call for this one."""
    args, target = batch_of(8)
    pipe = DistributedPipeline(deep(ranks), sample=args, chunks=4)
    what = "expected a target" if rank == 0 else "rank 0 failed before the step began"
    for run in (pipe.forward_backward, pipe.verify):
        given = None if rank == 0 else target
        _raises(what, partial(run, *args, target=given, loss_fn=mean_square))
    with torch.set_grad_enabled(rank == 0):
        what = "expected a call without gradients" if rank == 0 else "rank 0 failed before"
        _raises(what, lambda: pipe(*args))
    pipe.forward_backward(*args, target=target, loss_fn=mean_square)


def what_differs_is_named_at_the_start(rank: int, ranks: int) -> None:
    """With its values and their ranks, before any parameter is sent."""
    args, _ = batch_of(8)
    last = rank == ranks - 1
    others = "rank 0" if ranks == 2 else f"ranks {', '.join(map(str, range(ranks - 1)))}"

    def differs(name: str, usual: object, other: object, model: Any = None, **options: Any) -> None:
        text = f"{name}: {usual} on {others}, {other} on rank {ranks - 1}"
        options = {"chunks": 4, "sample": args, **options}
        _raises(text, lambda: DistributedPipeline(model or deep(ranks), **options))

    differs("chunks", 4, 8, chunks=8 if last else 4)
    differs("schedule", "1f1b", "gpipe", schedule="gpipe" if last else "1f1b")
    differs("loss_reduction", "mean", "sum", loss_reduction="sum" if last else "mean")
    double = (args[0].double(), args[1])
    each = (
        "args[0]: float32[8, 6], args[1]: int64[8]",
        "args[0]: float64[8, 6], args[1]: int64[8]",
    )
    differs(
        "arguments", *each, deep(ranks).double() if last else None, sample=double if last else args
    )

    net = nn.Sequential(*[nn.Linear(6, 6) for _ in range(ranks + 1)])
    bp.begin_blocks(net, {str(stage + last): stage for stage in range(1, ranks)})
    differs("stage of '1.bias'", 1, 0, net, sample=args[0])

    wider = deep(ranks)
    if last:
        wider.embedding = nn.Embedding(7, 6)
    differs("parameter 'embedding.weight'", "float32[5, 6]", "float32[7, 6]", wider)

    with mock.patch.object(torch, "__version__", "0.1" if last else torch.__version__):
        differs("torch", _TORCH, "0.1")
    with mock.patch.object(kinds, "__version__", "7" if last else "6"):
        differs("blockpipe", 6, 7)
    pipe = DistributedPipeline(deep(ranks), sample=args, chunks=4)
    pipe.module.layers[0].requires_grad_(not last)
    _raises(
        "trained parameters: ",
        lambda: pipe.forward_backward(*args, target=args[0], loss_fn=mean_square),
    )
    pipe.module.layers[0].requires_grad_(True)
    pipe.forward_backward(*args, target=args[0], loss_fn=mean_square)


def stages_that_do_not_fit_are_refused_everywhere(rank: int, ranks: int) -> None:
    args, _ = batch_of(8)
    _raises(
        f"expected as many stages as processes for schedule '1f1b', got {ranks + 1} stages",
        lambda: DistributedPipeline(deep(ranks + 1), sample=args, chunks=4),
    )
    _raises(
        "at least as many micro-batches as stages",
        lambda: DistributedPipeline(deep(ranks), sample=args, chunks=1).forward_backward(
            *args, loss_fn=torch.sum
        ),
    )


def a_replica_that_fails_before_a_step_ends_it_for_all(rank: int, ranks: int) -> None:
    """The others, which have other processes for their stages, hear of it, and go on with the
    gradients of before."""
    mesh = init_device_mesh("cpu", (2, ranks // 2))
    args, target = batch_of(8)
    model = deep(ranks // 2)
    if ranks == 2:
        model.embedding.requires_grad_(False)  # the second stage's
    pipe = DistributedPipeline(model, sample=args, mesh=mesh, chunks=2)
    pipe.forward_backward(*args, target=target, loss_fn=mean_square)
    before = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
    assert before
    bad = target[:5] if rank == ranks - 1 else target
    what = "target" if rank == ranks - 1 else f"rank {ranks - 1} failed before the step began"
    _raises(what, lambda: pipe.forward_backward(*args, target=bad, loss_fn=mean_square))
    in_training = rank < ranks // 2
    text = "mode: train on rank"
    _raises(
        text,
        lambda: pipe.train(in_training).forward_backward(*args, target=target, loss_fn=mean_square),
    )
    kept = [p.grad for p in pipe.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))
    pipe.train().forward_backward(*args, target=target, loss_fn=mean_square)


class Fails(nn.Module):
    """Does something in the third micro-batch of a step."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.what = what
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and type(x) in (Tensor, nn.Parameter):
            self.calls += 1
            if self.calls == 3:
                self.what()
        return self.linear(x)


def failing(
    rank: int, ranks: int, what: Any, *expected: str, first: bool = False, **options: Any
) -> None:
    """The last process, or the first one, does something in its third micro-batch; the others hear
    of it."""
    fails = 0 if first else ranks - 1
    net = nn.Sequential(*[Fails(what if at == fails else int) for at in range(ranks)])
    bp.begin_blocks(net, {str(at): at for at in range(ranks)})
    args = (torch.randn(8, 6),)
    pipe = DistributedPipeline(net, sample=args, chunks=4, **options)
    try:
        pipe.forward_backward(*args, loss_fn=torch.sum)
    except bp.BlockpipeError as error:
        for text in expected:
            assert text in str(error), str(error)
    else:
        raise AssertionError("it went on")


class Masked(nn.Module):
    """Branches on whether its mask has padding, and asks on the second stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = mask.eq(0)
        h = self.first(x)
        with bp.Block(1):
            if hidden.any():
                h = h.masked_fill(hidden, 0.0)
            return self.second(h)


def another_answer_about_the_arguments_is_refused_before_the_step(rank: int, ranks: int) -> None:
    """On all ranks, also if only the first one's values have it; the next step works."""
    if ranks != 2:
        return
    x, ones = torch.randn(8, 6), torch.ones(8, 6)
    padded = ones.clone()
    padded[5, 3] = 0.0
    pipe = DistributedPipeline(Masked(), sample=(x, ones), chunks=4)
    said = "expected False from" if rank == 0 else "rank 0 failed before the step began"
    for mask in (padded, padded if rank == 0 else ones):
        _raises(said, partial(pipe.forward_backward, x, mask, loss_fn=torch.sum))
        assert all(p.grad is None for p in pipe.parameters())
        pipe.forward_backward(x, ones, loss_fn=torch.sum)
        pipe.zero_grad()
    # What is recorded anew is recorded by the values that each process has.
    own, said = padded if rank == 0 else ones, "answers about the arguments"
    other = torch.zeros(12, 6) if rank == 0 else torch.ones(12, 6)
    _raises(said, lambda: pipe.forward_backward(torch.ones(12, 6), other, loss_fn=torch.sum))
    _raises(said, lambda: DistributedPipeline(Masked(), sample=(x, own), chunks=1))
    pipe.forward_backward(x, ones, loss_fn=torch.sum)


class Counts(nn.Linear):
    """Counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def a_loss_that_reads_a_number_of_another_process_is_refused(rank: int, ranks: int) -> None:
    """Before the step, in all; the next one works."""
    net = nn.Sequential(*[Counts(6, 6) for _ in range(ranks)])
    bp.begin_blocks(net, {str(at): at for at in range(ranks)})
    x = torch.randn(8, 6)
    pipe = DistributedPipeline(net, sample=x, chunks=4)
    wrong = partial(pipe.forward_backward, x, loss_fn=lambda o: o.sum() * net[0].calls)
    for _ in range(2):
        _raises("expected stages that share no state", wrong)
    pipe.forward_backward(x, loss_fn=lambda output: output.sum())
    assert all(p.grad is not None for p in pipe.parameters())


class Twice(nn.Module):
    """Calls one layer on two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        with bp.Block(1):
            return self.layer(h.tanh())


def a_hook_that_would_see_a_part_of_a_gradient_is_refused(rank: int, ranks: int) -> None:
    """On a parameter that two processes have; the step after it is taken off works."""
    if ranks != 2:
        return
    net, x = Twice(), torch.randn(8, 6)
    pipe = DistributedPipeline(net, sample=x, chunks=4)
    weight = net.layer.weight
    for register in (weight.register_hook, weight.register_post_accumulate_grad_hook):
        hook = register(lambda *given: None)
        run = partial(pipe.forward_backward, x, loss_fn=torch.sum)
        _raises("expected no hooks on parameter 'layer.weight'", run)
        hook.remove()
    pipe.forward_backward(x, loss_fn=torch.sum)


class Joins(nn.Module):
    """Calls a module of its own first stage on the second one, later on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.spare, self.second = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.joins = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        with bp.Block(1):
            return self.second(self.spare(h) if self.joins else h)


def a_module_that_joins_in_another_process_than_its_own_is_refused(rank: int, ranks: int) -> None:
    """There no optimizer has its parameters; the step without it works."""
    if ranks != 2:
        return
    net, x = Joins(), torch.randn(8, 6)
    pipe = DistributedPipeline(net, sample=x, chunks=4)
    run = partial(pipe.forward_backward, x, loss_fn=torch.sum)
    run()
    net.joins = True
    _raises("expected 'spare.weight' to be read where it is trained", run)
    net.joins = False
    run()


def code_that_read_another_value_in_one_process_is_found(rank: int, ranks: int) -> None:
    """Before anything is sent, also if it is set after the start."""
    net = deep(ranks)
    net.register_forward_hook(lambda module, args, output: output * module.scale)
    net.scale = 1.0
    args, _ = batch_of(8)
    pipe = DistributedPipeline(net, sample=args, chunks=4)
    run = partial(pipe.forward_backward, *args, loss_fn=torch.sum)
    run()
    net.scale = 2.0 if rank == 0 else 1.0
    _raises("code between modules, and the values that it read", run)
    _raises("set what that code reads (attributes, globals, settings) to the same values", run)
    net.scale = 2.0
    run()
