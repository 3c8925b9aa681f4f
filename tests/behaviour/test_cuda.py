"""On an accelerator: the same gradients to rounding, streams, placement. On a CUDA machine, and on the
simulated accelerator what needs no CUDA:

python -m pytest -m cuda
python -m pytest -m cuda --simulated
"""

import copy
import itertools
import time

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.preparation.batch_norm.deferred import update_buffers
from blockpipe.preparation.batch_norm.gathered import BUFFERS, Update
from blockpipe.preparation.batch_norm.statistics import merged, statistics
from blockpipe.schedules.builders import SCHEDULES

from .. import stage_devices
from ..models import square
from ..parameter_sets import every_pair
from ..parity import plain_step
from ..stage_devices import is_simulated, no_synchronization

KIND = "simulated" if is_simulated() and not stage_devices.on_cuda else "cuda"
COUNT = torch.accelerator.device_count() if KIND == "simulated" else torch.cuda.device_count()

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not COUNT, reason="needs a CUDA device, or --simulated"),
]
two = pytest.mark.skipif(COUNT < 2, reason="needs two CUDA devices, or --simulated")
graphs = pytest.mark.cpu("CUDA's graphs")
sleep = pytest.mark.cpu("CUDA's sleep")
peaks = pytest.mark.cpu("how far the host is ahead, and so a peak, is a matter of timing there")


def on(*places: int | str) -> list[str]:
    """Accelerators by number; ``"cpu"`` stays."""
    return [place if isinstance(place, str) else f"{KIND}:{place}" for place in places]


def net(width: int = 64) -> nn.Sequential:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)))
    return bp.begin_blocks(model, {"1": 1, "2": 2, "3": 3})


def loss_of(output, target):
    return nn.functional.mse_loss(output, target)


def check(devices, schedule, steps=3, compile=None):
    model = net()
    plain = copy.deepcopy(model).to(KIND)
    x, y = torch.randn(30, 64), torch.randn(30, 64)
    pipe = bp.Pipeline(model, devices=devices, chunks=7, schedule=schedule)
    if compile is not None:
        pipe.compile(**compile)
    for _ in range(steps):
        loss = pipe.forward_backward(x, target=y, loss_fn=loss_of).loss
        expected = plain_step(plain, (x.to(KIND),), {}, y.to(KIND), loss_of, 7, device=KIND)
    torch.testing.assert_close(loss.cpu(), expected.cpu())
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad.cpu())
    out = pipe(x)
    loss_of(out, y.to(pipe.output_device)).backward()
    return pipe


@pytest.mark.parametrize("schedule", [*SCHEDULES, "uncut"])
def test_four_stages_on_one_device(schedule):
    """Stages may share a device."""
    check(on(0, 0, 0, 0), schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_on_cpu_and_cuda(schedule):
    """Copies to and from the host, in both directions."""
    check(on("cpu", 0, "cpu", 0), schedule)


@two
@pytest.mark.parametrize("schedule", [*SCHEDULES, "uncut"])
def test_stages_on_two_devices(schedule):
    """Copies between devices, with events on both sides."""
    pipe = check(on(0, 1, 0, 1), schedule)
    assert {p.device.index for p in pipe.parameters()} == {0, 1}


def test_unplace_and_optimizer_state():
    """State of an optimizer stepped before the placement moves with its parameters."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    pipe = bp.Pipeline(model, devices=on(0, 0, 0, 0), chunks=2)
    pipe.forward_backward(torch.randn(4, 64), target=torch.randn(4, 64), loss_fn=loss_of)
    optimizer.step()
    assert all(p.device.type == KIND for p in model.parameters())
    pipe.unplace()
    assert all(p.device.type == "cpu" for p in model.parameters())


@pytest.mark.parametrize("on_meta", [False, True])
def test_stages_set_on_a_placed_pipeline(on_meta):
    """Parameters move from where one plan had them to where the next has them."""
    model = net()
    plain = copy.deepcopy(model).to(KIND)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if on_meta:
        model = model.to("meta")
    options = {"weights": weights} if on_meta else {}
    pipe = bp.Pipeline(model, devices=on(0, "cpu", 0, "cpu"), chunks=3, **options)
    x, y = torch.randn(30, 64), torch.randn(30, 64)
    for layout in ("1=1, 2=2, 3=3", "1=1", "2=1, 3=2"):
        bp.set_pipeline_stage_assignment(pipe, layout)
        pipe.zero_grad()
        plain.zero_grad()
        pipe.forward_backward(x, target=y, loss_fn=loss_of)
        assert pipe.plan.layout == layout
        plain_step(plain, (x.to(KIND),), {}, y.to(KIND), loss_of, 3, device=KIND)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.cpu(), q.grad.cpu())


def test_a_custom_stream_of_the_caller():
    """Work queued on the caller's current stream is seen by the stages."""
    model = net()
    pipe = bp.Pipeline(model, devices=on(0, 0, 0, 0), chunks=4)
    x = torch.randn(32, 64, device=KIND)
    stream = torch.Stream(KIND)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream, torch.no_grad():
        doubled = x * 2
        out = pipe(doubled)
    torch.accelerator.current_stream().wait_stream(stream)
    with torch.no_grad():
        torch.testing.assert_close(out, model(x * 2))


def failures(pipe):
    """The reasons for which modules are not captured."""
    prepared = pipe._preparer.known.values()
    return {g.failure for p in prepared for g in p.compiled.graphs.values() if g.failure}


@pytest.mark.parametrize("options", [{"cuda_graphs": True}, {}])
@pytest.mark.parametrize("devices", [on(0, 0, 0, 0), on(0, "cpu", 0, "cpu")])
@graphs
def test_compiled_and_captured_steps_add_up_as_plain(devices, options):
    """Three steps add up as plain ones: no replay writes to a gradient that was handed out."""
    pipe = check(devices, "1f1b", compile=options)
    assert not failures(pipe)


@graphs
def test_captured_modules_keep_their_statistics():
    """Warming up and capturing leave a batch norm's buffers as they were."""
    model = bp.begin_blocks(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8)), {"1": 1})
    plain = copy.deepcopy(model).to(KIND)
    pipe = bp.Pipeline(model, devices=on(0, "cpu"), chunks=4)
    pipe.compile(cuda_graphs=True)
    x = torch.randn(16, 8)
    for _ in range(3):
        pipe.forward_backward(x, loss_fn=square)
        for part in x.to(KIND).chunk(4):
            (plain(part).square().mean() / 4).backward()
    torch.testing.assert_close(model[0].running_mean, plain[0].running_mean)
    torch.testing.assert_close(model[0].running_var, plain[0].running_var)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad.cpu())


