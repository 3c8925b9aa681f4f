"""Numbers and tables as text. No dependency formats them: a table here is a few lines."""

from __future__ import annotations

_BAR = 16  # characters
_MOST_OF_KEY = 60  # characters


def bytes_text(count: int) -> str:
    """Return a size in bytes as people read it."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError  # the loop ends at GiB


def flops_text(count: float) -> str:
    """Return a number of floating-point operations with its prefix.

    Example:
        >>> flops_text(3.6e9), flops_text(0)
        ('3.60 G', '0')
    """
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f}"


def milliseconds_text(seconds: float) -> str:
    """Return a time in milliseconds with three digits, or all before the point.

    Example:
        >>> milliseconds_text(0.0012345), milliseconds_text(12.3456)
        ('1.23', '12,346')
    """
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def seconds_text(seconds: float) -> str:
    """Return a time with three digits and its unit.

    Example:
        >>> seconds_text(1.5), seconds_text(0.0123), seconds_text(4.2e-6)
        ('1.5 s', '12.3 ms', '4.2 µs')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def dtype_text(dtype: object) -> str:
    """Return the name of a ``torch.dtype`` without its module.

    Example:
        >>> dtype_text("torch.float32")
        'float32'
    """
    return str(dtype).removeprefix("torch.")


def stages_text(stages: list[int]) -> str:
    """Return stages as a list, or as a range if they are one."""
    if len(stages) > 2 and stages == list(range(stages[0], stages[-1] + 1)):
        return f"{stages[0]}-{stages[-1]}"
    return ", ".join(map(str, stages))


def one_line(text: str) -> str:
    """Return a foreign name on one line, with unprintable characters as Python escapes them.

    A module's name may be any text. A line break in it would begin a line of a table, or of code
    that is printed to be pasted; an escape character would speak to the terminal.

    Example:
        >>> one_line("layer\\n3 ü")
        'layer\\\\n3 ü'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def key_text(key: object) -> str:
    """Return a key's text on one line, and shortened: a module's own is a page.

    Example:
        >>> key_text("a" * 99)
        "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…"
    """
    text = " ".join(repr(key).split())
    return text if len(text) <= _MOST_OF_KEY else f"{text[: _MOST_OF_KEY - 1]}…"


def short(where: str) -> str:
    """Return a file and line without the directories."""
    return where.rpartition("/")[2]


def bar(share: float) -> str:
    """Return a number from 0 to 1 as a bar.

    Example:
        >>> bar(0.5)
        '████████░░░░░░░░'
    """
    full = round(_BAR * share)
    return "█" * full + "░" * (_BAR - full)


def text_table(head: list[str], rows: list[list[str]], left: int) -> str:
    """Return a table.

    Args:
        head: the titles of the columns.
        rows: the cells of each row.
        left: the number of columns that are aligned to the left; the others are to the right.
    """
    head, *rows = [list(map(one_line, row)) for row in (head, *rows)]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(cells: list[str]) -> str:
        return "  ".join(
            f"{c:<{w}}" if i < left else f"{c:>{w}}"
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([line(head), rule, *(line(row) for row in rows)])
