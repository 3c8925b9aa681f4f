"""A step of a trace as a matplotlib figure. Nothing else in the package needs matplotlib."""

import importlib
from typing import Any

from ..._common.callsite import users_line
from ...errors import UsageError
from .trace import Event, Trace

COLOURS = {"F": "#4878cf", "B": "#e1812c", "W": "#3a923a", "R": "#9372b2"}
NAMES = {"F": "forward", "B": "backward", "W": "weight gradients", "R": "recomputation"}


def plot(trace: Trace, step: int, ax: Any = None) -> Any:
    """Draw a step, and return the figure; see :meth:`Timeline.plot`."""
    lanes = len(trace.lanes)
    if ax is None:
        figsize = (10, 1 + 0.5 * lanes)
        _, ax = _pyplot().subplots(figsize=figsize, layout="constrained")
    actions = trace.actions(step)
    _draw_bars(ax, trace, step, actions)
    ax.set_yticks(range(lanes), [lane.name for lane in trace.lanes])
    ax.set_ylim(lanes - 0.5, -0.5)
    ax.set_xlim(0, _scale(trace) * trace.span(step) or 1)
    ax.set_xlabel("ms" if trace.unit else "time, in units of the costs")
    ax.set_title(f"{trace.title}: {trace.bubble(step):.1%} bubble", loc="left", fontsize="medium")
    ax.spines[["top", "right"]].set_visible(False)
    if actions:
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, fontsize=8)
    return ax.figure


def _pyplot() -> Any:
    try:
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise UsageError(
            f"plot() draws with matplotlib, which is not installed ({users_line()}); "
            "pip install 'blockpipe[plot]', or use to_html() or print(), which do not need it"
        ) from error


def _scale(trace: Trace) -> float:
    return 1e3 if trace.unit else 1.0  # seconds are shown as milliseconds


def _draw_bars(ax: Any, trace: Trace, step: int, actions: list[Event]) -> None:
    """Draw a bar for each action, with the micro-batch's number where it fits."""
    scale = _scale(trace)
    begin = scale * min((e.start for e in actions), default=0.0)
    digits = len(str(max((e.microbatch for e in actions), default=0)))
    label_width = 0.014 * (1 + digits) * scale * trace.span(step)
    for kind, colour in COLOURS.items():
        events = [e for e in actions if e.kind == kind]
        if not events:
            continue
        ax.barh(
            [e.lane for e in events],
            [scale * e.duration for e in events],
            left=[scale * e.start - begin for e in events],
            height=0.8,
            color=colour,
            edgecolor="white",
            linewidth=0.5,
            label=NAMES[kind],
        )
        for e in events:
            if scale * e.duration > 0.5 * label_width:
                middle = scale * (e.start + e.end) / 2 - begin
                ax.text(middle, e.lane, str(e.microbatch), **_LABEL)


_LABEL: dict[str, Any] = {
    "ha": "center",
    "va": "center",
    "color": "white",
    "fontsize": 8,
    "clip_on": True,
}