def test_a_step_does_not_synchronize():
    """Inputs in pageable memory, several stages, a loss: the host never waits for the device."""
    pipe = bp.Pipeline(net(), devices=on(0, 0, 0, 0), chunks=4, schedule="sequential")
    x, y = torch.randn(16, 64), torch.randn(16, 64)
    pipe.forward_backward(x, target=y, loss_fn=loss_of)
    with no_synchronization():
        pipe.forward_backward(x, target=y, loss_fn=loss_of)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_deferred_statistics_do_not_synchronize(momentum):
    """They are the whole batch's, and neither taking nor committing them waits for the device."""
    norm = nn.BatchNorm1d(8, momentum=momentum).to(KIND)
    whole = copy.deepcopy(norm).double()
    x = torch.randn(1000, 8, device=KIND) + 1e4
    with no_synchronization():
        whole_statistics = merged([statistics(part) for part in x.split(300)])
        update_buffers(norm, Update(whole_statistics, norm.momentum, frozenset(BUFFERS)))
    whole(x.double())
    torch.testing.assert_close(norm.running_mean, whole.running_mean.float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(norm.running_var, whole.running_var.float(), rtol=1e-6, atol=0)


@two
@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_two_stages_a_device_on_two_devices(schedule):
    """A V of stages, and a loop."""
    vee, loop = [0, 1, 1, 0], [0, 1, 0, 1]
    order = vee if schedule == "zb-v" else loop
    check(on(*order), schedule)


def noisy(width: int = 64) -> nn.Sequential:
    """Layers that save much and draw random numbers."""
    model = nn.Sequential(
        *(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.2, batch_first=True)
            for _ in range(4)
        )
    )
    return bp.begin_blocks(model, {"1": 1, "2": 2, "3": 3})


def stepped(model, x, devices, steps=2, **options):
    torch.manual_seed(5)
    pipe = bp.Pipeline(model, devices=devices, chunks=4, **options)
    for _ in range(steps):
        loss = pipe.forward_backward(x, loss_fn=square).loss
    return pipe, loss


