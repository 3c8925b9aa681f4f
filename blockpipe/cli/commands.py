"""The commands of ``python -m blockpipe``: for each, the options of its parser and a function.

A command returns its output as text and as data: :mod:`blockpipe.__main__` chooses.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from .._common.text import text_table
from ..batches.losses import own_or_mean_square
from ..errors import MarkError, PlanError, ScheduleError, UsageError
from ..partitioning.balance import balance
from ..partitioning.balanced_plan import UNITS
from ..pipeline import Pipeline
from ..recording.plan_resolution import Planned
from ..recording.record import record
from ..recording.recording import Recording
from ..reports.timeline.timeline import Timeline
from ..schedules.builders import SCHEDULES, make_schedule
from ..schedules.simulation import Costs, Simulation, simulate
from ..stages.marks import begin_blocks
from ..stages.plan import StagePlan
from .model_arguments import (
    CommandLineError,
    ModelInputs,
    begins,
    build_model,
    literals,
    make_inputs,
)
from .option_types import byte_count, columns, count, integers, layout, picture, times, words

MOST_ACTIONS = 100_000
"""The most stages times micro-batches of a schedule that is played out: seconds of work."""


class CommandOutput(NamedTuple):
    """The output of a command: text to read, and data to process."""

    text: str
    data: Any


Command = Callable[[argparse.Namespace], CommandOutput]


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add every command as a sub-parser; its function is the namespace's ``command``."""
    commands = parser.add_subparsers(dest="name", metavar="COMMAND", required=True)
    shared, of_a_model, marks = _shared_options(), _model_options(), _mark_options()

    def add(
        name: str, command: Command, help_: str, *parents: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name, help=help_, description=help_, parents=[*parents, shared], allow_abbrev=False
        )
        added.set_defaults(command=command)
        return added

    _add_summary_options(
        add("summary", _summary, "Print the stages and their modules.", of_a_model, marks)
    )
    _add_plan_options(add("plan", _plan, "Print the stage of each module call.", of_a_model, marks))
    _add_balance_options(add("balance", _balance, "Find where to cut a model.", of_a_model))
    _add_simulate_options(add("simulate", _simulate, "Play a schedule out without a model."))
    _add_trace_options(add("trace", _trace, "Run a step and show its timeline.", of_a_model, marks))


def _add_summary_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--depth", type=count, help="open modules down to this depth")
    add("--columns", type=columns, metavar="NAME,…", help="the columns, in their order")
    add("--explain", metavar="PATH", help="say why this module is where it is, instead")


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--save", metavar="FILE", type=Path, help="write the plan as JSON")


def _add_balance_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--stages", type=count, required=True, help="the number of stages")
    add("--by", choices=tuple(UNITS), default="time", help="the balanced cost (default: time)")
    add("--chunks", type=count, default=8, help="micro-batches of a batch (default: 8)")
    add("--limit", type=byte_count, help="memory of a device, such as 16GiB")
    add("--estimate", action="store_true", help="estimate times without a run")
    add("--save", metavar="FILE", type=Path, help="write the plan as JSON")


def _add_simulate_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--stages", type=count, default=4, help="the number of stages (default: 4)")
    add("--lanes", type=integers, metavar="N,…", help="the lane of each hop, such as 0,1,1,0")
    add("--chunks", type=count, default=8, help="micro-batches (default: 8)")
    add("--in-flight", type=count, help="the most micro-batches that are under way at once")
    add(
        "--schedule",
        choices=[*SCHEDULES, "all"],
        default="1f1b",
        help="the schedule (default: 1f1b); all compares them",
    )
    for cost, default in (("forward", "1"), ("backward", "2"), ("weight", "1"), ("transfer", "0")):
        add(
            f"--{cost}",
            type=times,
            default=default,
            metavar="TIME[,…]",
            help=f"its time on all hops, or on each (default: {default})",
        )
    add("--save", metavar="FILE", type=picture, help="the picture: .html, or .json (Chrome)")


def _add_trace_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--devices", type=words, metavar="NAME,…", help="one for each stage (default: all)")
    add("--chunks", type=count, default=8, help="micro-batches (default: 8)")
    add("--schedule", choices=[*SCHEDULES, "auto", "uncut"], default="1f1b")
    add("--steps", type=count, default=1, help="steps after two that warm up (default: 1)")
    add("--save", metavar="FILE", type=picture, help="the picture: .html, or .json (Chrome)")


def _shared_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    return parser


def _model_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add("model", metavar="MODULE:CALLABLE", help="makes the model: torchvision.models:resnet50")
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
        "--layout", type=layout, metavar="TEXT", help="a plan's layout: 'layer3=1, layer4=2'"
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
    if options.schedule != "all":
        (played,) = _played([options.schedule], lanes, options, costs)
        timeline = Timeline.of(played.schedule, costs)
        _save_picture(timeline, options.save)
        return CommandOutput(str(timeline), _figures(played))
    if options.save is not None:
        raise CommandLineError("--save writes one schedule; name it instead of 'all'")
    compared = _played(SCHEDULES, lanes, options, costs)
    rows = [
        [s.schedule.name, f"{s.makespan:.4g}", f"{100 * s.bubble:.1f} %", f"{max(s.peak):.4g}"]
        for s in compared
    ]
    table = text_table(["Schedule", "Makespan", "Bubble", "Peak"], rows, left=1)
    return CommandOutput(table, [_figures(s) for s in compared])


def _played(
    names: Sequence[str], lanes: Sequence[int], options: argparse.Namespace, costs: Costs
) -> list[Simulation]:
    """Play schedules out; of several, those that exist for these lanes.

    Raises:
        CommandLineError: none can be played out.
    """
    played: list[Simulation] = []
    why_not: ScheduleError | None = None
    for name in names:
        try:
            made = make_schedule(
                name, lanes, options.chunks, in_flight=options.in_flight, costs=costs
            )
            played.append(simulate(made, costs))
        except ScheduleError as error:
            why_not = error
    if not played:
        raise CommandLineError(str(why_not)) from why_not  # the words alone can be wrong
    return played


def _figures(played: Simulation) -> dict[str, Any]:
    return {
        "schedule": played.schedule.name,
        "makespan": played.makespan,
        "bubble": played.bubble,
        "busy": played.busy,
        "peak": played.peak,
    }


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


# --- shared by commands


def _check_actions(stages: int, chunks: int) -> None:
    if stages * chunks > MOST_ACTIONS:
        raise CommandLineError(
            f"expected at most {MOST_ACTIONS:,} for stages times chunks, got {stages:,} times "
            f"{chunks:,}; play a larger schedule out from Python, by blockpipe.simulate"
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
        raise CommandLineError("the forward needs an input; pass --input 8,3,224,224, for example")
    arguments = literals(options.model_argument, "--model-argument")
    model = build_model(options.model, arguments, meta=meta)
    return model.train(not options.eval), given


def _marked(model: nn.Module, options: argparse.Namespace) -> StagePlan | None:
    """Return the plan of the options; or mark the model."""
    given: StagePlan | None = options.layout
    try:
        if options.begin:
            begin_blocks(model, begins(options.begin))
        if given is not None:
            Planned(model, given)  # raises if a module is missing
    except (MarkError, PlanError) as error:
        raise CommandLineError(str(error)) from error
    return given if options.plan is None else StagePlan.load(options.plan)


def _save_plan(plan: StagePlan, path: Path | None) -> None:
    if path is not None:
        plan.save(path)


def _save_picture(timeline: Timeline, path: Path | None) -> None:
    if path is not None:
        (timeline.to_html if path.suffix == ".html" else timeline.to_chrome)(path)
