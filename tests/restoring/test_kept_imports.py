"""A forward that is the first to import a module of the user's."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import blockpipe as bp

from ..stage_devices import assert_close, host, stages

PLUGIN = """
import torch
import {registry} as registry

SCALE, TABLE = 3.0, torch.full((4,), 2.0)
registry.ACTS["double"] = lambda x: x * 2
registry.ORDER.append("double")
registry.level = 5.0
"""
REGISTRY = "ACTS, ORDER, level = {'none': None}, ['none'], 1.0\n"


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of the user's that another one changes when it is imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "kept_registry.py").write_text(REGISTRY)
    (tmp_path / "kept_plugin.py").write_text(PLUGIN.format(registry="kept_registry"))
    importlib.invalidate_caches()
    yield importlib.import_module("kept_registry")
    for name in ("kept_registry", "kept_plugin"):
        sys.modules.pop(name, None)


class Imports(nn.Module):
    """Imports the module on its second stage."""

    def __init__(self, registry: Any, *, real: bool) -> None:
        super().__init__()
        self.a, self.b, self.registry, self.real = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            [registry],
            real,
        )

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.registry[0].ACTS["seen"] = None
            h = self.a(x)
            h = h * (1 + 0 * h.sum().item()) if self.real else h
        with bp.Block(stage=1):
            import kept_plugin

            act = self.registry[0].ACTS.get("double", torch.zeros_like)
            count = len(self.registry[0].ORDER) + self.registry[0].level
            return act(self.b(h)) * kept_plugin.SCALE * count + kept_plugin.TABLE.to(h.device)


def test_a_table_of_a_library_that_the_forward_imports_is_no_fake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attack 41: the recording left one in the library, for the plain model as well."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "kept_windows.py").write_text("import torch\nHANN = torch.arange(4.0) + 1\n")
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()

    class Windowed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            from kept_windows import HANN

            return super().forward(x) * HANN.to(x.device)

    net = bp.begin_blocks(nn.Sequential(nn.Linear(4, 4), Windowed(4, 4)), {"1": 1})
    try:
        recording = bp.record(net, torch.ones(2, 4))
        assert recording.route == [0, 1]
        assert type(sys.modules["kept_windows"].HANN) is Tensor
        assert net(torch.ones(2, 4)).isfinite().all()
    finally:
        sys.modules.pop("kept_windows", None)


@pytest.mark.parametrize("real", [False, True])
def test_what_an_import_in_the_forward_sets_stays(registry: ModuleType, real: bool) -> None:
    """Attack 41: it was taken away, and the module stayed, so that no later import set it again."""
    net = Imports(registry, real=real)
    bp.record(net, torch.ones(2, 4))
    assert [*registry.ACTS] == ["none", "double"]  # nothing of the forward's
    assert registry.ORDER == ["none", "double"]
    assert type(sys.modules["kept_plugin"].TABLE) is Tensor
    x = torch.randn(8, 4)
    expected = net(x)
    pipe = bp.Pipeline(net, devices=stages(2), chunks=4)
    result = pipe.forward_backward(x, target=x, loss_fn=mse_loss)
    assert_close(result.loss, mse_loss(expected, x))
    assert registry.ORDER == ["none", "double"]
    assert host(registry.level) == 5.0


def test_torchs_own_modules_when_a_recording_is_the_first_to_need_them_are_imported():
    """In a process that had done nothing else, a real recording of a forward that writes to a
    weight failed in torch's import of what puts the weight back."""
    code = """
import torch
import blockpipe as bp

class Net(torch.nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.5 if x.sum() > 0 else 0.25)
        return super().forward(x)

net = Net(4, 4)
before = net.weight.detach().clone()
bp.record(net, torch.ones(2, 4))
assert torch.equal(net.weight, before)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
