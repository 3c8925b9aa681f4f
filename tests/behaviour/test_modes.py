"""What Blockpipe does itself goes through no function mode: not through the glue, which would take it
for the forward's, and not through the user's, which would see it, and change it."""

import sys
from contextlib import nullcontext
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import blockpipe as bp
from blockpipe._torch.modes import how_many_function_modes
from blockpipe.crossing import offload
from blockpipe.crossing.interception import CrossingMode
from blockpipe.errors import RecordingError

from ..models import Scripted, square
from ..stage_devices import is_simulated, stages
from .test_crossings import ROWS

B = bp.Block
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
PACKAGE = str(Path(bp.__file__).parent) + "/"
# torch's own Python, which stands between a caller and the mode.
_TORCH = str(Path(torch.__file__).parent) + "/"
BETWEEN = {_TORCH + name for name in ("_tensor.py", "overrides.py", "functional.py", "_compile.py")}
PASSES_ON = {
    "call_under",
    "__torch_function__",
    "watched_register_hook",
}  # what the forward asked for, under the user's modes


def caller(frame: FrameType) -> str:
    """Our function that made a call of torch's; ``""``: it is another's."""
    while frame.f_code.co_filename in BETWEEN:
        frame = frame.f_back
    code = frame.f_code
    if not code.co_filename.startswith(PACKAGE):
        return ""
    return f"{code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno} {code.co_name}"


class Spy(TorchFunctionMode):
    """Notes who called what it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        by = caller(sys._getframe(1))
        if by.rpartition(" ")[2] not in PASSES_ON:
            self.seen.append((getattr(func, "__name__", str(func)), by))
        return func(*args, **(kwargs or {}))

    @property
    def ours(self):
        return sorted({call for call in self.seen if call[1]})


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(nn.functional.dropout(self.layer(x), 0.2)).tanh()


def dropping():
    """Without a batch norm, which a checkpoint of the user's would update in a backward."""
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2))


def skips(s, x):
    with B(0):
        h = s.a(x)
    with B(1):
        y = s.b(h)
        if y.requires_grad:
            y.register_hook(lambda g: g * 1)
    with B(2):
        return s.c(y) + h


def a_block_function(s, x):
    @bp.BlockFunction(1)
    def middle(t):
        return s.b(t).tanh() * 2

    with B(0):
        h = s.a(x)
    y = middle(h)
    with B(2):
        return s.c(y) + h


def checkpointed(s, x):
    with B(0):
        h = s.a(x)

    def several(t):
        with B(1):
            t = s.b(t).tanh() * h
        with B(2):
            return s.c(t).sin()

    return checkpoint(several, h, use_reentrant=False)


def under_modes_of_its_own(s, x):
    with B(0):
        h = s.a(x)
    with B(1), Spy.inner:
        h.mul_(2)
        h = s.b(h)
        with B(2):
            y = s.c(h) + h
        h = h + y
    with B(2):
        return s.c(h)


MODELS = {
    "skips": (skips, nn.Linear, {}),
    "noisy": (skips, Noisy, {}),
    "plan": (lambda s, x: s.c(s.b(s.a(x))), nn.Linear, {"plan": "b=1, c=2"}),
    "block_function": (a_block_function, nn.Linear, {"checkpoint": "always"}),
    "always": (skips, Noisy, {"checkpoint": "always"}),
    "offload": (skips, Noisy, {"offload": True}),
    "offload_always": (skips, Noisy, {"offload": True, "checkpoint": "always"}),
    "isolate": (skips, Noisy, {"isolate": True}),
    "split": (skips, nn.Linear, {"schedule": "zb-h1"}),
    "uncut": (skips, Noisy, {"schedule": "uncut"}),
    "sequential": (skips, Noisy, {"schedule": "sequential"}),
    "deferred": (skips, Noisy, {"deferred_batch_norm": True}),
    "checkpointed": (checkpointed, dropping, {}),
    "checkpointed_uncut": (checkpointed, Noisy, {"schedule": "uncut"}),
    "inner": (under_modes_of_its_own, nn.Linear, {}),
    "inner_always": (under_modes_of_its_own, nn.Linear, {"checkpoint": "always"}),
    **{name: (row, nn.Linear, {}) for name, row in ROWS.items()},
}
WAYS = ["forward_backward", "no_grad", "call", "run", "profile", "verify", "own_loss"]


def make(name):
    script, kind, options = MODELS[name]
    layer = (lambda: nn.Linear(4, 4)) if kind is nn.Linear else kind
    options = dict(options)
    if "plan" in options:
        options["plan"] = bp.StagePlan.from_layout(options["plan"])
    return bp.Pipeline(Scripted(script, layer), devices=stages(3), chunks=2, **options)


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, output, target):
        return ((output * self.scale - target) ** 2).mean()


