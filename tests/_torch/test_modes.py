"""What ``_torch/modes.py`` relies on."""

import sys
import threading

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from blockpipe._torch import modes


class FunctionMode(TorchFunctionMode):
    def __init__(self):
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Dispatch(modes.DispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_function_modes_are_listed_from_the_outermost():
    outer, inner = FunctionMode(), FunctionMode()
    assert modes.function_modes() == [], "torch has a function mode where none was entered"
    with outer, inner:
        listed = modes.function_modes()
        by_number = [modes.function_mode_at(i) for i in range(modes.how_many_function_modes())]
    assert listed == by_number == [outer, inner], (
        "torch's stack of function modes is no longer read from the outermost to the innermost, "
        "which the glue and the restored threads need"
    )


def test_function_modes_go_off_and_on_without_being_entered():
    mode = FunctionMode()
    with mode:
        popped = modes.pop_function_mode()
        torch.ones(1)
        seen_off = len(mode.seen)
        modes.push_function_mode(popped)
        torch.ones(1)
    assert popped is mode, "torch no longer returns the function mode that it pops"
    assert seen_off == 0, (
        "torch's popped function mode still sees calls, which `ours` must not show"
    )
    assert mode.seen, "torch's pushed function mode no longer sees calls, which `theirs` needs"
    assert modes.how_many_function_modes() == 0


def test_a_pop_with_no_mode_says_so():
    """The words by which an interrupt is found that kept a mode from being there."""
    with pytest.raises((IndexError, RuntimeError), match="pop from empty mode stack"):
        with FunctionMode():
            modes.pop_function_mode()


def test_without_torch_functions():
    mode = FunctionMode()
    with mode, modes.without_torch_functions():
        torch.ones(1)
    assert not mode.seen, "torch's DisableTorchFunction no longer turns function modes off"


def test_as_plain_tensor():
    class Loss(Tensor):
        __torch_function__ = modes.as_plain_tensor

    result = torch.ones(2).as_subclass(Loss) * 2
    assert type(result) is Tensor, (
        "torch's _disabled_torch_function_impl no longer makes plain tensors, which a step's loss "
        "has to become in what is computed from it"
    )


def test_dispatch_modes():
    outer, inner = Dispatch(), Dispatch()
    with outer, inner:
        assert modes.dispatch_modes() == [outer, inner], (
            "torch lists dispatch modes in another order"
        )
        assert modes.how_many_dispatch_modes() == 2, "torch counts dispatch modes otherwise"
    modes.push_dispatch_mode(outer)
    try:
        torch.ones(1)
    finally:
        popped = modes.pop_dispatch_mode()
    assert popped is outer, "torch no longer returns the dispatch mode that it pops"
    assert outer.seen, "torch's pushed dispatch mode no longer sees operations, which lanes need"
    assert modes.how_many_dispatch_modes() == 0


def test_is_transformed():
    inside = []

    def function(x):
        inside.append((modes.is_transformed(x), type(x), modes.is_in_transform()))
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    assert inside == [(True, Tensor, True)], (
        "torch.func's tensors are no longer told by is_functorch_wrapped_tensor, or its transforms "
        "by peek_interpreter_stack: the glue would copy the one, and miss the other"
    )
    assert not modes.is_transformed(torch.ones(1))
    assert not modes.is_in_transform()


def test_is_in_forward_mode():
    before = modes.is_in_forward_mode()
    with forward_ad.dual_level():
        inside = modes.is_in_forward_mode()
    assert (before, inside, modes.is_in_forward_mode()) == (False, True, False), (
        "torch no longer counts levels of forward-mode AD in forward_ad._current_level, by which a "
        "pipeline refuses them"
    )


def test_stashed_is_of_one_thread_and_of_those_that_autograd_starts_for_it():
    value = object()
    count = sys.getrefcount(value)
    modes.stash("blockpipe_test", value)
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(modes.stashed("blockpipe_test")))
    thread.start()
    thread.join()
    assert modes.stashed("blockpipe_test") is value, (
        "torch's thread-local state lost what it was given"
    )
    assert elsewhere == [None], "torch's thread-local state is another thread's too"
    modes.stash("blockpipe_test", None)
    assert sys.getrefcount(value) == count, (
        "torch's _stash_obj_in_tls counts references otherwise: blockpipe leaks one, or has one too "
        "few, which crashes"
    )


def test_the_interpreter_waits_for_threads_that_keep_something(monkeypatch) -> None:
    """Such a thread ends after its Python part, and needs the interpreter to give it back."""
    monkeypatch.setattr(modes, "_stashers", set())
    thread = threading.Thread(target=modes.stash, args=("blockpipe_test", object()))
    thread.start()
    thread.join()
    looked = []

    def is_there(number: int) -> bool:
        looked.append(number)
        return len(looked) < 3

    monkeypatch.setattr(modes, "_is_there", is_there)
    modes.let_threads_end()
    assert looked == [thread.native_id] * 3
    monkeypatch.setattr(modes, "_is_there", lambda number: number == thread.native_id)
    monkeypatch.setattr(modes, "_PATIENCE", 0.05)
    modes.let_threads_end()  # it is bounded
