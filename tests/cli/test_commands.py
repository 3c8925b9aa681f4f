"""The command line: what it prints, its exit statuses, its errors."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

import blockpipe as bp
from blockpipe.__main__ import main
from blockpipe.cli.model_arguments import begins, build_model, find_callable, make_inputs

RESNET = ["torchvision.models:resnet18", "--input", "4,3,64,64"]
MARKED = [*RESNET, "--begin", "layer3=1", "--begin", "layer4=2"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(words)
    out, err = capsys.readouterr()
    return status, out, err


def marked_resnet() -> nn.Module:
    return bp.begin_blocks(torchvision.models.resnet18(), {"layer3": 1, "layer4": 2})


# --- what it prints


def test_summary_is_the_recordings(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "summary", *MARKED)
    with torch.device("meta"):
        model = marked_resnet()
    assert status == 0
    expected = f"{bp.record(model, torch.zeros(4, 3, 64, 64)).summary()}\n"
    lines = re.compile(r"test_commands\.py:\d\d+")  # of the marks
    assert lines.sub("", out) == lines.sub("", expected)


def test_summary_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "summary", *MARKED, "--format", "json")
    assert status == 0
    elements = sum(p.numel() for p in torchvision.models.resnet18().parameters())
    assert sum(stage["parameters"] for stage in json.loads(out)["stages"]) == elements


def test_summary_opens_to_a_depth_with_the_columns_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, out, _ = run(capsys, "summary", *MARKED, "--depth", "2", "--columns", "stage,flops")
    assert "2 × BasicBlock" in out
    assert "Flops" in out
    assert "Parameters" not in out.partition("\n")[0]


def test_explain_names_a_module(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "summary", *MARKED, "--explain", "layer4.1.conv2")
    assert status == 0
    assert "layer4.1.conv2" in out
    assert "stage 2" in out


def test_plan_goes_through_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What ``plan`` saves, ``--plan`` reads, and the layout says the same."""
    file = tmp_path / "plan.json"
    _, first, _ = run(capsys, "plan", *MARKED, "--save", str(file))
    _, second, _ = run(capsys, "plan", *RESNET, "--plan", str(file))
    assert first == second
    layout = first.rpartition("layout: ")[2].strip()
    _, third, _ = run(capsys, "plan", *RESNET, "--layout", layout)
    assert third == first
    _, as_json, _ = run(capsys, "plan", *MARKED, "--format", "json")
    assert json.loads(as_json) == json.loads(file.read_text())


