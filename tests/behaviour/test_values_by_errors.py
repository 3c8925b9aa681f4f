"""Plain values that a branch sets which is no condition: behind an error that is caught, or in a loop
over what is found in the data. The recorded micro-batch does not take it."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp
from blockpipe.errors import StateError

pytestmark = pytest.mark.cpu("whether lanes mix in plain values is the host's question")


class Net(nn.Module):
    """Notes something on stage 0, and uses it on stage 1. It reads values, so that it is recorded by
    a real run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.n, self.table, self.kernel = 0.0, {0: 0.0}, None
        self.callbacks: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.note(x)
        x = self.first(x) * (1 + 0 * x.sum().item())
        with bp.Block(stage=1):
            return self.second(x) / (1 + self.n)

    def note(self, x: Tensor) -> None:
        raise NotImplementedError

    def check(self, x: Tensor) -> None:
        if not (x.abs() < 9).all():
            raise ValueError("it is too large")

    def bump(self) -> None:
        self.n += 1


class Caught(Net):
    def note(self, x: Tensor) -> None:
        try:
            self.check(x)
        except ValueError:
            self.n += 1


class OwnError(TypeError):
    """An error that says something of the data, although Python's own of this kind do not."""


class CaughtOwn(Net):
    def note(self, x: Tensor) -> None:
        try:
            self.check_own(x)
        except OwnError:
            self.n += 1

    def check_own(self, x: Tensor) -> None:
        if not (x.abs() < 9).all():
            raise OwnError


class CaughtStop(Net):
    def note(self, x: Tensor) -> None:
        try:
            self.check_or_stop(x)
        except StopIteration:
            self.n += 1

    def check_or_stop(self, x: Tensor) -> None:
        if not (x.abs() < 9).all():
            raise StopIteration


class CaughtThere(Net):
    def note(self, x: Tensor) -> None:
        try:
            if not (x.abs() < 9).all():
                raise NotImplementedError
        except NotImplementedError:
            self.n += 1


class CaughtAll(Net):
    def note(self, x: Tensor) -> None:
        try:
            self.check(x)
        except:  # noqa: E722
            self.bump()


class Asserted(Net):
    def note(self, x: Tensor) -> None:
        try:
            assert x.abs().max() < 9
        except AssertionError:
            self.n += 1


class Looked(Net):
    def note(self, x: Tensor) -> None:
        try:
            self.table[int(x.max())]
        except KeyError:
            self.n += 1


class Deep(Net):
    """The handler is in a caller of the function that raises."""

    def note(self, x: Tensor) -> None:
        try:
            self.outer(x)
        except (OSError, ValueError):
            self.n += 1

    def outer(self, x: Tensor) -> None:
        self.check(x)


class Goes(Net):
    """Code behind an error that the recorded micro-batch raises."""

    def note(self, x: Tensor) -> None:
        try:
            self.table[1 - int(x.max())]
            self.n += 1
        except KeyError:
            pass


class GoesElse(Net):
    def note(self, x: Tensor) -> None:
        try:
            self.table[1 - int(x.max())]
        except KeyError:
            pass
        else:
            self.n += 1


class GoesDeep(Net):
    def note(self, x: Tensor) -> None:
        with contextlib.suppress(KeyError):
            self.look(x)

    def look(self, x: Tensor) -> None:
        self.table[1 - int(x.max())]
        self.n += 1


class Suppressed(Net):
    def note(self, x: Tensor) -> None:
        with contextlib.suppress(KeyError):
            self.table[1 - int(x.max())]
            self.n += 1


class Found(Net):
    def note(self, x: Tensor) -> None:
        for _ in (x.abs().amax(1) > 9).nonzero():
            self.n += 1


class FoundBefore(Net):
    def note(self, x: Tensor) -> None:
        found = (x.abs().amax(1) > 9).nonzero().tolist()
        for _ in found:
            self.bump()


