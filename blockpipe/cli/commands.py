"""The commands of ``python -m blockpipe``: each a parser's options, and what is done with them.

A command returns what to print, as text and as data: :mod:`blockpipe.__main__` chooses.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..batches.losses import own_or_mean_square
from ..errors import MarkError, PlanError, ScheduleError, UsageError
from ..partitioning.balance import balance
from ..partitioning.balanced_plan import UNITS
from ..pipeline import Pipeline
from ..recording.plan_resolution import Planned
from ..recording.record import record
from ..recording.recording import Recording
from ..reports.summary.columns import COLUMNS
from ..reports.timeline.timeline import Timeline
from ..schedules.builders import SCHEDULES, make_schedule
from ..schedules.simulation import Costs, Simulation, simulate
from ..stages.marks import begin_blocks
from ..stages.plan import StagePlan
from .model_arguments import (
    MOST_DIGITS,
    CommandLineError,
    ModelInputs,
    begins,
    build_model,
    literals,
    make_inputs,
    whole_number,
)

MOST_ACTIONS = 100_000
"""Stages times micro-batches of a schedule that is played out: seconds of work."""


class CommandOutput(NamedTuple):
    """What a command found: to read, and to process."""

    text: str
    data: Any


Command = Callable[[argparse.Namespace], CommandOutput]


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add every command as a sub-parser; its function is the namespace's ``command``."""
    commands = parser.add_subparsers(dest="name", metavar="COMMAND", required=True)
    shared = _shared_options()
    of_a_model = _model_options()
    marks = _mark_options()

    def add(
        name: str, command: Command, help_: str, *parents: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name, help=help_, description=help_, parents=[*parents, shared], allow_abbrev=False
        )
        added.set_defaults(command=command)
        return added

    add_summary = add(
        "summary", _summary, "Print which stage holds what.", of_a_model, marks
    ).add_argument
    add_summary("--depth", type=_count, help="open modules down to this depth")
    add_summary("--columns", type=_columns, metavar="NAME,…", help="which columns, in which order")
    add_summary("--explain", metavar="PATH", help="say why this module is where it is, instead")

    add_plan = add(
        "plan", _plan, "Print which module call is on which stage.", of_a_model, marks
    ).add_argument
    add_plan("--save", metavar="FILE", type=Path, help="write the plan as JSON")

    add_balance = add("balance", _balance, "Find where to cut.", of_a_model).add_argument
    add_balance("--stages", type=_count, required=True, help="how many")
    add_balance(
        "--by", choices=tuple(UNITS), default="time", help="what is balanced (default: time)"
    )
    add_balance("--chunks", type=_count, default=8, help="micro-batches of a batch (default: 8)")
    add_balance("--limit", type=_bytes, help="memory of a device: 16GiB, say")
    add_balance("--estimate", action="store_true", help="do not run: estimate times")
    add_balance("--save", metavar="FILE", type=Path, help="write the plan as JSON")

    add_simulate = add("simulate", _simulate, "Play a schedule out, on paper.").add_argument
    add_simulate("--stages", type=_count, default=4, help="how many (default: 4)")
    add_simulate("--lanes", type=_numbers, metavar="N,…", help="each hop's lane: 0,1,1,0")
    add_simulate("--chunks", type=_count, default=8, help="micro-batches (default: 8)")
    add_simulate("--in-flight", type=_count, help="at most so many are under way at once")
    add_simulate(
        "--schedule",
        choices=[*SCHEDULES, "all"],
        default="1f1b",
        help="which (default: 1f1b); all: compare them",
    )
    for cost, default in (("forward", "1"), ("backward", "2"), ("weight", "1"), ("transfer", "0")):
        add_simulate(
            f"--{cost}",
            type=_times,
            default=default,
            metavar="TIME[,…]",
            help=f"of all hops, or of each (default: {default})",
        )
    add_simulate(
        "--save", metavar="FILE", type=_picture, help="the picture: .html, or .json (Chrome)"
    )

    add_trace = add(
        "trace", _trace, "Run a step, and show what happened when.", of_a_model, marks
    ).add_argument
    add_trace("--devices", type=_words, metavar="NAME,…", help="one for each stage (default: all)")
    add_trace("--chunks", type=_count, default=8, help="micro-batches (default: 8)")
    add_trace("--schedule", choices=[*SCHEDULES, "auto", "uncut"], default="1f1b")
    add_trace("--steps", type=_count, default=1, help="after two that are not shown (default: 1)")
    add_trace("--save", metavar="FILE", type=_picture, help="the picture: .html, or .json (Chrome)")