def test_a_plan_of_another_model_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    run(capsys, "plan", *MARKED, "--save", str(file))
    other = ["torchvision.models:resnet34", *RESNET[1:]]
    status, _, err = run(capsys, "summary", *other, "--plan", str(file))
    assert status == 1
    assert "'layer1.2' call 0: only in the forward" in err


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("resnet18", ["--by", "parameters"]),
        ("resnet18", ["--estimate"]),
        # By the clock a cut may be anywhere: here no module is called twice, so that it is a mark.
        ("mobilenet_v3_small", []),
    ],
)
def test_balance_prints_marks_and_saves_a_plan(
    model: str, words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The marks are Python; the plan has as many stages as were asked for."""
    file, named = tmp_path / "plan.json", [f"torchvision.models:{model}", *RESNET[1:]]
    status, out, _ = run(
        capsys, "balance", *named, "--stages", "2", *words, "--save", str(file), "--chunks", "2"
    )
    assert status == 0
    marks = [line.strip() for line in out.splitlines() if "BeginBlock(" in line]
    assert len(marks) == 1
    net = getattr(torchvision.models, model)()
    exec(marks[0], {"model": net, "bp": bp, "blockpipe": bp})
    plan = bp.StagePlan.from_json(file.read_text())
    assert bp.record(net, torch.zeros(4, 3, 64, 64)).plan.stages() == plan.stages()
    assert plan.num_stages == 2


def test_simulate_says_what_simulate_does(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "simulate", "--stages", "3", "--chunks", "6", "--format", "json")
    from blockpipe.schedules.builders import make_schedule

    played = bp.simulate(make_schedule("1f1b", range(3), 6))
    found = json.loads(out)
    assert (found["makespan"], found["bubble"]) == (played.makespan, played.bubble)


def test_simulate_compares_all_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--lanes", "0,1,1,0", "--schedule", "all"]
    _, out, _ = run(capsys, *words)
    _, as_json, _ = run(capsys, *words, "--format", "json")
    names = [line.split()[0] for line in out.splitlines()[2:]]
    assert names == [played["schedule"] for played in json.loads(as_json)]
    assert {"gpipe", "1f1b", "zb-v"} <= set(names)


def test_trace_writes_a_trace_and_a_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chrome, page = tmp_path / "t.json", tmp_path / "t.html"
    shape = [*MARKED, "--chunks", "2", "--devices", "cpu,cpu,cpu"]
    status, out, _ = run(capsys, "trace", *shape, "--save", str(chrome))
    assert status == 0
    assert "Bubble" in out
    names = [event.get("name", "") for event in json.loads(chrome.read_text())["traceEvents"]]
    assert any(name.startswith("F") for name in names)
    run(capsys, "trace", *shape, "--eval", "--save", str(page))
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_named_inputs_of_whole_numbers_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    """Inputs by name, of whole numbers; a function of the user's makes the model."""
    words = ["tests.cli.test_commands:tiny_gpt2", "--input", "input_ids=2,16:int64:64"]
    status, out, err = run(capsys, "summary", *words, "--begin", "transformer.h.1=1")
    assert (status, err) == (0, "")
    assert "tied: transformer.wte.weight = lm_head.weight" in out


def tiny_gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=32,
        vocab_size=64,
        n_positions=32,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


# --- exit statuses and errors


def fails(error: str = "key") -> nn.Module:
    raise RuntimeError if error == "empty" else KeyError("foo")


EMPTY = ["--model-argument", "error=empty"]
WRONG_WORDS = [
    (["nonesuch.models:net", "--input", "1"], "does not import"),
    (["torchvision.models", "--input", "1"], "module:callable"),
    (["torchvision.models:resnet81", "--input", "1"], "did you mean 'resnet18'"),
    (["torch:eye", "--model-argument", "n=2", "--input", "1"], "expected an nn.Module"),
    (RESNET[:1], "needs an input"),
    ([*RESNET[:1], "--input", "4,3,x"], "8,3,224,224"),
    ([*RESNET[:1], "--input", "4,3,64,64:flaot32"], "did you mean 'float32'"),
    ([*RESNET[:1], "--input", "4:int64:0"], "a positive integer"),
    ([*RESNET[:1], "--input", "4:float32:9"], "not one of integers"),
    ([*RESNET[:1], "--input", "9" * 5000], "8,3,224,224"),
    ([*RESNET[:1], "--input", "4:int64:" + "9" * 5000], "a positive integer"),
    ([*RESNET, "--begin", "layer3=" + "9" * 5000], "PATH=STAGE"),
    ([*RESNET, "--begin", "layer3"], "PATH=STAGE"),
    ([*RESNET, "--begin", "layer3=1", "--begin", "layer3=2"], "given twice"),
    ([*RESNET, "--begin", "layr3=1"], "did you mean 'layer3'"),
    ([*RESNET, "--layout", "layr3=1"], "did you mean 'layer3'"),
    ([*RESNET, "--argument", "3"], "NAME=VALUE"),
    ([*MARKED, "--explain", "layer9"], "did you mean"),
]
FAILS = [
    (["torch.nn:Linear", "--input", "1"], "TypeError: "),
    (["tests.cli.test_commands:fails", "--input", "1"], "summary: KeyError: 'foo'\n"),
    (["tests.cli.test_commands:fails", "--input", "1", *EMPTY], "summary: RuntimeError\n"),
    ([*RESNET[:1], "--input", "4,3,64"], "ResNet's forward"),
    ([*RESNET, "--begin", "layer3=2"], "without gaps"),
    ([*RESNET, "--plan", "nonesuch.json"], "nonesuch.json"),
]


@pytest.mark.parametrize(
    ("words", "said", "expected"),
    [(*case, 2) for case in WRONG_WORDS] + [(*case, 1) for case in FAILS],
)
def test_errors_are_one_line(
    words: list[str], said: str, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2 for words that cannot be meant, 1 for what could not be done."""
    status, out, err = run(capsys, "summary", *words)
    assert (status, out) == (expected, "")
    assert err.startswith("blockpipe summary: ")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nonesuch"],
        ["summary"],
        ["summary", *RESNET, "--dept", "2"],
        ["summary", *RESNET, "--depth", "none"],
        ["balance", *RESNET],
        ["balance", *RESNET, "--stages", "2", "--by", "luck"],
        ["balance", *RESNET, "--stages", "2", "--limit", "16 apples"],
        ["plan", *MARKED, "--layout", "layer3=1"],
        ["balance", *RESNET, "--stages", "2", "--limit=-5"],
        ["summary", *MARKED, "--columns", "size"],
        ["summary", *MARKED, "--columns", "device"],
        ["summary", *RESNET, "--layout", "layer3"],
        ["plan", *RESNET, "--layout", "layer3=2"],
        ["simulate", "--lanes", "0,b"],
        ["simulate", "--forward", "fast"],
        ["simulate", "--chunks", "9" * 5000],
        ["simulate", "--lanes", "0," + "9" * 5000],
        ["trace", *MARKED, "--save", "trace.png"],
        ["trace", *MARKED, "--save", "no/such/folder/trace.html"],
    ],
)
def test_wrong_usage_ends_with_status_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lanes", "0,1,5"], "without gaps"),
        (["--lanes", "0,5", "--schedule", "all"], "without gaps"),
        (["--forward=-1"], "from 0 on"),
        (["--transfer", "1,2,3"], "one for each of 4 hops"),
        (
            ["--stages", "1000000000"],
            "at most 100,000 for stages times chunks, got 1,000,000,000 times 8",
        ),
        (
            ["--chunks", "100000000"],
            "at most 100,000 for stages times chunks, got 4 times 100,000,000",
        ),
    ],
)
def test_schedules_that_cannot_be_are_wrong_usage(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said why, as wrong usage: there is nothing else that could be wrong."""
    status, out, err = run(capsys, "simulate", *words)
    assert (status, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_traceback_shows_where_it_came_from() -> None:
    with pytest.raises(bp.BlockpipeError, match="does not import"):
        main(["summary", "nonesuch:net", "--input", "1", "--traceback"])


def test_the_module_runs_as_a_process() -> None:
    """The module runs; a reader that goes early is no error; nothing is on stderr."""
    command = f"{sys.executable} -m blockpipe simulate --schedule all | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Schedule")
    assert done.stderr == ""


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"blockpipe {bp.__version__}\n"


ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/command-line.md"


@pytest.mark.slow
def test_a_terminal_without_box_drawing() -> None:
    """What it cannot show is a question mark, not an error."""
    words = [sys.executable, "-m", "blockpipe", "summary", "torch.nn:Tanh", "--input", "2,3"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, capture_output=True, check=True, env=environment)
    assert b"Stage" in done.stdout
    assert b"????" in done.stdout


@pytest.mark.slow
def test_the_page_shows_what_is_printed(request: pytest.FixtureRequest) -> None:
    """Every command of the page prints what stands below it; ``--update-golden`` writes it there."""

    def ran(block: re.Match[str]) -> str:
        words = shlex.split(block[1].replace("\\\n", " "))
        pinned = [sys.executable, "-m", "tests.pinned", *words[3:]]
        done = subprocess.run(pinned, capture_output=True, text=True, cwd=ROOT)
        assert (done.returncode, done.stderr) == (0, ""), block[1]
        return f"```console\n$ {block[1]}\n{done.stdout}```"

    text = PAGE.read_text()
    console = r"```console\n\$ (python -m (?:[^\n]|(?<=\\)\n)*)\n.*?```"
    printed = re.sub(console, ran, text, flags=re.S)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(printed)
    line = re.compile(r"(resnet\.py):\d+ *")  # torchvision's own change
    assert line.sub(r"\1", PAGE.read_text()) == line.sub(r"\1", printed)


# --- what is given


def test_models_are_built_without_memory_where_they_can_be() -> None:
    made = build_model("torch.nn:Linear", {"in_features": 2, "out_features": 3}, meta=True)
    assert made.weight.is_meta
    reads = build_model("tests.cli.test_commands:ReadsWhileBuilt", {}, meta=True)
    assert not reads.weight.is_meta


class ReadsWhileBuilt(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        assert self.weight.sum().item() < 9


def test_inputs_have_the_sizes_dtypes_and_limits_asked_for() -> None:
    given = make_inputs(["2,3", "m=4:bool", "i=5,6:int32:9", "h=2:float16", "s=:float64"], {"k": 1})
    assert [tuple(t.shape) for t in given.args] == [(2, 3)]
    assert given.kwargs["k"] == 1
    assert given.kwargs["m"].dtype == torch.bool
    assert given.kwargs["i"].dtype == torch.int32
    assert 2 <= int(given.kwargs["i"].max()) < 9
    assert given.kwargs["h"].dtype == torch.float16
    assert given.kwargs["s"].shape == ()


def test_inputs_are_the_same_each_time() -> None:
    assert torch.equal(make_inputs(["4"], {}).args[0], make_inputs(["4"], {}).args[0])


def test_a_path_may_have_an_equals_sign() -> None:
    assert begins(["a.b=1"]) == {"a.b": 1}


def test_a_nested_name_is_found() -> None:
    assert find_callable("torch:nn.Linear") is nn.Linear
