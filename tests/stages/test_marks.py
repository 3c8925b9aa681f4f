"""Marks: where stages begin, and that nothing else of a model changes."""

import copy
import inspect
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import blockpipe as bp
from blockpipe.errors import MarkError
from blockpipe.stages.cursor import Cursor, Mark, numbered_by


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


class Scripted(nn.Module):
    """A forward given as a function, with a layer to run on each stage."""

    def __init__(self, script):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.script = script

    def forward(self, x):
        return self.script(self, x)


def route(script) -> list[int]:
    return bp.record(Scripted(script), torch.zeros(2, 4)).route


def test_nested_block_restores_the_outer_stage():
    """After an inner block the outer one's stage is back."""

    def script(net, x):
        with bp.Block(0):
            x = net.layers[0](x)
            with bp.Block(1):
                x = net.layers[1](x)
            return net.layers[2](x)

    assert route(script) == [0, 1, 0]


def test_code_after_the_outermost_block_stays_on_its_stage():
    """Code after the outermost block stays on its stage."""

    def script(net, x):
        with bp.Block(0):
            x = net.layers[0](x)
        with bp.Block(1):
            x = net.layers[1](x)
        assert bp.current_stage() == 1
        return net.layers[2](x)

    assert route(script) == [0, 1]


def test_automatic_numbers_follow_the_highest():
    """A block without a stage gets the number after the highest entered in this forward."""

    def script(net, x):
        for layer in net.layers[:3]:
            with bp.Block():
                x = layer(x)
        with bp.Block(1):
            x = net.layers[3](x)
        with bp.Block():
            return net.layers[4](x)

    assert route(script) == [0, 1, 2, 1, 3]


def test_automatic_numbers_restart_at_each_forward():
    """The second forward counts from 0 again."""

    def script(net, x):
        with bp.Block():
            x = net.layers[0](x)
        with bp.Block():
            return net.layers[1](x)

    net = Scripted(script)
    assert (
        bp.record(net, torch.zeros(1, 4)).route == bp.record(net, torch.zeros(1, 4)).route == [0, 1]
    )


def test_a_mark_with_nothing_behind_it_makes_no_hop():
    """Only an operation crosses a border."""

    def script(net, x):
        x = net.layers[0](x)
        with bp.Block(1):
            pass
        with bp.Block(2):
            pass
        with bp.Block(1):
            return net.layers[1](x)

    assert route(script) == [0, 1]


def test_blocks_in_loops_and_under_branches():
    """A re-entered block is on its stage again."""

    def script(net, x):
        for i in range(2):
            with bp.Block(0):
                x = net.layers[0](x)
            if i == 0:
                with bp.Block(1):
                    x = net.layers[1](x)
        with bp.Block(2):
            return net.layers[2](x)

    assert route(script) == [0, 1, 0, 2]


def test_an_exception_inside_a_block_restores():
    """A block left by an exception comes back to the outer stage."""

    def script(net, x):
        with bp.Block(0):
            x = net.layers[0](x)
            try:
                with bp.Block(1):
                    x = net.layers[1](x)
                    raise KeyError("inside")
            except KeyError:
                pass
            assert bp.current_stage() == 0
            return net.layers[2](x)

    assert route(script) == [0, 1, 0]


def test_begin_block_under_a_with_block_lasts_to_its_end():
    """A begun block inside a nested ``with`` ends with it; inside the outermost one it stays."""
    inner = bp.BeginBlock(nn.Linear(4, 4), stage=2)

    def nested(net, x):
        with bp.Block(0):
            x = net.layers[0](x)
            with bp.Block(1):
                x = inner(net.layers[1](x))
                assert bp.current_stage() == 2
            return net.layers[2](x)

    def outermost(net, x):
        with bp.Block(0):
            x = inner(net.layers[0](x))
        return net.layers[2](x)

    assert route(nested) == [0, 1, 2, 0]
    assert route(outermost) == [0, 2]


