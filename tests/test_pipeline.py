"""The front door: options, inputs and outputs, modes, placement."""

import copy
import dataclasses
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import blockpipe as bp
from blockpipe.execution.lanes.thread_pool import close_idle_threads, idle_threads

from .behaviour.pipelines import pipeline
from .models import linears, square
from .parity import difference, plain_step
from .stage_devices import assert_close, device_type, equal, is_simulated, stages


@dataclasses.dataclass
class Out:
    logits: torch.Tensor
    note: str
    nothing: None = None
    loss: torch.Tensor | None = None


def test_nested_inputs_and_outputs_are_split_and_joined():
    """Dicts, tuples, dataclasses, None and plain values go in and come out."""

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, batch, scale, *, extra=None, flag=True):
            (x, y), z = batch["pair"], batch["z"]
            h = self.a(x) * scale
            with bp.Block(1):
                return {"out": Out(self.b(h) + z, "kept"), "y": y, "flag": flag, "extra": extra}

    model = Nested()
    pipe = pipeline(copy.deepcopy(model), devices=stages(2))
    x, y, z = torch.randn(7, 4), torch.arange(7), torch.randn(7, 4)
    out = pipe({"pair": (x, y), "z": z}, 2.0, flag=False)
    with torch.no_grad():
        plain = model({"pair": (x, y), "z": z}, 2.0, flag=False)
    assert_close(out["out"].logits, plain["out"].logits)
    assert (out["out"].note, out["out"].nothing, out["flag"], out["extra"]) == (
        "kept",
        None,
        False,
        None,
    )
    assert equal(out["y"], y)


@pytest.mark.parametrize("reduction", ["mean", "sum", lambda a, k, t: (t != -100).sum()])
def test_loss_reductions_weigh_uneven_micro_batches_as_plain(reduction):
    """Uneven micro-batches by share, by sum, and by the tokens that count."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5))
    bp.begin_blocks(model, {"1": 1})
    plain = copy.deepcopy(model)
    x, y = torch.randn(7, 4), torch.tensor([0, 1, -100, 2, -100, -100, 4])
    loss_fn = nn.CrossEntropyLoss(reduction="sum" if reduction == "sum" else "mean")
    pipe = pipeline(model, devices=stages(2), loss_reduction=reduction)
    loss = pipe.forward_backward(x, target=y, loss_fn=loss_fn).loss
    expected = plain_step(plain, (x,), {}, y, loss_fn, 3, reduction)
    assert difference(model, plain, loss, expected).same
    if reduction != "mean":  # then micro-batches make up the full batch's loss
        assert_close(loss, loss_fn(plain.cpu()(x), y))


def test_a_loss_inside_the_model_and_outputs_returned():
    """A ``loss`` field, its gradient, and the joined outputs."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, labels):
            h = self.a(x)
            with bp.Block(1):
                logits = self.b(h)
                return Out(logits, "n", loss=F.mse_loss(logits, labels))

    model = Own()
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    pipe = pipeline(copy.deepcopy(model), devices=stages(2))
    result = pipe.forward_backward(x, labels=y, return_outputs=True)
    assert result.outputs.logits.shape == (6, 4)
    assert not result.outputs.logits.requires_grad
    assert_close(result.loss, model(x, y).loss.detach())
    assert_close(result.outputs.loss, result.loss)


def test_batches_smaller_than_chunks_and_other_sizes():
    """One sample, another batch size, another sequence length: all ordinary."""
    model = linears(3)
    pipe = pipeline(copy.deepcopy(model), chunks=8)
    for shape in ((1, 4), (3, 4), (9, 4), (4, 7, 4), (4, 2, 4)):
        x = torch.randn(*shape)
        assert_close(pipe(x), model(x))


def test_each_mode_has_a_recording_of_its_own():
    """Modes get recordings of their own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0), nn.Linear(4, 4))
    bp.begin_blocks(model, {"3": 1})
    plain = copy.deepcopy(model).eval()
    pipe = pipeline(model, devices=stages(2))
    x = torch.randn(6, 4)
    pipe.eval()
    with torch.no_grad():
        out = pipe(x)
    assert not out.requires_grad
    assert_close(out, plain(x).detach())
    with torch.inference_mode():
        assert equal(pipe(x), out)
    pipe.train()
    pipe.forward_backward(x, loss_fn=square)
    assert model[1].num_batches_tracked == 3


def test_inputs_that_need_grad_get_it_once():
    """Their gradients go into the caller's graph once, for both ways of calling."""
    model = linears(3)
    plain = copy.deepcopy(model)
    source = torch.randn(7, 4, requires_grad=True)
    whole = torch.randn(4, requires_grad=True)

    class Shift(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x, shift):
            return self.inner(x + shift) * shift

    for call in ("step", "call"):
        x, w = source * 2, whole * 3
        pipe = pipeline(Shift(copy.deepcopy(model)))
        if call == "step":
            pipe.forward_backward(x, w, loss_fn=square)
        else:
            square(pipe(x, w)).backward()
        got = source.grad, whole.grad
        source.grad = whole.grad = None
        square(Shift(plain)(source * 2, whole * 3)).backward()
        assert_close(got, (source.grad, whole.grad))
        source.grad = whole.grad = None


