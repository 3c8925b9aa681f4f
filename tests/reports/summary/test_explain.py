"""``explain``: why a module or a parameter is where it is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockpipe as bp
from blockpipe.errors import UsageError

X = torch.zeros(4, 8)


class Net(nn.Module):
    """Three modules on two stages, a skip, a tied weight, a parameter that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = (nn.Linear(8, 8) for _ in range(3))
        self.act = nn.Sequential(nn.Tanh(), nn.Linear(8, 8))
        self.head.weight = self.stem.weight
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.stem(x)
        with bp.Block(1, name="top"):
            return self.head(self.act(self.body(skip)) + skip)


def says(text: str, what: str) -> list[str]:
    """The lines of that kind."""
    return [
        line.partition(": ")[2] for line in text.splitlines() if line.strip().startswith(f"{what}:")
    ]


def explained(path: str, net: nn.Module | None = None, **options: Any) -> str:
    return bp.record(net or Net(), X, **options).explain(path)


def test_the_mark_that_put_it_there() -> None:
    """With its name and line, and the first call after it."""
    text = explained("head")
    assert text.startswith("head (Linear) is on stage 1\n")
    (why,) = says(text, "stage")
    assert "the mark 'top' at test_explain.py:" in why
    assert "body was the first call there; nothing moved it before this call" in why
    (why,) = says(explained("body"), "stage")
    assert "first call" not in why


def test_what_comes_before_the_first_mark_is_on_stage_0() -> None:
    (why,) = says(explained("stem"), "stage")
    assert why == "no mark came before it, and a forward begins on stage 0"


def test_a_plan_is_named() -> None:
    """And no mark is, though there is one."""
    plan = bp.record(Net(), X).plan
    plan.assign("body", 0)
    text = explained("act", plan=plan)
    assert says(text, "stage") == [
        "the plan put the forward on stage 1; nothing moved it before this call"
    ]
    assert says(explained("body", plan=plan), "stage")[0].startswith(
        "the plan put the forward on stage 0"
    )


def test_a_mark_of_the_same_stage_moves_nothing() -> None:
    """What put the forward there is the first; the one in effect is named beside it."""
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    bp.BeginBlock(net[1], 1)
    bp.BeginBlock(net[2], 1)
    (why,) = says(explained("2", net), "stage")
    assert "1 was the first call there" in why
    assert "is in effect, and is of the same stage" in why


def test_what_spans_stages_is_open() -> None:
    text = explained("")
    assert text.startswith("Net (Net) spans stage 0, stage 1\n")
    assert "a mark inside of it moves the forward" in says(text, "sealed")[0]
    assert len(says(text, "crosses into it")) == len(bp.record(Net(), X).crossings) == 2


def test_sealed_and_inside_of_sealed() -> None:
    assert says(explained("act"), "sealed")[0].startswith("yes: it stays")
    assert says(explained("act.1"), "sealed") == ["yes, as a part of act"]