def test_a_module_called_under_two_blocks_lives_on_the_first():
    """Its parameters live where they are read first, and are read on the other stage too."""

    def script(net, x):
        with bp.Block(0):
            x = net.layers[0](x)
        with bp.Block(1):
            return net.layers[0](net.layers[1](x))

    recording = bp.record(Scripted(script), torch.zeros(2, 4))
    weight = next(p for p in recording.parameters if p.name == "layers.0.weight")
    assert (weight.stage, weight.also_read_on) == (0, [1])


def test_block_is_a_decorator_and_reentrant():
    """One Block object may be entered inside itself, as a decorator too."""
    block = bp.Block(1)

    @block
    def inner(layer, x):
        with block:
            return layer(x)

    def script(net, x):
        return inner(net.layers[1], net.layers[0](x))

    assert route(script) == [0, 1]
    assert inner.__name__ == "inner"


def test_block_function_keeps_name_signature_and_docstring():
    """What inspect sees is the function's own."""

    @bp.BlockFunction(stage=1)
    def head(x: int, *, scale: float = 2.0) -> float:
        """The head."""
        return x * scale

    assert head(3) == 6.0
    assert head.__doc__ == "The head."
    assert list(inspect.signature(head).parameters) == ["x", "scale"]


def test_begin_block_marks_plain_callables():
    """A marked callable begins its block when it is called."""
    relu = bp.BeginBlock(torch.relu, stage=1)

    def script(net, x):
        return net.layers[1](relu(net.layers[0](x)))

    assert route(script) == [0, 1]


def test_a_mark_changes_nothing_else():
    """Class, parameters, state_dict keys and dir stay as they were."""
    plain, marked = two_layers(), two_layers()
    layer, parameters = marked[2], list(marked.parameters())
    assert bp.BeginBlock(marked[2], stage=1) is layer
    assert type(layer) is nn.Linear
    assert list(marked.state_dict()) == list(plain.state_dict())
    assert all(a is b for a, b in zip(marked.parameters(), parameters, strict=True))
    assert "BeginBlock(stage=1)" in repr(marked)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies_and_pickles_keep_the_marks(copied):
    """Copies and pickles keep the mark, and their own."""
    net = two_layers()
    net[2] = bp.BeginBlock(net[2], stage=1, name="head")
    twin = copied(net)
    assert "BeginBlock(stage=1, name='head')" in repr(twin)
    assert bp.record(twin, torch.zeros(1, 4)).route == [0, 1]


@pytest.mark.slow
def test_marks_survive_torch_save_read_in_another_process(tmp_path):
    """Another process that loads the model sees its stages."""
    net = two_layers()
    net[2] = bp.BeginBlock(net[2], stage=1)
    torch.save(net, tmp_path / "net.pt")
    program = f"""
        import torch, blockpipe as bp
        net = torch.load({str(tmp_path / "net.pt")!r}, weights_only=False)
        print(bp.record(net, torch.zeros(1, 4)).route)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[0, 1]"


def test_remove_blocks_takes_off_ours_only():
    """Hooks of others stay, and their handles work; a module can be marked anew."""
    net = two_layers()
    calls = []
    handle = net[2].register_forward_pre_hook(lambda m, a: calls.append(1))
    bp.BeginBlock(net[2], stage=1)
    bp.remove_blocks(net)
    assert bp.record(net, torch.zeros(1, 4)).route == [0]
    net(torch.zeros(1, 4))
    handle.remove()
    count = len(calls)
    net(torch.zeros(1, 4))
    assert len(calls) == count > 0
    assert "BeginBlock" not in repr(net)
    bp.BeginBlock(net[2], stage=3)


def test_begin_blocks_matches_segment_by_segment():
    """A star is one segment of the path."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)))
    bp.begin_blocks(net, {"[23]": 1})
    assert bp.record(net, torch.zeros(1, 4)).route == [0, 1]
    with pytest.raises(MarkError, match=r"expected the path of a module.* got '4'"):
        bp.begin_blocks(net, {"4": 1})