class FoundTensor(Net):
    def note(self, x: Tensor) -> None:
        found = (x.abs().amax(1) > 9).nonzero()
        for _ in found:
            self.n += 1


class Turns(Net):
    def note(self, x: Tensor) -> None:
        for _ in range(int(x.abs().max()) // 9):
            self.n += 1


class Flag(Net):
    def note(self, x: Tensor) -> None:
        is_large = (x.abs() > 9).any()
        if is_large:
            self.n += 1


class Decomposed(Net):
    """On fake tensors no matrix is singular."""

    def forward(self, x: Tensor) -> Tensor:
        self.note(x)
        x = self.first(x)
        with bp.Block(stage=1):
            return self.second(x) / (1 + self.n)

    def note(self, x: Tensor) -> None:
        try:
            torch.linalg.cholesky(x.T @ x + torch.eye(4))
        except torch.linalg.LinAlgError:
            self.n += 1


class DecomposedIn(Decomposed):
    def note(self, x: Tensor) -> None:
        try:
            torch.linalg.inv(x.T @ x + torch.eye(4))
        except RuntimeError:
            self.bump()


class DecomposedDeep(Decomposed):
    def note(self, x: Tensor) -> None:
        try:
            self.decomposed(x)
        except torch.linalg.LinAlgError:
            self.n += 1

    def decomposed(self, x: Tensor) -> Tensor:
        return torch.linalg.cholesky(x.T @ x + torch.eye(4))


KINDS = [
    *(
        Caught,
        CaughtOwn,
        CaughtStop,
        CaughtThere,
        CaughtAll,
        Asserted,
        Looked,
        Deep,
        Goes,
        GoesElse,
        GoesDeep,
        Suppressed,
        Found,
    ),
    *(FoundBefore, FoundTensor, Turns, Flag, Decomposed, DecomposedIn),
    DecomposedDeep,
]


class Imports(Net):
    """A library that may be missing is no question of the data."""

    def note(self, x: Tensor) -> None:
        try:
            import math as fast

            fast.floor(x.sum().item())
        except ImportError:
            self.n = 1.0


class Attributes(Net):
    def note(self, x: Tensor) -> None:
        with contextlib.suppress(AttributeError):
            self.n = x.abs().fast  # type: ignore[attr-defined]


class Layers(Net):
    """Loops over modules and callbacks, with a mode that is off."""

    def note(self, x: Tensor) -> None:
        for _, layer in enumerate(self.children()):
            if not self.training:
                self.n = float(layer.training)
        for callback in self.callbacks.values():
            self.n = callback()


class Nothing(Net):
    def note(self, x: Tensor) -> None:
        try:
            self.check(x)
        except ValueError as error:
            raise RuntimeError("the batch is bad") from error


class Optional(Net):
    def note(self, x: Tensor) -> None:
        y = x + 1
        if y is None or y.dim() > 7:
            self.n = 1.0


class Shape(Net):
    def note(self, x: Tensor) -> None:
        try:
            math.sqrt(x.dim() - 1)
        except ValueError:
            self.n = 1.0


ORDINARY = [Imports, Attributes, Layers, Nothing, Optional, Shape]


def _step(net: Net) -> bp.StepResult:
    x = torch.full((6, 4), 0.5)
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=3)
    return pipe.forward_backward(x, target=x, loss_fn=mse_loss)


@pytest.mark.parametrize("kind", KINDS)
def test_a_branch_that_no_condition_decides_counts(kind: type[Net]) -> None:
    """Another micro-batch may take it."""
    with pytest.raises(StateError, match="attribute 'n' of the model"):
        _step(kind())


@pytest.mark.parametrize("kind", ORDINARY)
def test_what_does_not_follow_from_the_data_is_no_such_branch(kind: type[Net]) -> None:
    """Models with these run."""
    net = kind()
    plain = copy.deepcopy(net)
    result = _step(net)
    assert torch.isfinite(result.loss)
    assert net.n == plain.n
