"""The simulated accelerator itself: streams, events, memory, copies, random numbers, autocast."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import simulated, simulated_build

ONE, TWO = torch.device("simulated:0"), torch.device("simulated:1")


def test_work_is_queued():
    """The host goes on while the device works."""
    stream = torch.accelerator.current_stream()
    with simulated.held():
        event = stream.record_event()
        assert not event.query()
        assert not stream.query()
    event.synchronize()
    assert event.query()
    stream.synchronize()
    assert stream.query()


def test_streams_overlap_and_a_stream_is_in_order():
    """Another stream, of this device or another one, does not wait for one that is held."""
    x, results = torch.ones((), device=ONE), []
    with simulated.held():
        x += 1
        x *= 2
        for device in (ONE, TWO):
            other = torch.Stream(device)
            with other:
                y = torch.ones((), device=device) + 1
            other.synchronize()
            results.append(y)
        assert not torch.accelerator.current_stream().query()
    assert [t.item() for t in (x, *results)] == [4, 2, 2]


def test_elapsed_time():
    """In milliseconds, between two events of a device that have timing."""
    stream = torch.accelerator.current_stream()
    first, second, untimed = (
        torch.Event(ONE, enable_timing=timed) for timed in (True, True, False)
    )
    first.record(stream)
    with simulated.held():
        simulated.sleep(50_000)
        second.record(stream)
        with pytest.raises((RuntimeError, ValueError), match="must be completed"):
            first.elapsed_time(second)
    second.synchronize()
    assert first.elapsed_time(second) >= 50
    untimed.record(stream)
    untimed.synchronize()
    with pytest.raises((RuntimeError, ValueError), match="enable_timing"):
        first.elapsed_time(untimed)
    far = torch.Event(TWO, enable_timing=True)
    far.record(torch.accelerator.current_stream(TWO))
    far.synchronize()
    with pytest.raises((RuntimeError, ValueError), match="two devices|same device"):
        first.elapsed_time(far)


def test_an_event_that_was_never_recorded_is_over():
    """As CUDA's."""
    event = torch.Event(ONE)
    assert event.query()
    event.synchronize()
    torch.accelerator.current_stream().wait_event(event)


def drawn(seed):
    """The delays of 16 operations on each of two devices."""
    simulated.reset()
    simulated.set_delay(1, 99, 0.5, seed)
    with simulated.flags(trace=True):
        for _ in range(16):
            for device in (ONE, TWO):
                torch.empty(1, device=device).zero_()
        simulated.settle()
    found = simulated.delays()
    return [[delay for device, _, delay in found if device == d] for d in (0, 1)]


def test_delays_reproduce():
    """The same seed delays the same operations of a stream; another seed, another stream: others."""
    one, two = drawn(1)
    assert [one, two] == drawn(1)
    assert one != two
    assert one != drawn(2)[0]
    assert {bool(delay) for delay in one} == {True, False}
    assert all(0 <= delay < 100 for delay in one)


def test_copies_have_delays_of_their_own():
    """A fast device with a slow link."""
    x = torch.ones(4, device=ONE)
    simulated.settle()
    simulated.set_delay(0, 0, copy_lo=50, copy_hi=50)
    with simulated.flags(trace=True):
        y = (x + 1).to(TWO, non_blocking=True)
        simulated.settle()
    names = [span[2] for span in simulated.spans()]
    late = dict(zip(names, [delay for *_, delay in simulated.delays()], strict=True))
    assert late == {"aten::add.out": 0, "copy to another device": 50}
    assert y.sum().item() == 8


def put(x, where):
    x.new_zeros(3)[where] = x.expand(3)


