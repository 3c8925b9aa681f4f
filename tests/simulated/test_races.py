"""The race detector: it finds what is not ordered, whatever the delays are, and nothing else."""

import pytest
import torch

from tests import simulated

ONE, TWO = torch.device("simulated:0"), torch.device("simulated:1")
SEEDS = range(4)


@pytest.fixture(autouse=True)
def _found_is_meant():
    """What a test here provokes is not held against it."""
    yield
    simulated.reset()


def filled(*sizes, device=ONE):
    return torch.full(sizes, 2.0, device=device)


def one_race():
    """The race that was found; there must be just one."""
    simulated.settle()
    found = simulated.races()
    assert len(found) == 1, found
    return found[0]


def no_race():
    simulated.settle()
    assert simulated.races() == []
    assert simulated.error() == ""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_wait(seed):
    """A read on another stream than the write's, without an event between."""
    simulated.set_delay(0, 500, seed=seed)
    other = torch.Stream(ONE)
    x = filled(1000)
    with other:
        x + 1
    race = one_race()
    assert race.startswith("read after write: 'aten::add.out' on simulated:0/stream")
    assert "is not ordered after 'aten::fill_.Scalar' on simulated:0/stream0" in race
    assert "(bytes 0 to 4000 of block" in race


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", ["wait_event", "wait_stream", "event.wait", "synchronize", "query"])
def test_every_wait_orders(how, seed):
    """Waits of streams and of the host, and an event that the host has seen done."""
    simulated.set_delay(0, 500, seed=seed)
    here, other = torch.accelerator.current_stream(ONE), torch.Stream(ONE)
    x = filled(1000)
    event = here.record_event()
    if how == "wait_event":
        other.wait_event(event)
    elif how == "wait_stream":
        other.wait_stream(here)
    elif how == "event.wait":
        event.wait(other)
    elif how == "synchronize":
        here.synchronize()
    else:
        while not event.query():
            pass
    with other:
        y = x + 1
    here.wait_stream(other)
    assert y.sum().item() == 3000
    no_race()


def test_an_event_orders_only_what_came_before_it():
    """What is queued behind the event is still unordered."""
    here, other = torch.accelerator.current_stream(ONE), torch.Stream(ONE)
    x = filled(8)
    other.wait_event(here.record_event())
    x.mul_(2)
    with other:
        x + 1
    assert "is not ordered after 'aten::mul.out'" in one_race()


def test_order_is_transitive():
    """Through a third stream of another device."""
    here, far, other = (
        torch.accelerator.current_stream(ONE),
        torch.Stream(TWO),
        torch.Stream(ONE),
    )
    x = filled(8)
    far.wait_event(here.record_event())
    other.wait_event(far.record_event())
    with other:
        x.mul_(2)
    no_race()


def test_a_write_after_a_read():
    """The reader's stream is still reading when another one writes."""
    here, other = torch.accelerator.current_stream(ONE), torch.Stream(ONE)
    x = filled(8)
    other.wait_stream(here)
    with other:
        y = x + 1
    x.zero_()
    race = one_race()
    assert race.startswith("write after read: 'aten::zero_' on simulated:0/stream0")
    del y


def test_a_write_after_a_write():
    """Neither of two writes is known to be the last."""
    here, other = torch.accelerator.current_stream(ONE), torch.Stream(ONE)
    x = filled(8)
    other.wait_stream(here)
    with other:
        x.mul_(3)
    x.zero_()
    assert one_race().startswith("write after write: 'aten::zero_'")


def test_two_reads_are_no_race():
    """Nothing changes."""
    here, other = torch.accelerator.current_stream(ONE), torch.Stream(ONE)
    x = filled(8)
    other.wait_stream(here)
    with other:
        y = x + 1
    z = x + 2
    no_race()
    assert z.sum().item() == 32
    del y


def test_a_missing_record_stream():
    """Memory is freed on its own stream while another one still reads it, and reads NaN."""
    here, other = torch.accelerator.current_stream(ONE), torch.Stream(ONE)
    x = filled(8)
    other.wait_stream(here)
    with simulated.held(other):
        with other:
            y = x + 1
        del x
        here.synchronize()
    race = one_race()
    assert race.startswith("freed in use: 'aten::add.out' on simulated:0/stream")
    assert "record_stream is missing" in race
    assert y.isnan().all().item()


def test_record_stream_keeps_memory():
    """Until the other stream has come so far, and no longer."""
    here, other = torch.accelerator.current_stream(ONE), torch.Stream(ONE)
    x = filled(8)
    at = x.data_ptr()
    other.wait_stream(here)
    with simulated.held(other):
        with other:
            y = x + 1
        x.record_stream(other)
        del x
        assert filled(8).data_ptr() != at
    simulated.settle()
    assert (y == 3).all().item()
    again = [filled(8) for _ in range(3)]
    assert at in {t.data_ptr() for t in again}
    no_race()


def test_memory_is_used_again_at_once():
    """On its own stream, which is in order."""
    x = filled(8)
    at = x.data_ptr()
    y = x + 1
    del x
    z = filled(8)
    assert z.data_ptr() == at
    assert y.sum().item() == 24
    no_race()


def test_a_read_of_freed_memory():
    """NaN on the same stream too: nothing of the past is left."""
    x = filled(8)
    del x
    assert torch.empty(8, device=ONE).isnan().all().item()


