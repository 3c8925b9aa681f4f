"""Numbers and tables as text. No dependency formats them: a table here is a few lines."""

from __future__ import annotations

_BAR = 16  # characters


def bytes_text(count: int) -> str:
    """A size as people read it."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError  # the loop ends at GiB


def flops_text(count: float) -> str:
    """Floating-point operations, with the prefixes of the field.

    Example:
        >>> flops_text(3.6e9), flops_text(0)
        ('3.60 G', '0')
    """
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f}"


def milliseconds_text(seconds: float) -> str:
    """Three digits, or all before the point.

    Example:
        >>> milliseconds_text(0.0012345), milliseconds_text(12.3456)
        ('1.23', '12,346')
    """
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def stages_text(stages: list[int]) -> str:
    """Stages as a range where they are one."""
    if len(stages) > 2 and stages == list(range(stages[0], stages[-1] + 1)):
        return f"{stages[0]}-{stages[-1]}"
    return ", ".join(map(str, stages))


def one_line(text: str) -> str:
    """A name from elsewhere on one line: what cannot be printed is written as Python escapes it.

    A module's name may be any text. A line break in it would begin a line of a table, or of code
    that is printed to be pasted; an escape character would speak to the terminal.

    Example:
        >>> one_line("layer\\n3 ü")
        'layer\\\\n3 ü'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def short(where: str) -> str:
    """A file and line without the directories."""
    return where.rpartition("/")[2]


def bar(share: float) -> str:
    """A number from 0 to 1 as a bar.

    Example:
        >>> bar(0.5)
        '████████░░░░░░░░'
    """
    full = round(_BAR * share)
    return "█" * full + "░" * (_BAR - full)


def text_table(head: list[str], rows: list[list[str]], left: int) -> str:
    """Columns as wide as they need; the first ``left`` to the left, the rest to the right."""
    head, *rows = [list(map(one_line, row)) for row in (head, *rows)]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(cells: list[str]) -> str:
        return "  ".join(
            f"{c:<{w}}" if i < left else f"{c:>{w}}"
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([line(head), rule, *(line(row) for row in rows)])