def test_two_forwards_may_wait_for_their_backwards():
    """Two calls may wait for their backwards."""
    model = linears(3)
    pipe = pipeline(model)
    plain = copy.deepcopy(model)
    a, b = torch.randn(5, 4), torch.randn(6, 4)
    (pipe(a).sum() + pipe(b).square().sum()).backward()
    (plain(a).sum() + plain(b).square().sum()).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(p.grad, q.grad)


def test_the_model_stays_the_users():
    """Same object, parameters and keys; an optimizer made before goes on working."""
    model = linears(3)
    parameters, keys = list(model.parameters()), list(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    pipe = pipeline(model)
    before = model[0].weight.clone()
    pipe.forward_backward(torch.randn(6, 4), loss_fn=square)
    optimizer.step()
    assert pipe.module is model
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(pipe.state_dict()) == list(model.state_dict()) == keys
    assert not equal(model[0].weight, before)
    pipe.load_state_dict(linears(3).state_dict())
    twin = pickle.loads(pickle.dumps(pipe))
    x = torch.randn(6, 4)
    assert equal(twin(x), pipe(x))
    assert equal(copy.deepcopy(pipe)(x), pipe(x))
    assert pipe.unplace() is model


def test_a_usual_training_loop_gives_plain_parameters():
    """A usual training loop gives the plain loop's parameters, to the bit on the CPU."""
    model = linears(3)
    plain = copy.deepcopy(model)
    pipe = pipeline(model)
    results = []
    for which in (model, plain):
        first = torch.optim.SGD(which[0].parameters(), lr=0.1, momentum=0.9)
        second = torch.optim.AdamW([*which[1].parameters(), *which[2].parameters()], lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(first, 0.9)
        torch.manual_seed(1)
        for _ in range(3):
            x = torch.randn(6, 4)
            first.zero_grad(set_to_none=False)
            second.zero_grad()
            if which is model:
                pipe.forward_backward(x, loss_fn=square)
            else:
                plain_step(plain, (x,), {}, None, square, 3)
            nn.utils.clip_grad_norm_(which.parameters(), 0.1)
            first.step()
            second.step()
            schedule.step()
        results.append(list(which.parameters()))
    for ours, theirs in zip(*results, strict=True):
        assert equal(ours, theirs) or is_simulated()
        assert_close(ours, theirs)


def test_stages_run_under_the_callers_autocast():
    """The stages run under the caller's autocast; a scaled loss is scaled back."""
    model = linears(3)
    plain = copy.deepcopy(model)
    pipe = pipeline(model, isolate=True)
    scaler = torch.amp.GradScaler(device_type(), init_scale=256.0)
    x = torch.randn(6, 4)
    seen = []

    def loss_fn(output):
        seen.append(output.dtype)
        return scaler.scale(square(output.float()))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torch.autocast(device_type(), torch.bfloat16):
        pipe.forward_backward(x, loss_fn=loss_fn)
    scaler.unscale_(optimizer)
    assert set(seen) == {torch.bfloat16}
    for xs in x.split(2):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = square(plain(xs).float()) / 3
        loss.backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(p.grad, q.grad, rtol=1e-2, atol=1e-4)


def test_a_loss_functions_parameters_get_gradients():
    """It lives on the last stage, and its gradients come too."""

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, output, target):
            return ((output - target).square() * self.weight).mean()

    model, loss_fn = linears(3), Weighted()
    plain, plain_loss = copy.deepcopy(model), copy.deepcopy(loss_fn)
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    loss = pipeline(model, isolate=True).forward_backward(x, target=y, loss_fn=loss_fn).loss
    expected = plain_step(plain, (x,), {}, y, plain_loss, 3)
    assert difference(model, plain, loss, expected).same
    assert equal(loss_fn.weight.grad, plain_loss.weight.grad)


def test_hooks_fire_as_in_the_plain_loop():
    """Module hooks, full backward hooks and parameter hooks, as often and with the same values."""
    logs = []
    for which in ("plain", "pipe"):
        torch.manual_seed(0)
        model, log = linears(3), []
        model[1].register_forward_hook(lambda m, a, o, log=log: log.append(("f", o.sum().item())))
        model[1].register_full_backward_hook(
            lambda m, gi, go, log=log: log.append(("b", go[0].sum().item()))
        )
        model[0].weight.register_post_accumulate_grad_hook(lambda p, log=log: log.append(("p", 0)))
        x = torch.randn(6, 4)
        if which == "plain":
            plain_step(model, (x,), {}, None, square, 3)
        else:
            pipe = pipeline(model, isolate=True, sample=((x,), {}))
            log.clear()  # the recording runs the forward's hooks, too
            pipe.forward_backward(x, loss_fn=square)
        logs.append(sorted(log))
    assert logs[0] == logs[1]


def test_a_micro_batch_may_skip_a_stage():
    """A micro-batch may skip a stage (LayerDrop), and tied parameters come home all the same."""

    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x, keep):
            x = self.layers[0](x)
            if bool(keep[0]):
                with bp.Block(1):
                    x = self.layers[1](x)
            with bp.Block(2):
                return F.linear(self.layers[2](x), self.layers[1].weight)

    model = Drops()
    plain = copy.deepcopy(model)
    x, keep = torch.randn(4, 4), torch.tensor([True, False, True, False])
    pipe = pipeline(model, chunks=4, isolate=True)
    loss = pipe.forward_backward(x, keep, loss_fn=square).loss
    expected = plain_step(plain, (x, keep), {}, None, square, 4)
    assert difference(model, plain, loss, expected).same


