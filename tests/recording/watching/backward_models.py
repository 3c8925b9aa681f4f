"""Custom functions whose backwards share values with forwards, and models that apply them."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import blockpipe as bp

COUNTS = {"calls": 0}


class Net(nn.Module):
    """Two layers on two stages."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale, self.seen, self.norms = 1.0, 0, []

    @property
    def weight(self) -> float:
        return 1.0 + self.seen

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.first(self.a(x).tanh())
        with bp.Block(stage=1):
            return self.b(self.second(h.sin()))

    def first(self, h: Tensor) -> Tensor:
        return h

    def second(self, h: Tensor) -> Tensor:
        return h


class Sets(Function):
    """Its backward sets what a forward may read, by a local name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: Net) -> Tensor:
        ctx.net = net
        return x * net.scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        net = ctx.net
        net.scale = 1.0 + float(gradient.norm())
        return gradient, None


class Reads(Function):
    """Its backward reads what a forward may set."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: Net) -> Tensor:
        ctx.net = net
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * (1.0 + ctx.net.seen), None


class ReadsInGenerator(Reads):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (*(gradient * (1.0 + ctx.net.seen) for gradient in gradients), None)


class ReadsByProperty(Reads):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.net.weight, None


class ReadsOnce(Reads):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * (1.0 + ctx.net.seen), None


class ReadsUncast(Reads):
    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * (1.0 + ctx.net.seen), None


class ReadsInHelper(Reads):
    @staticmethod
    def helped(net: Net, gradient: Tensor) -> Tensor:
        return gradient * (1.0 + net.seen)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ReadsInHelper.helped(ctx.net, gradient), None


class ReadsByVjp(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, net: Net) -> Tensor:
        ctx.net = net
        return x * 1.0

    @staticmethod
    def vjp(ctx: Any, gradient: Tensor) -> Any:
        return gradient * (1.0 + ctx.net.seen), None


class ReadsInCallback(Reads):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        def end() -> None:
            ctx.net.norms.append(ctx.net.seen)

        torch.autograd.Variable._execution_engine.queue_callback(end)
        return gradient, None


class ReadsByLaterName(Reads):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        net = None
        if ctx.needs_input_grad[0]:
            net = ctx.net
        return gradient * (1.0 + net.seen), None


class CountsAll(Function):
    """Its backward counts in a global."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        COUNTS["calls"] += 1
        return gradient * COUNTS["calls"]


class SetsOwn(Function):
    """Its backward sets an attribute of the class."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * SetsOwn.factor

    @classmethod
    def follow(cls, gradient: Tensor) -> None:
        cls.factor = 1.0 + float(gradient.norm())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        SetsOwn.follow(gradient)
        return gradient


def _counting_backward(ctx: Any, gradient: Tensor) -> Tensor:
    COUNTS["calls"] += 1
    return gradient * COUNTS["calls"]


@functools.cache
def operation() -> Any:
    """An operation whose backward counts in a global."""
    made = torch.library.custom_op(
        "blockpipe_tests::counted",
        lambda x: x.clone(),
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
    )
    made.register_fake(torch.empty_like)
    made.register_autograd(_counting_backward)
    return made


class Follows(Net):
    def first(self, h: Tensor) -> Tensor:
        return Sets.apply(h, self)


class Counts(Net):
    """Its forward counts what the backward of a custom function reads."""

    function: type[Function] = Reads

    def first(self, h: Tensor) -> Tensor:
        self.seen += 1
        return self.function.apply(h, self)


def counting(function: type[Function]) -> type[Net]:
    return type(function.__name__, (Counts,), {"function": function})


reads = Reads.apply  # as torch's tutorial does


class CountsByOtherName(Counts):
    def first(self, h: Tensor) -> Tensor:
        self.seen += 1
        return reads(h, self)


class CrossesByOtherName(Net):
    def second(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x).tanh()
        with bp.Block(stage=1):
            return self.b(reads(h, self))


class CountsInReentrant(Counts):
    def first(self, h: Tensor) -> Tensor:
        self.seen += 1
        return checkpoint(lambda h: Reads.apply(h, self), h, use_reentrant=True)


class CountsOnBoth(Net):
    def first(self, h: Tensor) -> Tensor:
        return CountsAll.apply(h)

    second = first


class CountsInOperation(Net):
    def first(self, h: Tensor) -> Tensor:
        return operation()(h) * COUNTS["calls"]


class OfClass(Net):
    def first(self, h: Tensor) -> Tensor:
        return SetsOwn.apply(h)