@pytest.mark.parametrize(
    ("wait", "name"),
    [
        (lambda x: x.item(), "item"),
        (lambda x: x.cpu(), "copy to the host"),
        (lambda x: x.copy_(torch.ones(())), "copy from the host, blocking"),
        (lambda x: bool(x > 0), "item"),
        (lambda x: x.nonzero(), "aten::nonzero"),
        (lambda x: x[None][x[None] > 0], "aten::nonzero"),
        (lambda x: x.expand(3)[torch.tensor([0, 1])], "copy from the host, blocking"),
        (lambda x: put(x, x.new_ones(3) > 0), "aten::_index_put_impl_"),
        (lambda x: put(x, torch.tensor([0, 1, 2])), "aten::_index_put_impl_"),
        (lambda x: torch.equal(x, x), "aten::equal"),
        (lambda x: torch.accelerator.synchronize(), "device.synchronize"),
        (lambda x: torch.accelerator.current_stream().synchronize(), "stream.synchronize"),
        (
            lambda x: torch.accelerator.current_stream().record_event().synchronize(),
            "event.synchronize",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_host_synchronization(wait, name):
    """Counted by what made the host wait, and raised there with the flag."""
    x = torch.ones((), device=ONE)
    simulated.reset()
    wait(x)
    assert simulated.syncs() == {name: 1}
    with simulated.flags(raise_syncs=True):
        with pytest.raises(RuntimeError, match=f"the host waits for the device: {name}"):
            wait(x)


def test_what_does_not_synchronize():
    """Operations, copies between devices, from pageable and from pinned memory, queries, waits."""
    pinned = torch.ones(4).pin_memory()
    simulated.reset()
    with simulated.flags(raise_syncs=True):
        x = torch.ones(4).to(ONE, non_blocking=True) + pinned.to(ONE, non_blocking=True)
        y = x.to(TWO, non_blocking=True)
        torch.accelerator.current_stream(TWO).wait_stream(torch.accelerator.current_stream(ONE))
        torch.accelerator.current_stream(TWO).query()
        back = torch.empty(4, pin_memory=True).copy_(y, non_blocking=True)
        x[0] = 3.0
        x[x > 1] = 2.0
        x.index_select(0, torch.zeros(1, dtype=torch.long, device=ONE))
        x.is_set_to(x)
    assert simulated.syncs() == {}
    simulated.settle()
    assert back.tolist() == [2.0] * 4


def test_pinned_memory_is_read_when_the_copy_runs():
    """What the host writes before is copied; pageable memory is taken as it was."""
    pinned, pageable = torch.ones(4).pin_memory(), torch.ones(4)
    assert pinned.is_pinned()
    assert pinned[2:].is_pinned()
    assert not pageable.is_pinned()
    with simulated.held():
        moved = [t.to(ONE, non_blocking=True) for t in (pinned, pageable)]
        for t in (pinned, pageable):
            t.fill_(5)
    assert [t.sum().item() for t in moved] == [20, 4]


def test_an_expanded_tensor_of_the_host_is_copied():
    """To memory of its own for each element; it was an error, as nothing is written to such a view."""
    x = torch.arange(3).expand(2, 3)
    for non_blocking in (False, True):
        moved = x.to(ONE, non_blocking=non_blocking)
        assert moved.tolist() == x.tolist()
        assert moved.is_contiguous()


def test_pinned_memory_is_kept_until_the_copy_is_over():
    """It is not used again before."""
    pinned = torch.ones(4).pin_memory()
    at = pinned.data_ptr()
    with simulated.held():
        moved = pinned.to(ONE, non_blocking=True)
        del pinned
        assert torch.empty(4, pin_memory=True).data_ptr() != at
    assert moved.sum().item() == 4
    assert torch.empty(4, pin_memory=True).data_ptr() == at


def test_a_copy_to_pinned_memory_is_read_too_early():
    """NaN, or what was there before: not what will be there."""
    x = torch.ones(4, device=ONE)
    with simulated.held():
        there = torch.empty(4, pin_memory=True).copy_(x, non_blocking=True)
        assert there.isnan().all()
    torch.accelerator.synchronize()
    assert there.sum() == 4


def test_tensors_of_two_devices():
    """An error where the operation is called, with both devices."""
    x, y, z = torch.ones(4, device=ONE), torch.ones(4, device=TWO), torch.ones(4)
    with pytest.raises(RuntimeError, match="at least two devices, simulated:0 and simulated:1!"):
        x + y
    with pytest.raises(RuntimeError, match="at least two devices, simulated:0 and cpu!"):
        x * z
    assert (x + torch.tensor(2.0)).sum().item() == 12  # a number


def test_wrong_arguments_raise_at_once():
    """And not later on the stream."""
    x = torch.ones(2, 3, device=ONE)
    with pytest.raises(RuntimeError, match="shapes|size"):
        x @ x
    assert simulated.error() == ""


def test_no_such_device():
    """Its number is too high."""
    with pytest.raises(RuntimeError, match="there is no device 7: there are 4"):
        torch.ones(1, device="simulated:7")


def test_a_kernel_that_fails():
    """It is noticed by what comes next, and stays until a reset."""
    x = torch.ones(4, device=ONE)
    x.index_select(0, torch.tensor([9], device=ONE))
    simulated.settle()
    assert simulated.error().startswith("aten::index_select on simulated:0/stream0: ")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="an asynchronous operation has failed"):
            x + 1
    simulated.reset()
    assert (x + 1).sum().item() == 8


def test_generators():
    """One a device; a state goes back and forth; what is drawn is fixed when it is queued."""
    torch.manual_seed(3)
    first = [torch.randn(4, device=d).cpu() for d in (ONE, TWO)]
    torch.manual_seed(3)
    assert all(
        torch.equal(torch.randn(4, device=d).cpu(), t)
        for d, t in zip((ONE, TWO), first, strict=True)
    )
    state = torch.simulated.get_rng_state(ONE)
    drawn = torch.randn(4, device=ONE).cpu()
    assert not torch.equal(drawn, first[0])
    torch.simulated.set_rng_state(state, ONE)
    assert torch.equal(torch.randn(4, device=ONE).cpu(), drawn)
    own = torch.Generator(ONE).manual_seed(5)
    again = torch.Generator(ONE).manual_seed(5)
    with simulated.held():
        one = torch.rand(4, device=ONE, generator=own)
        own.manual_seed(6)
    assert torch.equal(one.cpu(), torch.rand(4, device=ONE, generator=again).cpu())
    with pytest.raises(RuntimeError, match="Expected a 'simulated' device type for generator"):
        torch.rand(4, device=ONE, generator=torch.Generator())


def test_neighbouring_seeds_draw_other_numbers():
    """At every offset."""
    seen = set()
    for seed in range(8):
        torch.manual_seed(seed)
        seen |= {torch.rand((), device=ONE).item() for _ in range(40)}
    assert len(seen) == 8 * 40


def test_dropout():
    """Its mask is the device's, and the backward takes the same."""
    x = torch.ones(1000, device=ONE, requires_grad=True)
    torch.manual_seed(1)
    y = nn.functional.dropout(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(nn.functional.dropout(x, 0.5).cpu(), y.cpu())
    y.sum().backward()
    assert torch.equal(x.grad.cpu(), y.detach().cpu())
    assert set(y.tolist()) == {0.0, 2.0}


def test_autocast():
    """By CUDA's lists."""
    x = torch.ones(4, 4, device=ONE)
    with torch.autocast("simulated", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert nn.Linear(4, 4).to(ONE)(x).dtype == torch.bfloat16
        assert (x @ x).softmax(0).dtype == torch.float32
        assert (x @ x).exp().dtype == torch.float32
    assert (x @ x).dtype == torch.float32


def test_memory_statistics():
    """What is allocated, and its peak."""
    before = torch.accelerator.memory_allocated(ONE)
    torch.accelerator.reset_peak_memory_stats(ONE)
    x = torch.empty(1000, device=ONE)
    y = torch.empty(1000, device=ONE)
    del y
    assert torch.accelerator.memory_allocated(ONE) - before == 4096
    assert torch.accelerator.max_memory_allocated(ONE) - before == 2 * 4096
    assert torch.accelerator.get_memory_info(ONE)[1] == 4 << 30
    del x


def test_a_model_trains_as_on_the_cpu():
    """To the bit: the kernels are the CPU's."""
    cpu = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
    )
    device = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
    )
    device.load_state_dict(cpu.state_dict())
    device.to(ONE)
    x = torch.randn(4, 3, 8, 8)
    for model, batch in ((cpu, x), (device, x.to(ONE))):
        optimizer = torch.optim.AdamW(model.parameters(), fused=False)
        for _ in range(3):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    for (name, p), q in zip(cpu.state_dict().items(), device.state_dict().values(), strict=True):
        assert torch.equal(p, q.cpu()), name


def test_storages_and_views():
    """Views share memory, a storage grows, ``data`` moves between host and device."""
    x = torch.arange(12.0, device=ONE)
    x.view(3, 4)[1] = 0
    assert x.sum().item() == 66 - 22
    assert x.unfold(0, 4, 4).shape == (3, 4)
    x.resize_(20)
    assert x[:4].tolist() == [0, 1, 2, 3]
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(80)
    p = nn.Parameter(torch.ones(2))
    p.data = p.data.to(ONE)
    assert p.device == ONE
    p.data = p.data.cpu()
    assert p.tolist() == [1, 1]


def test_values_that_the_host_wants():
    """Results that are no tensors, and tensors whose size depends on values."""
    x = torch.tensor([3.0, 0.0, 3.0, 1.0], device=ONE)
    assert x.nonzero().flatten().tolist() == [0, 2, 3]
    assert x.unique().tolist() == [0, 1, 3]
    assert x[x > 0].tolist() == [3, 3, 1]
    assert x.max() == 3
    assert torch.bincount(x.long()).tolist() == [1, 1, 0, 2]


def test_the_build_is_found_again():
    """A second process compiles nothing; one without a compiler says so."""
    before = simulated_build.extension().stat()
    assert simulated_build.extension().stat().st_mtime_ns == before.st_mtime_ns
    program = "from tests.simulated_build import extension; extension()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(simulated_build.__file__).parent.parent,
        env={"CXX": "no-such-compiler", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert "CannotBuildError: there is no C++ compiler 'no-such-compiler'" in done.stderr
