"""What a recording has not seen is noticed by the steps after it: recorded anew, or an error."""

import contextlib
import copy
import io
from types import MethodType

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import blockpipe as bp
from blockpipe.errors import StateError

from ..alike import check_alike
from ..parameter_sets import each_value
from ..parity import assert_same_gradients, plain_step
from ..stage_devices import assert_close
from .noticed_models import Averages, Codebook, _pipe

LANES = ["1f1b", "gpipe"]


def _net(*middle: nn.Module) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(8, 8), *middle, nn.Linear(8, 4))
    bp.begin_blocks(net, {str(len(net) - 1): 1})
    return net


def _output(pipe: bp.Pipeline, x: Tensor) -> Tensor:
    with torch.no_grad():
        return pipe(x)


# --- code


def _patched_instance(net: nn.Sequential) -> None:
    old = net[1].forward
    net[1].forward = lambda h: old(h) * 3


def _other_class(net: nn.Sequential) -> None:
    class Tripled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 3

    net[1].__class__ = Tripled


def _patched_method(net: nn.Sequential) -> None:
    net[1].forward = MethodType(lambda self, h: nn.Linear.forward(self, h) * 3, net[1])


@each_value(
    change=[_patched_instance, _other_class, _patched_method],
    schedule=[*LANES, "sequential"],
)
def test_a_forward_that_is_replaced_after_a_step_runs(change, schedule):
    """The old one went on running: the doors had captured it."""
    net, x = _net(), torch.randn(8, 8)
    pipe = _pipe(net, schedule=schedule)
    before = _output(pipe, x)
    change(net)
    assert_close(_output(pipe, x), 3 * before)


def test_a_patch_of_a_class_runs(monkeypatch):
    class Own(nn.Linear):
        pass

    net, x = _net(Own(8, 8)), torch.randn(8, 8)
    pipe = _pipe(net)
    before = _output(pipe, x)
    forward = nn.Linear.forward
    monkeypatch.setattr(Own, "forward", lambda self, h: 0 * forward(self, h))
    assert not torch.equal(_output(pipe, x), before)


def test_marks_that_are_changed_after_a_step_count():
    net, x = _net(nn.ReLU(), nn.Linear(8, 8)), torch.randn(8, 8)
    pipe = _pipe(net)
    _output(pipe, x)
    assert pipe.recording.parameters[2].stage == 0
    bp.remove_blocks(net)
    bp.begin_blocks(net, {"2": 1})
    _output(pipe, x)
    assert pipe.recording.parameters[2].stage == 1


def test_a_patch_that_comes_back_needs_no_third_way():
    net, x = _net(), torch.randn(8, 8)
    pipe = _pipe(net)
    before = _output(pipe, x)
    _patched_instance(net)
    _output(pipe, x)
    del net[1].forward
    assert_close(_output(pipe, x), before)


# --- switches


class Switched(nn.Module):
    """A detached side input of the last stage, which a switch turns on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), Reads(8, 4)
        self.b.parent = [self]
        self.skip: Tensor | None = None
        self.with_skip = False

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            h = self.a(x)
            self.skip = h.detach()
        with bp.Block(stage=1):
            return self.b(h)


class Reads(nn.Linear):
    def forward(self, h: Tensor) -> Tensor:
        (parent,) = self.parent
        return super().forward(h + parent.skip if parent.with_skip else h)


@pytest.mark.parametrize("schedule", LANES)
def test_a_switch_that_is_turned_is_recorded_anew(schedule):
    """A sealed module began to read what the stage before leaves for each micro-batch: a race. Now
    it is the right micro-batch's, or an error."""
    model, x, y = Switched(), torch.randn(8, 8), torch.randn(8, 4)
    pipe = _pipe(model, schedule=schedule)
    loss_fn = nn.functional.mse_loss
    pipe.forward_backward(x, target=y, loss_fn=loss_fn)
    model.with_skip = True
    plain = Switched()
    plain.load_state_dict(model.state_dict())
    plain.with_skip = True
    loss = plain_step(plain, (x,), {}, y, loss_fn, 4)
    for _ in range(3):
        model.zero_grad()
        try:
            result = pipe.forward_backward(x, target=y, loss_fn=loss_fn)
        except StateError as error:
            assert "belongs to micro-batch" in str(error)
            continue
        assert_close(result.loss, loss)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(one.grad, other.grad)


def test_a_number_of_threads_that_is_changed_is_recorded_anew():
    """A forward may ask for it. It took the recorded way as for granted."""

    class Asks(_Changes):
        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=0):
                x = self.a(x)
            with bp.Block(stage=1):
                return self.b(x) if torch.get_num_threads() == threads else x * 2

    threads, x, recordings = torch.get_num_threads(), torch.randn(8, 8), []
    pipe = _pipe(Asks())
    for count in (threads, threads, threads + 1):
        torch.set_num_threads(count)
        try:
            pipe.forward_backward(x, loss_fn=torch.sum)
        finally:
            torch.set_num_threads(threads)
        recordings.append(pipe.recording)
    assert recordings[0] is recordings[1] is not recordings[2]