def _shared_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    return parser


def _model_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add(
        "model", metavar="MODULE:CALLABLE", help="what makes the model: torchvision.models:resnet50"
    )
    add(
        "--input",
        action="append",
        default=[],
        metavar="[NAME=]SIZES[:DTYPE[:HIGH]]",
        help="a tensor of the batch: 8,3,224,224 or input_ids=4,128:int64:1000; repeat for more",
    )
    add(
        "--argument",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another keyword argument of the forward",
    )
    add(
        "--model-argument",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a keyword argument of the callable: weights=None",
    )
    add("--eval", action="store_true", help="in evaluation mode, without gradients")
    return parser


def _mark_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--begin",
        action="append",
        default=[],
        metavar="PATH=STAGE",
        help="a stage begins at this module: layer3=1; repeat for more",
    )
    group.add_argument(
        "--layout", type=_layout, metavar="TEXT", help="a plan's layout: 'layer3=1, layer4=2'"
    )
    group.add_argument("--plan", metavar="FILE", type=Path, help="a plan as JSON")
    return parser


# --- the commands


def _summary(options: argparse.Namespace) -> CommandOutput:
    recording = _recorded(options)
    if options.explain is not None:
        try:
            text = recording.explain(options.explain)
        except UsageError as error:
            raise CommandLineError(str(error)) from error
        return CommandOutput(text, {"path": options.explain, "why": text})
    summary = recording.summary(depth=options.depth, columns=options.columns)
    return CommandOutput(str(summary), summary.to_dict())


def _plan(options: argparse.Namespace) -> CommandOutput:
    recording = _recorded(options)
    plan = recording.plan
    _save_plan(plan, options.save)
    return CommandOutput(f"{plan}\n\nlayout: {plan.layout}", json.loads(plan.to_json()))


def _balance(options: argparse.Namespace) -> CommandOutput:
    measured = options.by == "time" and not options.estimate
    _check_actions(options.stages, options.chunks)
    model, given = _model_and_inputs(options, meta=not measured)
    plan = balance(
        model,
        given.args,
        options.stages,
        by=options.by,
        kwargs=given.kwargs,
        chunks=options.chunks,
        limits=options.limit,
        measure=measured,
        training=not options.eval,
    )
    _save_plan(plan, options.save)
    return CommandOutput(f"{plan}\n\n{plan.marks()}", plan.to_dict())


def _simulate(options: argparse.Namespace) -> CommandOutput:
    costs = Costs(options.forward, options.backward, options.weight, options.transfer)
    lanes = options.lanes or range(options.stages)
    _check_actions(len(lanes), options.chunks)
    names = SCHEDULES if options.schedule == "all" else (options.schedule,)
    played: list[Simulation] = []
    why_not: ScheduleError | None = None
    for name in names:
        try:
            made = make_schedule(
                name, lanes, options.chunks, in_flight=options.in_flight, costs=costs
            )
            played.append(simulate(made, costs))
        except ScheduleError as error:
            why_not = error  # it is not for these lanes
    if why_not is not None and (options.schedule != "all" or not played):
        raise CommandLineError(str(why_not)) from why_not  # there are only words to be wrong
    data = [
        {
            "schedule": s.schedule.name,
            "makespan": s.makespan,
            "bubble": s.bubble,
            "busy": s.busy,
            "peak": s.peak,
        }
        for s in played
    ]
    if options.schedule == "all":
        head = "schedule       makespan   bubble   peak"
        rows = [
            f"{s.schedule.name:<13}{s.makespan:>10.4g}{100 * s.bubble:>7.1f} %{max(s.peak):>7.4g}"
            for s in played
        ]
        if options.save is not None:
            raise CommandLineError("--save is of one schedule; name it instead of 'all'")
        return CommandOutput("\n".join([head, *rows]), data)
    timeline = Timeline.of(played[0].schedule, costs)
    _save_picture(timeline, options.save)
    return CommandOutput(str(timeline), data[0])


