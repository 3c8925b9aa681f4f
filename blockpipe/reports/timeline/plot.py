"""A step of a trace as a matplotlib figure. Nothing else here needs matplotlib."""

import importlib
from typing import Any

from ..._common.callsite import users_line
from ...errors import UsageError
from .trace import Trace

COLOURS = {"F": "#4878cf", "B": "#e1812c", "W": "#3a923a", "R": "#9372b2"}
NAMES = {"F": "forward", "B": "backward", "W": "weight gradients", "R": "recomputation"}


def plot(trace: Trace, step: int, ax: Any = None) -> Any:
    """Draw it; see :meth:`Timeline.plot`."""
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise UsageError(
            "plot() draws with matplotlib, which is not installed; pip install 'blockpipe[plot]', "
            f"or use to_html() or print(), which need nothing ({users_line()})"
        ) from error
    lanes = len(trace.lanes)
    if ax is None:
        _, ax = pyplot.subplots(figsize=(10, 1 + 0.5 * lanes), layout="constrained")
    scale = 1e3 if trace.unit else 1.0
    actions = trace.actions(step)
    begin = scale * min((e.start for e in actions), default=0.0)
    span = scale * trace.span(step)
    wide = 0.014 * (1 + len(str(max((e.microbatch for e in actions), default=0)))) * span
    for kind, colour in COLOURS.items():
        found = [e for e in actions if e.kind == kind]
        if not found:
            continue
        ax.barh(
            [e.lane for e in found],
            [scale * e.duration for e in found],
            left=[scale * e.start - begin for e in found],
            height=0.8,
            color=colour,
            edgecolor="white",
            linewidth=0.5,
            label=NAMES[kind],
        )
        for e in found:
            if scale * e.duration > 0.5 * wide:
                middle = scale * (e.start + e.end) / 2 - begin
                ax.text(middle, e.lane, str(e.microbatch), **_LABEL)
    ax.set_yticks(range(lanes), [lane.name for lane in trace.lanes])
    ax.set_ylim(lanes - 0.5, -0.5)
    ax.set_xlim(0, span or 1)
    ax.set_xlabel("ms" if trace.unit else "time, in units of the costs")
    ax.set_title(f"{trace.title}: {trace.bubble(step):.1%} bubble", loc="left", fontsize="medium")
    ax.spines[["top", "right"]].set_visible(False)
    if actions:
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, fontsize=8)
    return ax.figure


_LABEL: dict[str, Any] = {
    "ha": "center",
    "va": "center",
    "color": "white",
    "fontsize": 8,
    "clip_on": True,
}