def test_dropout_that_is_turned_up_while_another_stage_draws_takes_turns_at_once():
    """From run to run the numbers differed."""

    def run() -> Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 4)
        )
        bp.begin_blocks(net, {"2": 1})
        pipe = _pipe(net, schedule="gpipe")
        pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)
        net[3].p = 0.5
        for _ in range(3):
            result = pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)
        assert pipe.recording.hops[1].draws
        return result.loss

    losses = {float(run()) for _ in range(3)}
    assert len(losses) == 1


@pytest.mark.parametrize("how", ["in place", "data"])
def test_a_parameter_that_is_written_and_read_on_several_stages_is_refused(how):
    pipe = _pipe(Averages(how, True))
    with pytest.raises(StateError, match=r"parameter 'k.weight' is written .* hops \[0, 1\]"):
        pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)


@pytest.mark.cpu("the write races with a copy, as it would on any accelerator, before it is found")
@pytest.mark.parametrize("how", ["in place", "data"])
def test_a_parameter_that_is_written_later_is_found_by_that_step(how):
    """Silently each micro-batch had what the others had made of it. Where a write comes between a
    forward and its backward, torch's own error is first."""
    net = Averages(how, False)
    pipe = _pipe(net)
    pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)
    net.warm[0] = True
    found = r"'k.weight'.* was written (during the step|in place, there or)|by an inplace operation|may write to parameter"
    with pytest.raises(RuntimeError, match=found):
        pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)


@pytest.mark.cpu("the write races with a copy, as it would on any accelerator, before it is found")
@pytest.mark.parametrize("isolate", [False, True])
def test_a_buffer_that_is_written_later_is_found_by_that_step(isolate):
    net = Codebook()
    pipe = _pipe(net, isolate=isolate)
    pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)
    net.warm[0] = True
    with pytest.raises(
        StateError, match=r"'book'.* was written (during the step|in place, there or)"
    ):
        pipe.forward_backward(torch.ones(8, 8), loss_fn=torch.sum)


# --- what two lanes share


class Masks(nn.Module):
    """Keeps state within its own call."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.mask = (x.detach() > 0).float()
        return self.f(x) * self.mask


class _CallsTwice(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.s, self.out = shared, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            x = self.s(x)
        with bp.Block(stage=1):
            return self.out(self.s(x))


def test_state_within_a_call_of_a_module_that_two_stages_call_is_refused():
    """20 of 36 steps were wrong: each stage wrote its mask over the other's."""
    with pytest.raises(StateError, match=r"changes s\.mask, and calls 's' on hops \[0, 1\]"):
        _pipe(_CallsTwice(Masks())).forward_backward(torch.ones(8, 8), loss_fn=torch.sum)
    model, x, y = _CallsTwice(Masks()), torch.randn(8, 8), torch.randn(8, 4)
    result = _pipe(model, schedule="sequential").forward_backward(
        x, target=y, loss_fn=nn.functional.mse_loss
    )
    assert_close(result.loss, plain_step(model, (x,), {}, y, nn.functional.mse_loss, 4))


def test_a_module_that_two_stages_call_and_that_keeps_nothing_is_fine():
    _pipe(_CallsTwice(nn.Linear(8, 8))).forward_backward(torch.ones(8, 8), loss_fn=torch.sum)


