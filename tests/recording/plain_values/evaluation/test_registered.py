"""Which members a module has is a value like others: who registers one, and who counts them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

from ....alike import check_trains_alike
from ....stage_devices import stages


class Held(nn.Module):
    """Holds a module, to which stage 0 adds something that stage 1 may ask for."""

    def __init__(self, held: nn.Module, add: Callable[[Any], object], ask: Callable[..., int]):
        super().__init__()
        self.a, self.b, self.held = nn.Linear(4, 4), nn.Linear(4, 4), held
        self.add, self.ask = add, ask

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.add(self.held)
        with bp.Block(stage=1):
            return self.b(h) * self.ask(self.held)


def _buffer() -> nn.Buffer:
    return nn.Buffer(torch.zeros(1))


def _parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1), requires_grad=False)


def _registers(held: nn.Module) -> None:
    held.register_buffer(f"b{len(held._buffers)}", torch.zeros(1))


def _adds_module(held: nn.Module) -> None:
    held.add_module(f"m{len(held._modules)}", nn.Identity())


def _sets_buffer(held: nn.Module) -> None:
    setattr(held, f"b{len(held._buffers)}", _buffer())


def _sets_in_table(held: nn.Module) -> None:
    held._buffers[f"b{len(held._buffers)}"] = torch.zeros(1)


def _sets_member(held: nn.ModuleDict) -> None:
    held[f"m{len(held)}"] = nn.Identity()


def _loops(held: nn.ModuleList) -> int:
    number = 1
    for _ in held:
        number += 1
    return number


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], object], Callable[..., int]]] = {
    "register_buffer and buffers": (nn.Module, _registers, lambda m: len([*m.buffers()])),
    "register_buffer and _buffers": (nn.Module, _registers, lambda m: len(m._buffers)),
    "register_buffer and state_dict": (nn.Module, _registers, lambda m: len(m.state_dict())),
    "nn.Buffer and named_buffers": (nn.Module, _sets_buffer, lambda m: len([*m.named_buffers()])),
    "_buffers and buffers": (nn.Module, _sets_in_table, lambda m: len([*m.buffers()])),
    "add_module and children": (nn.Module, _adds_module, lambda m: len([*m.children()])),
    "add_module and modules": (nn.Module, _adds_module, lambda m: len([*m.modules()])),
    "a list and len": (nn.ModuleList, lambda m: m.append(nn.Identity()), len),
    "a list and a loop": (nn.ModuleList, lambda m: m.append(nn.Identity()), _loops),
    "a dictionary and in": (nn.ModuleDict, _sets_member, lambda m: 1 + ("m1" in m)),
    "parameters and len": (nn.ParameterList, lambda m: m.append(_parameter()), len),
    "a sequence and a call": (
        nn.Sequential,
        lambda m: m.append(nn.Identity()),
        lambda m: int(m(torch.ones(1))),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_one_stage_registers_and_another_counts_is_refused(case: str) -> None:
    """Stage 0 had registered more of them when stage 1 counted for an earlier micro-batch."""
    make, add, ask = CASES[case]
    pipe = bp.Pipeline(Held(make(), add, ask), devices=stages(2), chunks=2, schedule="gpipe")
    x = torch.ones(4, 4)
    with pytest.raises(StateError, match=r"changes which \w+ held has on hops \[0\]"):
        pipe.forward_backward(x, target=x, loss_fn=mse_loss)


class Lazy(nn.Module):
    """Each stage registers a table of its own when it first needs it, and looks through it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            if not hasattr(self.a, "scale"):
                self.a.register_buffer("scale", torch.full((4,), 2.0, device=x.device))
            h = self.a(x) * sum(buffer.sum() for buffer in self.a.buffers())
            h = h.to(next(self.a.parameters()).dtype)
        with bp.Block(stage=1):
            if not hasattr(self.b, "shift"):
                self.b.shift = nn.Buffer(torch.ones(4, device=h.device))
            h = self.b(h) + self.b.shift * len([*self.b.buffers()])
            for head in self.heads:
                h = head(h)
            return h


def test_tables_that_each_stage_registers_for_itself_are_fine() -> None:
    check_trains_alike(Lazy())


class Assigns(nn.Module):
    """A forward assigns a buffer anew, which a hook of its own finds by other ways than its name."""

    count: Tensor

    def __init__(self, find: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.find = nn.Linear(4, 4), nn.Linear(4, 4), find
        self.a.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.a.count = self.a.count + 1
            x = self.a(x)
            x.register_hook(self.scale)
        with bp.Block(stage=1):
            return self.b(x)

    def scale(self, gradient: Tensor) -> Tensor:
        return gradient * self.find(self)


@pytest.mark.parametrize(
    "find",
    [
        lambda m: m.get_buffer("a.count"),
        lambda m: m.a.get_buffer("count"),
        lambda m: dict(m.named_buffers())["a.count"],
        lambda m: next(m.a.buffers()),
        lambda m: m.state_dict()["a.count"],
        lambda m: next(m.children()).count,
    ],
)
def test_what_a_forward_assigns_anew_and_a_hook_finds_is_refused(
    find: Callable[[nn.Module], Tensor],
) -> None:
    """By a path, or among all: gradients were of a later micro-batch's, silently."""
    pipe = bp.Pipeline(Assigns(find), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"changes a\.count on hops \[0\]"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)


class Picks(nn.Module):
    """One stage picks a module, or sets one, and the other one finds it without its name."""

    def __init__(
        self,
        pick: Callable[[Any, int], object],
        find: Callable[[Any, Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.a, self.b, self.n = nn.Linear(4, 4), nn.Linear(4, 4), 0
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.current, self.acts = self.experts[0], nn.Sequential(nn.Tanh())
        self.pick, self.find = pick, find

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.n += 1
            self.pick(self, self.n % 2)
            x = self.a(x)
        with bp.Block(stage=1):
            return self.find(self, self.b(x))


def _current(net: Any, k: int) -> None:
    net.current = net.experts[k]


def _set_by_path(net: Any, k: int) -> None:
    net.set_submodule("acts.0", nn.ReLU() if k else nn.Tanh())


@pytest.mark.parametrize(
    ("pick", "find"),
    [
        (_current, lambda m, x: m.get_submodule("current")(x)),
        (_current, lambda m, x: dict(m.named_children())["current"](x)),
        (_current, lambda m, x: [*m.children()][3](x)),
        (_current, lambda m, x: x @ m.state_dict()["current.weight"]),
        (_set_by_path, lambda m, x: m.acts[0](x)),
    ],
)
def test_a_module_that_one_stage_picks_and_another_finds_is_refused(
    pick: Callable[[Any, int], object], find: Callable[[Any, Tensor], Tensor]
) -> None:
    """Nothing reads it by its name, and so nothing was taken to: other numbers, silently."""
    pipe = bp.Pipeline(Picks(pick, find), devices=stages(2), chunks=4)
    with pytest.raises(StateError, match=r"the forward changes (attribute 'current'|acts\.0)"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=torch.sum)