def use(pipe, way):
    if way == "forward_backward":
        for _ in range(2):
            pipe.forward_backward(X, loss_fn=square, return_outputs=True)
    elif way == "own_loss":
        pipe.forward_backward(X, target=X, loss_fn=Loss())
    elif way == "call":
        x = X.clone().requires_grad_()
        square(pipe(x)).backward()
    elif way == "no_grad":
        with torch.no_grad():
            pipe(X)
    elif way == "run":
        with torch.no_grad():
            pipe(X)
            pipe.run(pipe.module, X)
    elif way == "profile":
        with pipe.profile():
            pipe.forward_backward(X, loss_fn=square)
    elif way == "verify":
        pipe.verify(X, loss_fn=square)


def cases():
    for number, name in enumerate(MODELS):
        training = ("forward_backward", "call")[number % 2]
        for way in WAYS if name in ("skips", "noisy", "uncut") else (training,):
            if (name, way) != ("uncut", "verify"):
                yield name, way


@pytest.fixture(autouse=True)
def _offload_everything(monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST", 0)
    monkeypatch.setattr(offload, "on_cpu_too", True)


@pytest.mark.parametrize(("name", "way"), list(cases()))
def test_our_own_reading_does_not_go_through_the_glue(name, way, monkeypatch):
    """Nor through a mode that the forward itself has entered."""
    seen = []
    original = CrossingMode.__torch_function__

    def watched(self, func, types, args=(), kwargs=None, modes=()):
        by = caller(sys._getframe(1))
        if by and by.rpartition(" ")[2] not in PASSES_ON:
            seen.append((getattr(func, "__name__", str(func)), by))
        return original(self, func, types, args, kwargs, modes)

    monkeypatch.setattr(CrossingMode, "__torch_function__", watched)
    Spy.inner = Spy()
    use(make(name), way)
    assert sorted(set(seen)) == []
    assert Spy.inner.ours == []


@pytest.mark.parametrize(("name", "way"), list(cases()))
def test_the_users_modes_see_the_users_code_alone(name, way):
    """A mode that is entered around the step."""
    Spy.inner = nullcontext() if "inner" not in name else Spy()
    pipe = make(name)
    with Spy() as spy:
        use(pipe, way)
    assert spy.ours == []
    if way != "verify":
        assert spy.seen  # it does see the forward


@pytest.mark.parametrize("name", ["skips", "noisy", "always", "uncut", "checkpointed"])
@pytest.mark.parametrize("way", ["forward_backward", "call"])
def test_the_users_default_device_is_not_ours(name, way):
    """``with torch.device(…)`` around a step that makes no tensor itself changes nothing."""
    results = []
    elsewhere = torch.device(stages(2)[1] if is_simulated() else "meta")
    for context in (nullcontext(), elsewhere):
        torch.manual_seed(4)
        pipe = make(name)
        with context:
            use(pipe, way)
        results.append([p.grad.cpu() for p in pipe.parameters()])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_the_forwards_own_default_device():
    """What the forward makes under its own device context is made there."""
    made = []

    def forward(s, x):
        with B(0):
            h = s.a(x)
        with B(1), torch.device(h.device):
            made.append(torch.ones(4))
            h = s.b(h) * made[-1]
        with B(2):
            return s.c(h)

    pipe = bp.Pipeline(Scripted(forward), devices=stages(3), chunks=2)
    pipe.forward_backward(X, loss_fn=square)
    assert {t.device for t in made[1:]} == {torch.device(stages(3)[1])}


def test_a_tensor_of_a_class_of_ones_own_keeps_it():
    """Modes are left; tensors with a torch function of their own are not disturbed."""

    class Own(torch.Tensor):
        pass

    kinds = []

    def forward(s, x):
        with B(0):
            h = s.a(x) + x * 2
        with B(1):
            kinds.append((type(h), type(h * 1)))
            return s.b(h)

    pipe = bp.Pipeline(Scripted(forward), devices=stages(2), chunks=2, isolate=True)
    pipe.forward_backward(X.as_subclass(Own), loss_fn=square)
    assert kinds[-2:] == [(Own, Own)] * 2


class _Doubles(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is nn.functional.linear else result


class _EntersModes(nn.Module):
    """Around sealed modules, and around nothing else."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with B(0), _Doubles():
            h = self.a(x)
        with B(1), _Doubles():
            return self.b(h)


def test_a_mode_that_the_forward_enters_itself_is_on_inside_of_sealed_modules():
    """It sees their operations, as without a pipeline."""
    net = _EntersModes()
    pipe = bp.Pipeline(net, devices=stages(2), chunks=2)
    with torch.no_grad():
        expected = net(X)
        for _ in range(2):
            assert torch.allclose(pipe(X).to(X.device), expected)
        assert set(pipe.recording.sealed) == {"a", "b"}


@pytest.mark.parametrize("mode", [_Doubles, lambda: torch.device("cpu")])
def test_a_mode_that_the_forward_does_not_leave_is_refused(mode):
    """It would be on for whatever runs next; nothing stays on."""

    def forward(s, x):
        with B(0):
            x = s.a(x)
        with B(1):
            mode().__enter__()
            return s.b(x)

    pipe = bp.Pipeline(Scripted(forward), devices=stages(2), chunks=2)
    for _ in range(2):
        with pytest.raises(RecordingError, match="a mode of torch, and does not leave it"):
            pipe.forward_backward(X, loss_fn=square)
        assert not how_many_function_modes()
