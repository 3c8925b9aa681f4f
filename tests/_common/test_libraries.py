"""Which code is the user's own, and which of it libraries have been given."""

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe._common.libraries import has_users_code, is_users
from blockpipe.errors import StateError

from ..alike import DEVICE
from ..models import square
from ..parity import plain_step
from ..stage_devices import assert_close, stages

LIBRARY = """
from torch import nn

def act(h):
    return h.tanh()

class Registry:
    def __init__(self):
        self.functions = {"act": act}

REGISTRY, TABLE, HANDLERS = Registry(), {}, []

class Activation(nn.Module):
    def forward(self, h):
        return act(h)

class Registered(nn.Module):
    def forward(self, h):
        return REGISTRY.functions["act"](h)

class Listed(nn.Module):
    def forward(self, h):
        for function in (*TABLE.values(), *HANDLERS):
            h = function(h)
        return h

class Helper:
    def call(self, h):
        return h.tanh()

class Helped(nn.Module):
    def forward(self, h):
        return Helper().call(h)
"""


@pytest.fixture
def library(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """An installed package, by its path."""
    package = tmp_path / "site-packages" / "blockpipe_tests_library.py"
    package.parent.mkdir()
    package.write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(package.parent))
    import blockpipe_tests_library

    yield blockpipe_tests_library
    del sys.modules["blockpipe_tests_library"]


class Kept:
    scale = 1.0


def scaled(h: Tensor) -> Tensor:
    Kept.scale *= 0.99
    return h.tanh() * Kept.scale


def scaled_method(self: object, h: Tensor) -> Tensor:
    return scaled(h)


class Scale:
    """Keeps a number of its own."""

    def __init__(self) -> None:
        self.now = Kept

    def apply(self, h: Tensor) -> Tensor:
        return scaled(h)


class Uses(nn.Module):
    """A forward of the user's that calls the library's function."""

    def forward(self, h: Tensor) -> Tensor:
        return blockpipe_tests_library.act(h)  # type: ignore[name-defined]  # noqa: F821


def put(library: Any, how: str) -> Callable[[], nn.Module]:
    if how == "function":
        library.act = scaled
        return library.Activation
    if how == "registry":
        library.REGISTRY.functions["act"] = scaled
        return library.Registered
    if how == "table":
        library.TABLE["scale"] = Scale().apply
        return library.Listed
    if how == "list":
        library.HANDLERS.append(functools.partial(scaled))
        return library.Listed
    if how == "by the user":
        library.act, globals()[library.__name__] = scaled, library
        return Uses
    if how == "module's method":
        library.Activation.forward = scaled_method
        return library.Activation
    library.Helper.call = scaled_method
    return library.Helped


HOW = [
    *("function", "registry", "table", "list", "by the user"),
    *("module's method", "another class's method"),
]


@pytest.mark.parametrize("how", HOW)
def test_what_a_users_function_keeps_that_a_library_calls_is_put_back(library: Any, how: str):
    """Attack 21: a recording left its counts there, as no attribute of the model leads to it."""
    make = put(library, how)
    net = bp.begin_blocks(nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, 4)), {"2": 1})
    plain = nn.Sequential(*(each for each in net)).to(DEVICE)
    x, Kept.scale = torch.randn(8, 4), 1.0
    expected = [plain_step(plain, (x.to(DEVICE),), {}, None, square, 4) for _ in range(2)]
    Kept.scale = 1.0
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    for loss in expected:
        assert_close(pipe.forward_backward(x, loss_fn=square).loss, loss)


@pytest.mark.parametrize("how", HOW)
def test_what_it_keeps_on_two_stages_is_refused(library: Any, how: str):
    """Attack 21: the stages overwrote each other's."""
    make = put(library, how)
    layers = nn.Linear(4, 4), make(), nn.Linear(4, 4), make()
    pipe = bp.Pipeline(
        bp.begin_blocks(nn.Sequential(*layers), {"2": 1}), devices=stages(2), chunks=4
    )
    with pytest.raises(StateError, match=r"on hops \[0, 1\]"):
        pipe.forward_backward(torch.randn(8, 4), loss_fn=square)


def test_a_decorators_function_is_the_librarys():
    """``functools.wraps`` gives it the name and the module of the user's."""
    assert has_users_code(scaled)
    assert not has_users_code(torch.no_grad()(scaled))


def test_a_backends_functions_are_no_users(monkeypatch):
    """torch calls them for its device, wherever they are from: while one is developed, say."""
    backend, module = types.ModuleType("my_backend"), types.ModuleType("torch.mine")
    exec("def get_rng_state(device): ...", vars(backend))
    module.get_rng_state = backend.get_rng_state
    is_users.cache_clear()
    assert is_users("my_backend")
    is_users.cache_clear()
    monkeypatch.setattr(torch, "get_device_module", lambda: module)
    assert not is_users("my_backend")
