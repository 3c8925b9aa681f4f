"""A storage's way to host memory and back, on the simulated accelerator: the host is far ahead, and
every wait that orders the copies has a test here that fails without it.

A race is what the accelerator reports where nothing orders two accesses, whatever the timing. What
was freed is filled with NaN in the order of its stream, so that a read that comes too late is seen.
"""

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from blockpipe.crossing.host_stores import AHEAD, HostLinks, Store
from blockpipe.crossing.offload import Offload
from blockpipe.errors import StateError

from ..stage_devices import stages

if stages(1) == ["cpu"]:
    pytest.skip("needs an asynchronous device: --simulated", allow_module_level=True)

from .. import simulated

DEVICE = torch.device("simulated:0")
SIZE = 1 << 18
SLOW = 20_000  # microseconds


@pytest.fixture(autouse=True)
def _far_ahead():
    """Copies are slow, so that the host is ahead of them; no race, whatever a test does."""
    simulated.reset()
    simulated.set_delay(0, 0, 1.0, 0, SLOW, SLOW)
    yield
    simulated.settle()
    assert (simulated.races(), simulated.error()) == ([], "")
    simulated.set_delay(0, 0)


@pytest.fixture
def links():
    made = HostLinks()
    yield made
    made.close()


def ones(value=1.0):
    """Made by the compute stream, late."""
    simulated.sleep(1000)
    return torch.full((SIZE // 4,), value, device=DEVICE)


def push_out(links):
    """Enough other storages that what was sent before is let go."""
    return [stored(torch.zeros(SIZE // 2, device=DEVICE), links) for _ in range(AHEAD)]


def stored(tensor, links, before=None):
    store = Store(tensor, links, before)
    store.readers = 1
    return store


def values(store):
    return store.read().view(torch.float32).cpu().unique().tolist()


def reused(address, value=7.0):
    """A tensor in the memory that was let go, written by the compute stream at once."""
    tensor = torch.full((SIZE // 4,), value, device=DEVICE)
    assert tensor.data_ptr() == address
    return tensor


def test_what_leaves_is_there_before_it_is_copied(links):
    """The way out waits for the compute stream."""
    store = stored(ones(), links)
    others = push_out(links)
    assert values(store) == [1.0]
    del others


def test_memory_is_used_again_at_once_and_not_too_early(links):
    """While the copy is under way: the compute stream waits for it, and the host does not."""
    tensor = ones()
    address = tensor.data_ptr()
    store = stored(tensor, links)
    del tensor
    others = push_out(links)
    new = reused(address)
    assert values(store) == [1.0]
    assert new.cpu().unique().tolist() == [7.0]
    del others


def test_what_is_under_way_is_bounded(links):
    """Two storages are held for their copies, however many leave."""
    torch.accelerator.synchronize(DEVICE)
    before = torch.accelerator.memory_stats(DEVICE)["active_bytes.all.current"]
    stores = [stored(ones(float(i)), links) for i in range(10)]
    now = torch.accelerator.memory_stats(DEVICE)["active_bytes.all.current"]
    assert now - before == AHEAD * SIZE
    assert [values(store) for store in stores] == [[float(i)] for i in range(10)]


def test_the_end_of_a_step_lets_go_in_order(links):
    """What is still under way, after the wait for it."""
    tensor = ones()
    address = tensor.data_ptr()
    store = stored(tensor, links)
    del tensor
    links.close()
    new = reused(address)
    assert values(store) == [1.0]
    del new


def test_it_comes_back_when_it_has_gone(links):
    """The way back waits for the way out."""
    store = stored(ones(3.0), links)
    links.close()
    assert values(store) == [3.0]


def test_it_comes_back_into_memory_that_is_free(links):
    """The copy waits for where the compute stream lets go of that memory."""
    store = stored(ones(3.0), links)
    links.close()
    torch.accelerator.synchronize(DEVICE)
    simulated.set_delay(0, 0, 1.0, 0, 0, 0)
    user = torch.full((SIZE // 4,), 5.0, device=DEVICE)
    address = user.data_ptr()
    simulated.sleep(SLOW)
    result = user * 2  # late
    del user
    store.fetch()
    back = store.read()
    assert back.data_ptr() == address
    assert result.cpu().unique().tolist() == [10.0]
    assert back.view(torch.float32).cpu().unique().tolist() == [3.0]


def test_nobody_reads_before_it_is_back(links):
    """The reader's stream waits, and not the host."""
    store = stored(ones(3.0), links)
    links.close()
    waits = dict(simulated.counts())
    doubled = store.read().view(torch.float32) * 2
    assert {k: n for k, n in simulated.counts().items() if k.startswith("sync")} == {
        k: n for k, n in waits.items() if k.startswith("sync")
    }
    assert doubled.cpu().unique().tolist() == [6.0]


def test_what_came_back_is_let_go_when_it_is_read(links):
    """Its memory is used again at once, and what was read is as it was."""
    store = stored(ones(3.0), links)
    links.close()
    back = store.read()
    address = back.data_ptr()
    tripled = back.view(torch.float32) * 3
    del back
    new = reused(address)
    assert tripled.cpu().unique().tolist() == [9.0]
    del new


def test_what_nobody_reads_is_let_go_in_order(links):
    """It was fetched in vain: the copy does not write to what the memory is used for then."""
    store = stored(ones(3.0), links)
    links.close()
    store.fetch()
    address = store._back.data_ptr()
    del store
    new = reused(address)
    assert new.cpu().unique().tolist() == [7.0]


def test_a_reader_on_another_stream_is_done_before_its_memory_is_used(links):
    """It was allocated on the compute stream, and is read late on a stream of the user's."""
    store = stored(ones(3.0), links)
    links.close()
    store.fetch()
    other = torch.Stream(DEVICE)
    other.wait_event(torch.accelerator.current_stream(DEVICE).record_event())
    with other:
        back = store.read()
        simulated.sleep(SLOW)
        doubled = back.view(torch.float32) * 2
    del back
    new = torch.full((SIZE // 4,), 7.0, device=DEVICE)
    torch.accelerator.current_stream(DEVICE).wait_event(other.record_event())
    assert doubled.cpu().unique().tolist() == [6.0]
    del new


def test_it_is_read_twice_where_it_has_two_readers(links):
    """It comes back once; and a reader that nobody knew of gets it all the same."""
    store = Store(ones(3.0), links)
    store.readers = 2
    links.close()
    back = store.read()
    assert store.read().data_ptr() == back.data_ptr()
    assert store._back is None
    assert values(store) == [3.0]


def test_what_is_read_in_two_parts_stays(links):
    """Between them it is on the device."""
    store = stored(ones(3.0), links)
    store.keeps = True
    links.close()
    back = store.read()
    assert store._back is back


def test_what_has_not_gone_yet_is_read_where_it_is(links):
    """Nothing comes back: it is still there."""
    tensor = ones(4.0)
    store = stored(tensor, links)
    assert store.read().data_ptr() == tensor.data_ptr()


def test_the_next_ones_set_out_when_one_is_read(links):
    """So many, in the order of the backward."""
    before, stores = None, []
    for i in range(6):
        before = stored(ones(float(i)), links, before)
        stores.append(before)
    links.close()
    stores[-1].fetch_last()
    assert [s._back is not None for s in stores] == [False] * 4 + [True] * 2
    assert values(stores[-1]) == [5.0]
    assert [s._back is not None for s in stores] == [False] * 3 + [True] * 2 + [False]
    assert [values(store) for store in stores[4::-1]] == [[float(i)] for i in (4, 3, 2, 1, 0)]


def test_pinned_memory_is_used_again_in_the_order_of_the_copies(links):
    """The host is so far ahead that torch's cache would not hand it out again."""
    store = stored(ones(1.0), links)
    links.close()
    back = store.read()
    address = store._host.data_ptr()
    del store
    again = stored(ones(2.0), links)
    assert again._host.data_ptr() == address
    links.close()
    assert back.view(torch.float32).cpu().unique().tolist() == [1.0]
    assert values(again) == [2.0]


def test_pinned_memory_goes_from_stream_to_stream(links):
    """What is computed on a stream of the user's does not wait for what another one has read."""
    store = stored(ones(1.0), links)
    links.close()
    other = torch.Stream(DEVICE)
    with other:
        tensor = ones(2.0)
    back = store.read()
    address = store._host.data_ptr()
    del store
    with other:
        again = stored(tensor, links)
        assert again._host.data_ptr() == address
        links.close()
    assert back.view(torch.float32).cpu().unique().tolist() == [1.0]
    torch.accelerator.current_stream(DEVICE).wait_event(other.record_event())
    assert values(again) == [2.0]


def test_it_comes_back_to_another_stream(links):
    """Which has not waited until it was gone."""
    store = stored(ones(3.0), links)
    links.close()
    other = torch.Stream(DEVICE)
    with other:
        store.fetch()
    assert values(store) == [3.0]


def test_a_write_to_what_leaves_is_an_error(links):
    """As plain: autograd would not have it either. Here the copy may be neither."""
    offload = Offload(lambda: 0, frozenset([0]), lambda storage: False, links)
    tensor = ones()
    away = offload.away(tensor)
    tensor.add_(1)
    with pytest.raises(
        StateError, match=rf"shape \({SIZE // 4},\) .*written in place after it was"
    ):
        away.tensor()
    links.close()
    with pytest.raises(StateError, match="written in place after it was saved"):
        away.tensor()
    assert "write after read" in simulated.races()[0]
    simulated.reset()


def test_a_write_after_it_has_gone_does_no_harm(links):
    """The copy is over before the write: the compute stream waits for it."""
    offload = Offload(lambda: 0, frozenset([0]), lambda storage: False, links)
    tensor = ones()
    away = offload.away(tensor)
    links.close()
    tensor.add_(1)
    assert away.tensor().cpu().unique().tolist() == [1.0]


class Fails(TorchDispatchMode):
    """An operation fails: before it is queued, or behind it, as an interrupt may."""

    def __init__(self, name, *, after):
        super().__init__()
        self.name, self.after = name, after

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == self.name and not self.after:
            raise KeyboardInterrupt
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == self.name:
            raise KeyboardInterrupt
        return result


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", ["copy_", "empty", "set_"])
def test_a_failure_on_the_way_out(links, name, after):
    """Nothing is used before it is free, and the next one works."""
    tensor = ones()
    address = tensor.data_ptr()
    with pytest.raises(KeyboardInterrupt):
        with Fails(name, after=after):
            Store(tensor, links)
    del tensor
    gc.collect()
    again = stored(ones(2.0), links)
    links.close()
    assert values(again) == [2.0]
    torch.full((SIZE // 4,), 7.0, device=DEVICE)
    del address


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", ["copy_", "empty"])
def test_a_failure_on_the_way_back(links, name, after):
    """The memory that a copy may still write to is not used for anything else; it can be read."""
    store = stored(ones(3.0), links)
    links.close()
    with pytest.raises(KeyboardInterrupt):
        with Fails(name, after=after):
            store.fetch()
    gc.collect()
    new = [torch.full((SIZE // 4,), 7.0, device=DEVICE) for _ in range(3)]
    assert values(store) == [3.0]
    assert [t.cpu().unique().tolist() for t in new] == [[7.0]] * 3