def _trace(options: argparse.Namespace) -> CommandOutput:
    model, given = _model_and_inputs(options, meta=False)
    plan = _marked(model, options)
    pipe = Pipeline(
        model,
        devices=options.devices,
        chunks=options.chunks,
        schedule=options.schedule,
        plan=plan,
    )

    def step() -> None:
        if options.eval:
            with torch.no_grad():
                pipe(*given.args, **given.kwargs)
        else:
            pipe.forward_backward(*given.args, loss_fn=own_or_mean_square, **given.kwargs)
            model.zero_grad()

    with pipe:
        for _ in range(2):
            step()
        with pipe.profile() as timeline:
            for _ in range(options.steps):
                step()
    _save_picture(timeline, options.save)
    return CommandOutput(str(timeline), timeline.to_dict())


# --- what they share


def _check_actions(stages: int, chunks: int) -> None:
    if stages * chunks > MOST_ACTIONS:
        raise CommandLineError(
            f"stages times chunks is {MOST_ACTIONS:,} at the most, but {stages:,} and {chunks:,} "
            "came; play a larger schedule out from Python, by blockpipe.simulate"
        )


def _recorded(options: argparse.Namespace) -> Recording:
    model, given = _model_and_inputs(options, meta=True)
    plan = _marked(model, options)
    with torch.set_grad_enabled(not options.eval):
        recording = record(model, given.args, given.kwargs, plan=plan)
    recording.check()
    return recording


def _model_and_inputs(options: argparse.Namespace, *, meta: bool) -> tuple[nn.Module, ModelInputs]:
    given = make_inputs(options.input, literals(options.argument, "--argument"))
    if not given.args and not given.kwargs:
        raise CommandLineError("a forward needs an input; pass --input 8,3,224,224, say")
    arguments = literals(options.model_argument, "--model-argument")
    model = build_model(options.model, arguments, meta=meta)
    return model.train(not options.eval), given


def _marked(model: nn.Module, options: argparse.Namespace) -> StagePlan | None:
    """The plan that was asked for; marks are put on the model."""
    layout: StagePlan | None = options.layout
    try:
        if options.begin:
            begin_blocks(model, begins(options.begin))
        if layout is not None:
            Planned(model, layout)  # are the modules there?
    except (MarkError, PlanError) as error:
        raise CommandLineError(str(error)) from error
    return layout if options.plan is None else StagePlan.load(options.plan)


def _save_plan(plan: StagePlan, path: Path | None) -> None:
    if path is not None:
        plan.save(path)


def _save_picture(timeline: Timeline, path: Path | None) -> None:
    if path is not None:
        (timeline.to_html if path.suffix == ".html" else timeline.to_chrome)(path)


# --- types of options: argparse prints what is wrong with them


def _picture(text: str) -> Path:
    if Path(text).suffix not in (".html", ".json"):
        raise argparse.ArgumentTypeError(f"a .html file or a .json one, not {text!r}")
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(Path(text).parent)!r}")
    return Path(text)


def _count(text: str) -> int:
    number = whole_number(text)
    if not number:
        raise argparse.ArgumentTypeError(
            f"a whole number from 1 on, of {MOST_DIGITS} digits at the most, not {text[:100]!r}"
        )
    return number


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _columns(text: str) -> list[str]:
    names = _words(text)
    known = [name for name in COLUMNS if name != "device"]  # a summary here is of no devices
    if not names or not set(names) <= set(known):
        raise argparse.ArgumentTypeError(f"names out of {', '.join(known)}, not {text!r}")
    return names


def _layout(text: str) -> StagePlan:
    try:
        return StagePlan.from_layout(text)
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _numbers(text: str) -> list[int]:
    numbers = [whole_number(word) for word in _words(text)]
    if not numbers or None in numbers:
        raise argparse.ArgumentTypeError(f"whole numbers such as 0,1,1,0, not {text[:100]!r}")
    return [number for number in numbers if number is not None]


def _times(text: str) -> float | Sequence[float]:
    try:
        numbers = [float(word) for word in _words(text)]
    except ValueError:
        numbers = []
    if not numbers:
        raise argparse.ArgumentTypeError(f"a number, or one for each hop (1,1,2), not {text!r}")
    return numbers[0] if len(numbers) == 1 else numbers


_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _bytes(text: str) -> int:
    number = text.rstrip("BiKMGTbkmgt")
    unit = text[len(number) :].upper().removesuffix("B").removesuffix("I")
    try:
        size = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        size = -1
    if size < 0:
        raise argparse.ArgumentTypeError(f"a size such as 16GiB or 800M, not {text!r}")
    return size