class _Changes(nn.Module):
    """Two layers, and what a subclass does with them on two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)


class _SwapsParameters(_Changes):
    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            x = functional_call(self.a, {k: v * 0.9 for k, v in self.a.named_parameters()}, x)
        with bp.Block(stage=1):
            return self.b(self.a(x))


class _SwapsWhatIsReadElsewhere(_Changes):
    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            x = functional_call(self.a, {"weight": self.b.weight}, x)
        with bp.Block(stage=1):
            return self.b(x) @ self.a.weight


class _FreezesForAWhile(_Changes):
    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.b.requires_grad_(False)
            x = self.b(self.a(x))
            self.b.weight.requires_grad = True
            self.b.bias.requires_grad = True
        with bp.Block(stage=1):
            return self.b(x)


class _SetsAnAttributeForAWhile(_Changes):
    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            self.a.eval()
            x = self.a(x)
            self.a.train()
        with bp.Block(stage=1):
            return self.b(self.a(x))


class _ChoosesKernels(_Changes):
    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            q = self.a(x)[:, None]
        with bp.Block(stage=1), sdpa_kernel(SDPBackend.MATH):
            return self.b(nn.functional.scaled_dot_product_attention(q, q, q)[:, 0])


class _IsDeterministicForAWhile(_Changes):
    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            before = torch.are_deterministic_algorithms_enabled()
            torch.use_deterministic_algorithms(True)
            x = self.a(x)
            torch.use_deterministic_algorithms(before)
        with bp.Block(stage=1):
            return self.b(x)


class _LeavesOneDNNForAWhile(_Changes):
    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0):
            torch.backends.mkldnn.enabled = False
            x = self.a(x)
            torch.backends.mkldnn.enabled = True
        with bp.Block(stage=1):
            return self.b(x)


class _LeavesCuDNNForAWhile(_Changes):
    stages = 0, 1

    def forward(self, x: Tensor) -> Tensor:
        for stage, layer in enumerate((self.a, self.b)):
            on = torch.backends.cudnn.flags(enabled=False, benchmark=True)
            with bp.Block(stage=stage), on if stage in self.stages else contextlib.nullcontext():
                x = layer(x)
        return x


class _ChangesDirectoryForAWhile(_Changes):
    def forward(self, x: Tensor) -> Tensor:
        with bp.Block(stage=0), contextlib.chdir("/"):
            x = self.a(x)
        with bp.Block(stage=1):
            return self.b(x)


class _ReadsWhatIsPrinted(_Changes):
    def forward(self, x: Tensor) -> Tensor:
        for stage, layer in enumerate((self.a, self.b)):
            with bp.Block(stage=stage), contextlib.redirect_stdout(io.StringIO()) as out:
                print("a")
                x = layer(x)
                x = x * len(out.getvalue())
        return x


CHANGES = [
    (_SwapsParameters, r"changes a\.bias, and calls 'a' on hops \[0, 1\]"),
    (_SwapsWhatIsReadElsewhere, r"changes a\.weight, and calls 'a' on hops \[0, 1\]"),
    (_FreezesForAWhile, r"changes b\.\w+\.requires_grad, and reads 'b\.\w+' on hops \[0, 1\]"),
    (_SetsAnAttributeForAWhile, r"changes a\.training, and calls 'a' on hops \[0, 1\]"),
    (_ChoosesKernels, r"changes torch\..*sdp_enabled\(\), and runs under it on hops \[1\]"),
    (_IsDeterministicForAWhile, r"changes torch\.are_deterministic.* under it on hops \[0\]"),
    (_LeavesOneDNNForAWhile, r"changes torch\.backends\.mkldnn\.enabled, .* on hops \[0\]"),
    (_LeavesCuDNNForAWhile, r"changes torch\.backends\.cudnn\.enabled, .* on hops \[0, 1\]"),
    (_ChangesDirectoryForAWhile, r"changes os\.getcwd\(\), and runs under it on hops \[0\]"),
    (_ReadsWhatIsPrinted, r"changes sys\.stdout, and runs under it on hops \[0, 1\]"),
]


@pytest.mark.parametrize(
    ("model", "what"), CHANGES, ids=lambda value: getattr(value, "__name__", "")
)
def test_what_is_changed_for_a_while_and_seen_by_several_stages_is_refused(
    model: type[nn.Module], what: str
):
    """Attack 1.7: put back before the forward ends, it left nothing to find afterwards."""
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    with pytest.raises(StateError, match=what + r".*test_noticed\.py:\d+\).*sequential"):
        _pipe(model()).forward_backward(x, target=y, loss_fn=nn.functional.mse_loss)
    net = model()
    plain = copy.deepcopy(net)
    loss = plain_step(plain, (x,), {}, y, nn.functional.mse_loss, 4)
    result = _pipe(net, schedule="sequential").forward_backward(
        x, target=y, loss_fn=nn.functional.mse_loss
    )
    assert_close(result.loss, loss)
    assert_same_gradients(net, plain)
    assert any(line.startswith("the forward changes") for line in _pipe(net).summary(x).notes)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("switch", ["benchmark", "allow_tf32", "deterministic"])
def test_cudnn_may_be_off_on_one_stage_alone(stage: int, switch: str, monkeypatch):
    """As a loss for CTC does: it chooses kernels. Refused where a user had set other switches."""
    monkeypatch.setattr(torch.backends.cudnn, switch, switch != "allow_tf32")
    net = _LeavesCuDNNForAWhile()
    net.stages = (stage,)
    check_alike(net, torch.randn(8, 8), count=2)
    assert torch.backends.cudnn.enabled


def test_what_is_changed_on_one_stage_only_is_fine():
    class Meta(_Changes):
        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(stage=0):
                x = functional_call(self.a, {k: v * 0.9 for k, v in self.a.named_parameters()}, x)
                self.a.requires_grad_(False)
                x = self.a(x)
                self.a.requires_grad_(True)
            with bp.Block(stage=1):
                return self.b(x)

    _pipe(Meta()).forward_backward(torch.ones(8, 8), loss_fn=torch.sum)