@every_pair(
    devices=[on("cpu", 0, "cpu", 0), on(0, 0, 0, 0)],
    schedule=SCHEDULES,
    mode=["except_last", "always"],
)
def test_recomputation_draws_the_same_masks(devices, schedule, mode):
    """The devices' generators are covered as the host's is: dropout masks are equal."""
    first = noisy()
    other = copy.deepcopy(first)
    x = torch.randn(8, 16, 64)
    _, expected = stepped(first, x, devices, schedule="sequential")
    _, loss = stepped(other, x, devices, schedule=schedule, checkpoint=mode)
    torch.testing.assert_close(loss, expected)
    for p, q in zip(other.parameters(), first.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@every_pair(
    schedule=["1f1b", "gpipe", "zb-h1"],
    checkpoint=["never", "always"],
    steps=[1, 8],
)
def test_offload_keeps_the_numbers(schedule, checkpoint, steps, monkeypatch):
    """Streams and events order the copies: many steps, each with memory that is used again."""
    monkeypatch.setattr("blockpipe.crossing.offload.SMALLEST", 0)
    first = noisy(128)
    other = copy.deepcopy(first)
    x = torch.randn(32, 64, 128)
    devices = on(0, "cpu", 0, "cpu")
    _, expected = stepped(first, x, devices, steps, schedule="sequential")
    _, loss = stepped(
        other, x, devices, steps, schedule=schedule, offload=True, checkpoint=checkpoint
    )
    torch.testing.assert_close(loss, expected)
    for p, q in zip(other.parameters(), first.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def growth(**options):
    """What twice as many rows take, predicted and measured, without what cuBLAS keeps after a step."""
    seen = []
    for rows in (64, 128):
        x = torch.randn(rows, 256, 256)
        model = nn.Sequential(noisy(256)[0], nn.Linear(256, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        bp.begin_blocks(model, {"1": 1, "2": 2, "3": 3})
        pipe, _ = stepped(model, x, on(0, "cpu", "cpu", "cpu"), **options)  # little to do there
        with pipe.measured_memory() as report:
            pipe.forward_backward(x, loss_fn=square)
        stage = report.stages[0]
        seen.append((stage.peak, stage.measured - torch.cuda.memory_allocated()))
    return tuple(after - before for before, after in zip(*seen, strict=True))


@peaks
def test_offload_frees_device_memory():
    """Activations of the micro-batches that are away are not on the device."""
    measured = []
    for offload in (False, True):
        predicted, found = growth(schedule="gpipe", offload=offload)
        assert abs(predicted - found) < 0.25 * found
        measured.append(found)
    assert measured[1] < 0.6 * measured[0]


@peaks
@pytest.mark.parametrize("mode", ["never", "always"])
def test_predicted_memory_beside_the_allocators(mode):
    """Within 15 %, where activations are most of it."""
    predicted, found = growth(schedule="1f1b", checkpoint=mode)
    assert abs(predicted - found) < 0.15 * found


@graphs
@pytest.mark.parametrize("schedule", ["1f1b", "sequential"])
def test_captured_calls_draw_as_the_calls_do(schedule):
    """Dropout masks are those of the uncaptured step: warming up and capturing draw nothing."""
    first = noisy()
    other, x = copy.deepcopy(first), torch.randn(8, 16, 64)
    _, expected = stepped(first, x, on(0, 0, 0, 0), 3, schedule=schedule)
    torch.manual_seed(5)
    pipe = bp.Pipeline(other, devices=on(0, 0, 0, 0), chunks=4, schedule=schedule)
    pipe.compile(cuda_graphs=True)
    for _ in range(3):
        loss = pipe.forward_backward(x, loss_fn=square).loss
    assert not failures(pipe)
    torch.testing.assert_close(loss, expected)
    for p, q in zip(other.parameters(), first.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@graphs
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_captured_calls_under_autocast(dtype):
    """Weights are cast in the capture: torch's cache of casts holds none of its memory."""
    first = net()
    other, x = copy.deepcopy(first), torch.randn(32, 64)
    seen = []
    for model in (first, other):
        pipe = bp.Pipeline(model, devices=on(0, 0, 0, 0), chunks=4)
        if model is other:
            pipe.compile(cuda_graphs=True)
        for _ in range(3):
            with torch.autocast("cuda", dtype):
                seen.append(pipe.forward_backward(x, loss_fn=square).loss)
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
    assert not failures(pipe)
    torch.testing.assert_close(seen[:3], seen[3:])


@graphs
def test_graphs_keep_their_activations():
    """A captured module is not recomputed: a capture has memory of its own."""
    model = net()
    plain = copy.deepcopy(model).to(KIND)
    x, y = torch.randn(32, 64), torch.randn(32, 64)
    pipe = bp.Pipeline(model, devices=on(0, "cpu", 0, "cpu"), chunks=4, checkpoint="always")
    pipe.compile(cuda_graphs=True)
    for _ in range(3):
        pipe.forward_backward(x, target=y, loss_fn=loss_of)
        plain_step(plain, (x.to(KIND),), {}, y.to(KIND), loss_of, 4, device=KIND)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad.cpu())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "sequential"])
@pytest.mark.parametrize("devices", [on(0, "cpu", 0, "cpu"), on(0, 0, 0, 0)])
def test_a_profile_of_streams(devices, schedule):
    """Every action once, none over another on a device, what is needed before; gradients are the
    same. A device's times and the host's are on one axis."""
    model = net(512)
    plain = copy.deepcopy(model)
    x, y = torch.randn(64, 512), torch.randn(64, 512)
    seen, unseen = (
        bp.Pipeline(m, devices=devices, chunks=4, schedule=schedule) for m in (model, plain)
    )
    for _ in range(2):
        seen.forward_backward(x, target=y, loss_fn=loss_of)
        unseen.forward_backward(x, target=y, loss_fn=loss_of)
    begun = time.perf_counter()
    with seen.profile() as t:
        for _ in range(3):
            seen.forward_backward(x, target=y, loss_fn=loss_of)
    took = time.perf_counter() - begun
    for _ in range(3):
        unseen.forward_backward(x, target=y, loss_fn=loss_of)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert 0 < max(e.end for e in t.events) < took + 1e-3
    is_plain = set(devices) == {"cuda:0"} and schedule != "sequential"
    for step in range(3):
        actions = {(e.kind, e.hop, e.microbatch): e for e in t.actions(step)}
        assert len(actions) == len(t.actions(step))
        assert {key for key in actions if key[0] == "F"} == {
            ("F", hop, m) for hop in range(4) for m in range(4)
        }
        for (kind, hop, m), e in actions.items():
            if kind == "B" and not is_plain:
                assert actions["F", hop, m].end <= e.end
                assert hop == 3 or actions["B", hop + 1, m].start <= e.end
        for lane in range(len(t.lanes)):
            spans = sorted((e.start, e.end) for e in actions.values() if e.lane == lane)
            assert all(a[1] <= b[0] + 2e-6 for a, b in itertools.pairwise(spans))
    if "cpu" in devices:
        copies = [e for e in t.events if e.kind == "copy" and e.source >= 0]
        assert {(e.source, e.hop) for e in copies} >= {(0, 1), (1, 0), (1, 2), (2, 1)}
        assert all(e.end >= e.start for e in t.events)
    assert 0 <= t.bubble() < 1
    assert all(0 <= busy <= t.step_time + 1e-6 for busy in t.busy())


def test_a_profiled_step_does_not_synchronize():
    """But for the first of a profile, which sets the clocks."""
    pipe = bp.Pipeline(net(), devices=on(0, 0, 0, 0), chunks=4, schedule="sequential")
    x, y = torch.randn(16, 64), torch.randn(16, 64)
    pipe.forward_backward(x, target=y, loss_fn=loss_of)
    with pipe.profile() as t:
        pipe.forward_backward(x, target=y, loss_fn=loss_of)
        with no_synchronization():
            pipe.forward_backward(x, target=y, loss_fn=loss_of)
    assert len(t.actions(1)) == 2 * 4 * 4


@sleep
def test_a_long_action_is_as_long_as_on_a_stream():
    """A sleep of the device counts for the action that it is in, though the host does not wait."""

    class Sleeps(nn.Linear):
        def forward(self, x):
            torch.cuda._sleep(20_000_000)
            return super().forward(x)

    model = bp.begin_blocks(nn.Sequential(nn.Linear(64, 64), Sleeps(64, 64)), {"1": 1})
    pipe = bp.Pipeline(model, devices=on(0, 0), chunks=2, schedule="sequential")
    x, y = torch.randn(16, 64), torch.randn(16, 64)
    pipe.forward_backward(x, target=y, loss_fn=loss_of)
    with pipe.profile() as t:
        pipe.forward_backward(x, target=y, loss_fn=loss_of)
    took = {e.hop: e.duration for e in t.events if e.kind == "F" and e.microbatch == 1}
    assert took[1] > 5e-3  # 20 million cycles, at 4 GHz
    assert took[0] < took[1] / 2


@two
@sleep
def test_a_lane_that_waits_for_data_is_not_busy():
    """The second device stands still while the first sleeps: a stall, and no work."""

    class Sleeps(nn.Linear):
        def forward(self, x):
            torch.cuda._sleep(20_000_000)
            return super().forward(x)

    model = bp.begin_blocks(nn.Sequential(Sleeps(64, 64), nn.Linear(64, 64)), {"1": 1})
    pipe = bp.Pipeline(model, devices=on(0, 1), chunks=2, schedule="gpipe")
    x, y = torch.randn(16, 64), torch.randn(16, 64)
    for _ in range(2):
        pipe.forward_backward(x, target=y, loss_fn=loss_of)
    with pipe.profile() as t:
        pipe.forward_backward(x, target=y, loss_fn=loss_of)
    assert [e for e in t.events if e.kind == "stall" and e.lane == 1 and e.duration > 5e-3]
    assert t.busy()[1] < t.busy()[0] / 2
