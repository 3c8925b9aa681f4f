"""A trace as an interactive page: one file that contains everything and needs no network.

The page is ``timeline.html`` beside this file, with the data inserted as JSON. A plotting library
from the web would not work offline, and an included one would be larger than the page.
"""

import html
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from ..._common.text import one_line
from .trace import Trace, runs


def page(views: Sequence[Trace]) -> str:
    """Return the page for several views of the same steps: the measured one, and predictions.

    Args:
        views: the views; the page opens with the first.
    """
    data = json.dumps([_view(view) for view in views], separators=(",", ":"))
    title = html.escape(one_line(views[0].title or "timeline"))
    template = files(__package__).joinpath("timeline.html").read_text(encoding="utf-8")
    # Only "</script" and "<!--" could end the script, so "<" is escaped.
    head, _, rest = template.partition("__TITLE__")
    between, _, end = rest.partition("__DATA__")
    return f"{head}{title}{between}{data.replace('<', chr(92) + 'u003c')}{end}"


def frame(document: str, *, lanes: int) -> str:
    """Return the page in a frame for a notebook, which keeps its styles and keys inside."""
    height = min(900, 420 + 62 * lanes)
    return (
        f'<iframe title="timeline" srcdoc="{html.escape(document)}" sandbox="allow-scripts" '
        f'style="width:100%;height:{height}px;border:0"></iframe>'
    )


def _view(trace: Trace) -> dict[str, Any]:
    found = trace.to_dict()
    index = {id(event): n for n, event in enumerate(trace.events)}
    found["events"] = [list(event) for event in trace.events]
    found["runs"] = [(index[id(a)], index[id(b)]) for a, b in runs(trace.events)]
    return found
