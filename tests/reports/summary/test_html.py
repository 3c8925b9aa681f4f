"""A summary as HTML."""

from html.parser import HTMLParser
from typing import Any

import torch
from torch import Tensor, nn

import blockpipe as bp

from .summarized import recorded


class Checked(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        assert not {name for name, _ in attrs} & {"src", "href", "onclick"}
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_name_is_on_one_line() -> None:
    """Line breaks and escape characters in a module's name change no table and no terminal."""
    net = nn.Module()
    net.add_module("a\n\x1b[2J\ud800", nn.Linear(4, 4))
    net.forward = lambda x: next(net.children())(x)  # type: ignore[assignment]
    recording = bp.record(net, torch.zeros(2, 4))
    name = r"a\n\x1b[2J\ud800"
    printed: list[str] = []
    bp.print_pipeline_stage_assignment_summary(recording, print_fn=printed.append)
    summary = recording.summary(depth=2)
    explained = recording.explain(next(call.path for call in recording.calls if call.path))
    for text in (str(summary), summary._repr_html_(), "".join(printed), explained):
        assert name in text
        assert text.replace("\n", "").isprintable()


def test_html_is_one_escaped_piece() -> None:
    """Tags close, nothing is loaded, no script; what comes from the user is text."""

    class Evil(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with bp.Block(1, name="<b>&"):
                return super().forward(x)

    Evil.__name__ = "<script>alert(1)</script>"
    summary = recorded(nn.Sequential(nn.Linear(8, 8), Evil(8, 8))).summary(["<i>"] * 2)
    html = summary._repr_html_()
    assert "<script" not in html
    parser = Checked()
    parser.feed(html)
    assert parser.open == []
    assert set(parser.seen) <= {
        "div",
        "style",
        "table",
        "tr",
        "th",
        "td",
        "span",
        "p",
        "br",
        "ul",
        "li",
    }
    assert "<script>alert(1)</script>" in parser.text
    for text in ("'<b>&'", "<i>", f"{summary.parameters:,}", *summary.notes):
        assert text in parser.text