def test_a_changed_model_is_recorded_anew():
    """A layer added or replaced after the first step is found."""
    model = linears(3)
    pipe = pipeline(model)
    x = torch.randn(6, 4)
    pipe.forward_backward(x, loss_fn=square)
    model[1] = nn.Sequential(bp.remove_blocks(model[1]), nn.Linear(4, 4).to(stages(3)[1]))
    bp.BeginBlock(model[1], stage=1)
    model.zero_grad()
    plain = copy.deepcopy(model).cpu()
    loss = pipe.forward_backward(x, loss_fn=square).loss
    expected = plain_step(plain, (x,), {}, None, square, 3)
    assert difference(model, plain, loss, expected).same


def test_run_calls_other_methods():
    """``run`` starts each forward of the model on stage 0."""

    class Generates(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linears(3)

        def forward(self, x):
            return self.inner(x)

        def generate(self, x, steps):
            for _ in range(steps):
                x = self(x)
            return x

    model = Generates()
    plain = copy.deepcopy(model)
    x = torch.randn(2, 4)
    pipe = pipeline(model, sample=((x,), {}))
    with torch.no_grad():
        assert equal(pipe.run(model.generate, x, 3), plain.generate(x, 3))


def test_sample_places_at_once_and_summary_does_not():
    """``summary(x)`` records; ``sample`` places."""
    pipe = pipeline(linears(3))
    assert "Stage" in str(pipe.summary(torch.zeros(2, 4)))
    assert pipe.recording is None
    placed = pipeline(linears(3), sample=((torch.zeros(2, 4),), {}))
    assert placed.recording.route == [0, 1, 2]
    assert placed.plan.num_stages == 3
    ends = [torch.device(device) for device in stages(3)[::2]]
    assert [placed.input_device, placed.output_device] == ends


def test_chunks_1_on_one_device_does_not_warn():
    """Three stages on the CPU are on one device."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bp.Pipeline(linears(3), devices=["cpu"] * 3, chunks=1)


@pytest.mark.skipif(not is_simulated(), reason="needs accelerators: --simulated")
def test_chunks_1_on_several_devices_warns():
    """Only one of them would work at a time."""
    with pytest.warns(UserWarning, match=r"chunks=1 on 3 devices: .*pass chunks="):
        bp.Pipeline(linears(3), devices=stages(3), chunks=1)


def test_close_ends_idle_threads():
    """Leaving ``with Pipeline(...)`` ends the threads between steps."""
    with pipeline(linears(3)) as pipe:
        pipe.forward_backward(torch.randn(6, 4), loss_fn=square)
        assert idle_threads() > 0
    assert idle_threads() == 0
    close_idle_threads()
    pipe.forward_backward(torch.randn(6, 4), loss_fn=square)
    pipe.close()


def test_the_callers_context_goes_with_the_threads():
    """Default device, user's modes, context variables, grad mode and saved-tensor hooks."""
    from contextvars import ContextVar

    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    variable: ContextVar[int] = ContextVar("variable", default=0)
    seen = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append("function")
            return func(*args, **(kwargs or {}))

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append("dispatch")
            return func(*args, **(kwargs or {}))

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = self.a(x)
            with bp.Block(1):
                seen.append((variable.get(), torch.is_grad_enabled(), torch.zeros(1).dtype))
                return self.b(h)

    pipe = pipeline(Looks(), devices=stages(2))
    pipe(torch.randn(6, 4))
    seen.clear()
    variable.set(7)
    packed = []
    with Functions(), Dispatched():
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t):
            pipe(torch.randn(6, 4))
    assert {"function", "dispatch"} <= set(seen)
    assert seen.count((7, True, torch.float32)) == 3
    assert packed