def test_why_a_call_is_open() -> None:
    """It reads a weight that lives elsewhere; it leaves something on itself; it hands on by state."""
    (why,) = says(explained("head"), "sealed")
    assert "it reads stem.weight of another stage, no argument (" in why

    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = super().forward(x)
            return self.kept + 0

    (why,) = says(explained("0", nn.Sequential(Keeps(8, 8))), "sealed")
    assert "leaves a tensor, which the output has, or the loss" in why

    class Hands(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.out: list[Tensor] = []

        def forward(self, x: Tensor) -> None:
            self.out.append(self.a(x))

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hands = Hands()

        def forward(self, x: Tensor) -> Tensor:
            self.hands.out.clear()
            self.hands(x)
            with bp.Block(1):
                return self.hands.out.pop() * 2

    (why,) = says(explained("hands", Reads()), "sealed")
    assert "it makes a tensor that it does not return" in why


def test_explain_lists_what_crosses_into_a_module() -> None:
    """Where it was made, how large, whether its gradient goes back; only where it is read first."""
    assert says(explained("body"), "crosses into it")[0].startswith(
        "float32 [4, 8] (128 B) from stage 0 to 1, and its gradient goes back (read at "
    )
    assert says(explained("act"), "crosses into it") == ["nothing"]
    assert says(explained("head"), "crosses into it")[0].startswith("stem.weight, float32 [8, 8]")
    assert says(explained("body"), "arguments") == ["computed from the result of stem, on stage 0"]


def test_explain_says_whether_and_why_it_is_recomputed() -> None:
    """By the pipeline's option, by its mark, or why never."""

    def block() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))

    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = block(), block()

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            with bp.Block(1, checkpoint=False):
                return self.b(x)

    assert says(explained("a", Marked()), "recomputed")[0].startswith("where a pipeline's")
    pipe = bp.Pipeline(Marked(), devices=["cpu"] * 2, chunks=2, checkpoint="always")
    assert says(pipe.explain("a.1", X), "recomputed") == ["yes: the pipeline's checkpoint='always'"]
    assert says(pipe.explain("b", X), "recomputed") == ["no: its mark says checkpoint=False"]
    assert says(explained("head"), "recomputed")[0].startswith("never as a whole")
    assert says(explained("stem"), "recomputed")[0].startswith("never: it keeps hardly more")

    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * torch.rand(8, generator=torch.Generator())).exp().sin()

    text = explained("1", nn.Sequential(nn.Linear(8, 8), Draws()))
    assert "never: it draws from a generator of its own" in text


def test_each_of_several_calls() -> None:
    """Alike ones together."""

    class Loops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.step(x)
            with bp.Block(1):
                return self.step(x)

    text = explained("step", Loops())
    assert text.startswith("step (Tanh) is called 4 times\n")
    heads = [line.strip() for line in text.splitlines() if line.startswith("  call")]
    assert heads == ["call 0 is on stage 0", "calls 1 to 2 is on stage 0", "call 3 is on stage 1"]


def test_a_call_that_computes_nothing() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Identity())
    assert "it computes nothing, and the forward is on stage 0" in explained("1", net)


def test_explain_a_parameter_says_who_reads_it() -> None:
    """Where it lives, who reads it, under which names."""
    text = explained("head.weight")
    assert text.startswith("stem.weight (parameter, float32 [8, 8], 256 B) lives on stage 0\n")
    assert "tied: stem.weight = head.weight are one" in text
    assert (
        "also read on stage 1: a copy of the value goes there, and its gradient is sent back"
        in text
    )
    assert "no call reads it" in explained("unused")
    assert "the mark at test_explain.py:" in explained("body.bias")
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    net[0].weight.requires_grad_(False)
    assert "(frozen parameter" in explained("0.weight", net)
    assert "the forward writes to it" in explained("1.running_mean", net)


def test_a_container_that_is_not_called() -> None:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    text = explained("layers", Lists())
    assert text.splitlines() == [
        "layers is not called itself",
        "  parameters and buffers: 8 live on stage 0, 1.1 KiB",
    ]


def test_a_function_by_its_name() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return double(x)

    @bp.BlockFunction(0)
    def double(x: Tensor) -> Tensor:
        return x * 2

    name = "test_a_function_by_its_name.<locals>.double"
    assert f"{name} (" in explained(name, Inner())


def test_explain_of_a_pipeline_names_the_device() -> None:
    pipe = bp.Pipeline(Net(), devices=["cpu"] * 2, chunks=2, sample=((X,), {}))
    assert pipe.explain("body").startswith("body (Linear) is on stage 1 (cpu)")


@pytest.mark.parametrize("path", ["bdy", "head.wieght", "nothing.at.all", 3, None])
def test_an_unknown_path_names_near_misses(path: Any) -> None:
    """Near misses, or what there is; and the user's line."""
    near = {"bdy": "mean 'body'", "head.wieght": "mean 'head.weight'"}
    with pytest.raises(
        UsageError, match=r"test_explain\.py:\d+.*" + near.get(path, r"(did you mean|there are)")
    ):
        explained(path)


def test_explain_of_a_pipeline_that_recorded_nothing_asks_for_a_sample() -> None:
    pipe = bp.Pipeline(Net(), devices=["cpu"] * 2, chunks=2)
    with pytest.raises(UsageError, match=r"explain\(\) needs a sample.*explain\(path, x\)"):
        pipe.explain("body")
