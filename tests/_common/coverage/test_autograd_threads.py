"""Code that autograd calls is told to the thread that asks for the backward."""

import threading
import types

import torch
from torch import Tensor

from blockpipe._common.coverage.code_events import told
from blockpipe._common.coverage.covered_code import Coverage, CoveredCode

from ...stage_devices import stages


class Told:
    def __init__(self) -> None:
        self.begun = list[str]()

    def begins(self, frame: types.FrameType) -> None:
        self.begun.append(frame.f_code.co_name)

    def reaches(self, code: types.CodeType, offset: int) -> None:
        self.begun.append(code.co_name + "'s line")


def first(gradient: Tensor) -> Tensor:
    return gradient * 2


def second(gradient: Tensor) -> Tensor:
    return abs(gradient)


def _backward(device: torch.device, *hooks: object) -> None:
    leaf = torch.ones(2, device=device, requires_grad=True)
    output = leaf * 2
    for hook in hooks:
        output.register_hook(hook)
    output.sum().backward()


def test_hooks_are_told_while_it_is_entered():
    [device] = {torch.device(one) for one in stages(1)}
    listener = Told()
    _backward(device, first)
    for _ in range(2):
        with told(Coverage([]), listener, device):
            _backward(device, first)
        _backward(device, second)
    assert [one for one in listener.begun if one != "_backward"] == ["first", "first"]


def test_instructions_are_too():
    [device] = {torch.device(one) for one in stages(1)}
    coverage, listener = Coverage([]), Told()
    covered = CoveredCode(first.__code__)
    covered.begun.add((0, ()))
    coverage.add([covered])
    with told(coverage, listener, device):
        _backward(device, first)
    assert "first's line" in listener.begun


def test_each_thread_is_told_its_own():
    """Two at once, each on a device of its own."""
    devices = [torch.device(one) for one in stages(2)]
    listeners, barrier = [Told(), Told()], threading.Barrier(2)

    def run(one: int) -> None:
        with told(Coverage([]), listeners[one], devices[one]):
            barrier.wait()
            for _ in range(20):
                _backward(devices[one], (first, second)[one])

    threads = [threading.Thread(target=run, args=(one,)) for one in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    begun = [{*listener.begun} & {"first", "second"} for listener in listeners]
    assert begun == [{"first"}, {"second"}]
