"""Models that a step does not train."""

import signal
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from blockpipe.restoring import model_state
from blockpipe.restoring.preserved import PreservedModel

from ..interrupting import interrupting, traced


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """A shell has what it runs in the background ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_an_interrupt_at_any_bytecode_leaves_a_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parameters, gradients, buffers, attributes and random numbers, also while it puts them
    back."""
    for looks in ("given_to_libraries", "in_place_of_torchs"):  # at thousands, and sets nothing
        monkeypatch.setattr(model_state, looks, lambda *classes: ())
    net = nn.BatchNorm1d(4)
    net(torch.randn(3, 4)).sum().backward()
    net.count = 0
    gradients = [p.grad for p in net.parameters()]
    tensors = [t.clone() for t in (*net.parameters(), *net.buffers(), torch.get_rng_state())]
    preserved = PreservedModel([net], [torch.device("cpu")])

    def step() -> None:
        with preserved.run():
            net.count += 1
            net(torch.randn(3, 4)).sum().backward()
            with torch.no_grad():
                net.weight.add_(1)

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    step()  # what is cached at the first one is not counted
    seen = [0]
    traced(interrupting(-1, seen, interrupt), step)
    assert seen[0] > 500
    for bytecode in range(1, seen[0], 7):
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            traced(interrupting(bytecode, [0], interrupt), step)
        now = (*net.parameters(), *net.buffers(), torch.get_rng_state())
        assert all(map(torch.equal, now, tensors)), bytecode
        assert net.count == 0
        assert all(p.grad is g for p, g in zip(net.parameters(), gradients, strict=True))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
