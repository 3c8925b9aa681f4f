"""Makes the pictures of these pages: ``python docs/make_pictures.py``.

Those of schedules are the same each time; those of a profile are of this machine. The picture of
the page needs chromium, and is left as it is without.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads: a thread for each stage

import shutil
import subprocess
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import torch
from torch import nn

import blockpipe as bp
from blockpipe.schedules import make_schedule

PICTURES = Path(__file__).parent / "pictures"


def pipelining() -> None:
    """A batch in one piece, and in six micro-batches, over three devices; gaps are the bubble."""
    figure, axes = plt.subplots(2, figsize=(10, 4), layout="constrained", sharex=True)
    whole = bp.Timeline.of(make_schedule("gpipe", [0, 1, 2], 1), bp.Costs(6, 12))
    parts = bp.Timeline.of(make_schedule("1f1b", [0, 1, 2], 6), bp.Costs(1, 2))
    titles = ("The batch in one piece", "The batch in six micro-batches")
    for timeline, title, ax in zip((whole, parts), titles, axes, strict=True):
        timeline.plot(ax)
        ax.set_title(f"{title}: {timeline.bubble():.0%} bubble", loc="left", fontsize="medium")
        ax.set_yticks(range(3), [f"device {lane}" for lane in range(3)])
        ax.set_xlim(0, 54)
        ax.label_outer()
    axes[-1].set_xlabel("time")
    axes[-1].set_xticks([])
    save(figure, "pipelining.png")


def schedules() -> None:
    """Four stages, eight micro-batches, under three schedules."""
    figure, axes = plt.subplots(3, figsize=(10, 7), layout="constrained", sharex=True)
    for name, ax in zip(("gpipe", "1f1b", "zb-h1"), axes, strict=True):
        bp.Timeline.of(make_schedule(name, [0, 1, 2, 3], 8)).plot(ax)
    for ax in axes:
        ax.set_xlim(0, 33)  # the longest: bubbles compare
        ax.label_outer()
    save(figure, "schedules.png")


def benchmarks() -> None:
    """The rows of 8 chunks of the table in benchmarks.md, as bars: the page has the figures."""
    text = (PICTURES.parent / "benchmarks.md").read_text().partition("### With recomputation")[0]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rows = [cells for cells in lines if cells[0].endswith(", 8") and cells[0] != "tiny, 8"]
    shown = {  # the columns of each, of which the best one counts
        "by hand": (3, 4),
        "Blockpipe": (5,),
        "torch.distributed.pipelining": (10,),
        "torchgpipe, patched or not": (6, 7),
        "fairscale, patched or not": (8, 9),
    }
    colours = ["#b0b0b0", "#4878cf", "#e1812c", "#3a923a", "#9372b2"]
    figure, ax = plt.subplots(figsize=(10, 3.5), layout="constrained")
    for number, ((name, columns), colour) in enumerate(zip(shown.items(), colours, strict=True)):
        values = [min(float(row[i].strip("*")) for i in columns) for row in rows]
        at = [row + 0.16 * (number - 2) for row in range(len(rows))]
        bars = ax.bar(at, values, 0.15, color=colour, label=name)
        ax.bar_label(bars, fmt="%.2f", fontsize=7)
    ax.axhline(1, color="black", linewidth=0.8)
    ax.set_xticks(range(len(rows)), [row[0].partition(",")[0] for row in rows])
    ax.set_title(
        "Time of a step, as a share of the plain loop's on one thread; less is better",
        loc="left",
        fontsize="medium",
    )
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    save(figure, "benchmarks.png")


def profile() -> bp.Timeline:
    """A real step on two CPU stages."""
    torch.manual_seed(0)
    stage = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(512, 512), nn.Tanh())))
    other = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(512, 512), nn.Tanh())))
    pipe = bp.Pipeline(
        bp.begin_blocks(nn.Sequential(stage, other), {"1": 1}), devices=["cpu"] * 2, chunks=8
    )
    x = torch.randn(8 * 128, 512)
    pipe.forward_backward(x, loss_fn=lambda out: out.square().mean())
    found = []
    for _ in range(100):
        with pipe.profile() as timeline:
            pipe.forward_backward(x, loss_fn=lambda out: out.square().mean())
        found.append(timeline)
    timeline = min(found, key=lambda t: t.step_time)  # where other processes were quiet
    save(timeline.plot(), "profile.png")
    print(timeline)
    return timeline


def save(figure: plt.Figure, name: str) -> None:
    """Write a figure: as SVG it would be five times the size."""
    figure.savefig(PICTURES / name, dpi=90)


def page(timeline: bp.Timeline, name: str) -> None:
    """A picture of the page, as a browser shows it."""
    browser = shutil.which("chromium")
    if browser is None:
        print(f"no chromium: {name} is left as it is")
        return
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        "--window-size=1000,610",
    ]
    with tempfile.TemporaryDirectory() as folder:
        timeline.to_html(f"{folder}/page.html")
        subprocess.run(
            [
                browser,
                *flags,
                f"--user-data-dir={folder}/profile",
                f"--screenshot={PICTURES / name}",
                f"file://{folder}/page.html",
            ],
            check=True,
            capture_output=True,
        )


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    pipelining()
    schedules()
    benchmarks()
    page(profile(), "page.png")