def test_memory_used_again_by_another_stream_is_its_own():
    """Each stream has a cache of its own, so an allocation never needs a wait."""
    x = filled(8)
    at = x.data_ptr()
    del x
    with torch.Stream(ONE):
        y = filled(8)
        assert y.data_ptr() != at
    no_race()


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_disjoint_slices_are_no_race(dim):
    """Rows lie one behind the other, columns between each other."""
    here, other = torch.accelerator.current_stream(ONE), torch.Stream(ONE)
    x = filled(6, 8)
    other.wait_stream(here)
    first, second = x.chunk(2, dim)
    with other:
        second.mul_(2)
    first.mul_(3)
    no_race()
    here.wait_stream(other)
    assert x.sum().item() == 24 * (4 + 6)


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_overlapping_slices_are_a_race(dim):
    """One row or column in common is enough."""
    here, other = torch.accelerator.current_stream(ONE), torch.Stream(ONE)
    x = filled(6, 8)
    other.wait_stream(here)
    with other:
        x.narrow(dim, 0, 4).zero_()
    x.narrow(dim, 3, 3).fill_(3)
    assert one_race().startswith("write after write")


def test_slices_whose_union_is_read():
    """The whole is ordered after only one of the two that wrote parts of it."""
    here, other, third = torch.accelerator.current_stream(ONE), torch.Stream(ONE), torch.Stream(ONE)
    x = filled(6, 8)
    for stream in (other, third):
        stream.wait_stream(here)
    with other:
        x[:3].mul_(2)
    with third:
        x[3:].mul_(2)
    here.wait_stream(other)
    x + 1
    assert "(bytes 96 to 192 of block" in one_race()


def test_many_slices_are_remembered():
    """However many: none is forgotten before it is over."""
    here, other = torch.accelerator.current_stream(ONE), torch.Stream(ONE)
    x = filled(500, 4)
    other.wait_stream(here)
    with other:
        for row in x:
            row.mul_(2)
    x[3].mul_(2)
    assert "(bytes 48 to 64 of block" in one_race()


def test_a_copy_between_devices_is_ordered_with_both():
    """On the current streams, as CUDA has it."""
    x = filled(1000)
    y = x.to(TWO, non_blocking=True)
    x.zero_()
    y += 1
    no_race()
    assert y.sum().item() == 3000


def test_a_copy_on_streams_of_its_own_needs_waits():
    """Both sides: the source has to be there, and the target is read too early."""
    sends, receives = torch.Stream(ONE), torch.Stream(TWO)
    x = filled(1000)
    with sends, receives:
        y = x.to(TWO, non_blocking=True)
    y + 1
    source, target = simulated.races()
    assert source.startswith("read after write: 'copy to another device' on simulated:0/stream")
    assert target.startswith("read after write: 'aten::add.out' on simulated:1/stream0")


def test_what_an_operation_that_waits_reads():
    """It waits for its own stream only."""
    other = torch.Stream(ONE)
    x = filled(8)
    with other:
        x.nonzero()
    assert one_race().startswith("read after write: 'aten::nonzero'")


def test_statistics_are_written():
    """Batch norm's, though its schema does not say so."""
    here, other = torch.accelerator.current_stream(ONE), torch.Stream(ONE)
    norm = torch.nn.BatchNorm1d(4).to(ONE)
    x = torch.randn(8, 4, device=ONE)
    other.wait_stream(here)
    with other:
        norm(x)
    norm(x)
    simulated.settle()
    assert any(race.startswith("write after") for race in simulated.races())


def test_pinned_memory_is_watched():
    """A second copy into pinned memory that the first is still read from."""
    here, other = torch.accelerator.current_stream(ONE), torch.Stream(ONE)
    x, y = filled(8), filled(8)
    pinned = torch.empty(8, pin_memory=True)
    other.wait_stream(here)
    pinned.copy_(x, non_blocking=True)
    with other:
        pinned.copy_(y, non_blocking=True)
    race = one_race()
    assert race.startswith("write after write: 'copy to the host'")
    assert "of pinned memory)" in race


def test_races_can_raise():
    """Where the second access is queued, with the flag."""
    other = torch.Stream(ONE)
    x = filled(8)
    with simulated.flags(raise_races=True), other:
        with pytest.raises(RuntimeError, match="simulated: read after write"):
            x + 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_correct_program_is_clean(seed):
    """Two devices, three streams each, memory used again and again."""
    simulated.set_delay(0, 300, 0.5, seed=seed)
    compute = [torch.accelerator.current_stream(d) for d in (ONE, TWO)]
    copies = [torch.Stream(d) for d in (ONE, TWO)]
    torch.manual_seed(seed)
    total = torch.zeros((), device=TWO)
    expected = 0.0
    for step in range(30):
        x = torch.full((64, 64), float(step), device=ONE)
        y = x * 2
        copies[0].wait_event(compute[0].record_event())
        with copies[0], copies[1]:
            moved = y.to(TWO, non_blocking=True)
            arrived = copies[1].record_event()
        y.record_stream(copies[0])
        compute[1].wait_event(arrived)
        moved.record_stream(compute[1])
        total += moved.sum()
        expected += 2 * step * 64 * 64
        del x, y, moved
    assert total.item() == expected
    no_race()