def test_begin_blocks_marks_nothing_if_anything_is_wrong():
    """All patterns are checked first."""
    net = two_layers()
    with pytest.raises(MarkError, match="did you mean"):
        bp.begin_blocks(nn.ModuleDict({"layer3": net, "stem": nn.ReLU()}), {"stem": 1, "layr3": 2})
    with pytest.raises(MarkError, match="marked as stage 1 already, and now as stage 2"):
        bp.begin_blocks(net, {"2": 1, "[2]": 2})
    assert "BeginBlock" not in repr(net)


def test_begin_lasts_until_the_next_mark():
    """A block without a ``with``; inside of one it lasts to its end."""

    def script(net, x):
        x = net.layers[0](x)
        bp.Block(1).begin()
        x = net.layers[1](x)
        with bp.Block(2):
            x = net.layers[2](x)
            bp.Block(3).begin()
            x = net.layers[3](x)
            with bp.Block(4):
                x = net.layers[4](x)
                bp.Block(5).begin()
                x = net.layers[5](x)
            return net.layers[0](x)

    assert route(script) == [0, 1, 2, 3, 4, 5, 3]


def test_stages_are_numbered_by_a_function():
    """It is asked at each mark, in the recording and in steps, and keeps what it notes by forward."""

    def numbered(cursor, mark):
        return cursor.noted.setdefault(mark.name[0], len(cursor.noted))

    def script(net, x):
        for name, layer in zip(("a1", "b1", "a2"), net.layers, strict=False):
            with bp.Block(name=name):
                x = layer(x)
        return x

    net = Scripted(script)
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2)
    with numbered_by(numbered):
        for _ in range(2):
            pipe.forward_backward(torch.ones(4, 4), loss_fn=torch.sum)
    assert pipe.recording.route == [0, 1, 0]
    assert route(script) == [0, 1, 2]


def test_a_cursor_is_a_stack_of_stages():
    """The cursor is a stack of stages."""
    cursor = Cursor()
    for stage in (1, 2):
        cursor.enter(Mark(stage, None, "here"))
    assert cursor.stage == 2
    cursor.leave()
    assert cursor.stage == 1
    cursor.leave()
    assert cursor.stage == 1


def test_a_scripted_module_is_not_marked_but_runs():
    """It takes no hooks: the mark goes around its call. A pipeline of it takes several steps."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)
            with pytest.warns((FutureWarning, DeprecationWarning), match="deprecated"):
                self.b = torch.jit.script(nn.Linear(4, 4))

        def forward(self, x):
            x = self.a(x)
            with bp.Block(stage=1):
                return self.b(x)

    net = Net()
    with pytest.raises(MarkError, match=r"got RecursiveScriptModule.*with Block\(stage=1\)"):
        bp.BeginBlock(net.b, stage=1)
    x = torch.randn(4, 4)
    net(x).sum().backward()
    plain = [p.grad.clone() for p in net.parameters()]
    pipe = bp.Pipeline(net, devices=["cpu"] * 2, chunks=2, schedule="1f1b")
    for _ in range(3):
        net.zero_grad()
        pipe.forward_backward(x, loss_fn=torch.sum, target=None)
    for parameter, expected in zip(net.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad * 2, expected * 1.0)


@pytest.mark.parametrize("how", ["BeginBlock", "begin_blocks"])
def test_a_container_that_nobody_calls_is_no_block(how):
    """A mark on it would do nothing, without a word."""
    net = nn.Module()
    net.h = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    with pytest.raises(
        MarkError, match=r"a module with a forward of its own .*got ModuleList.*for example its '0'"
    ):
        bp.BeginBlock(net.h, 1) if how == "BeginBlock" else bp.begin_blocks(net, {"h": 1})
    assert bp.BeginBlock(net.h[1], 1) is net.h[1]


def test_a_block_in_which_nothing_runs_keeps_its_stages_number():
    """Those behind it stay where they are."""

    def script(net, x):
        with bp.Block(0):
            x = net.layers[0](x)
        with bp.Block(1):
            pass
        with bp.Block(2):
            return net.layers[2](x)

    assert route(script) == [0, 1, 2]
