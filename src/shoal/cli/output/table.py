"""Text columns, and short forms of times, counts, sizes and shares; the standard library is enough."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

# All of Unicode's control characters but tab and line feed.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return left-aligned columns under a head in capitals."""
    lines = [[title.upper() for title in head], *[list(row) for row in rows]]
    widths = [max(len(line[index]) for line in lines) for index in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def span(seconds: float) -> str:
    """Return a short form of a time span: 21 ms, 4.2 s, 3 min 5 s, 2 h 10 min."""
    if seconds < 0.9995:
        return f"{max(0.0, seconds) * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def rough(seconds: float) -> str:
    """Return a time span as one says an estimate: 45 s, 12 min, 1 h 40 min, 3 d 4 h."""
    if seconds < 90:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return span(round(seconds / 600) * 600)


def short(seconds: float) -> str:
    """Return a time span to a tenth of a millisecond: 0.3 ms, 21 ms, 4.2 s."""
    return f"{max(0.0, seconds) * 1000:.1f} ms" if seconds < 0.00995 else span(seconds)


def moment(at: float, now: float) -> str:
    """Return a local time of day, with the date unless it is today's: 14:03:22, 2026-11-16 14:03."""
    local = time.localtime(at)
    is_today = local[:3] == time.localtime(now)[:3]
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M", local)


def percent(part: float) -> str:
    """Return a fraction in percent: 0.4 %, 37 %."""
    return f"{100 * part:.0f} %" if part >= 0.0995 or part == 0 else f"{100 * part:.1f} %"


def count(number: int | float) -> str:
    """Return a number in groups of three digits: 4 318."""
    return f"{number:,.0f}".replace(",", " ")


def size(number_bytes: float) -> str:
    """Return a size in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number_bytes < 1024 or unit == "TiB":
            return f"{number_bytes:.0f} {unit}" if unit == "B" else f"{number_bytes:.1f} {unit}"
        number_bytes /= 1024
    raise AssertionError("unreachable")


def printable(text: str) -> str:
    """Return a text that others may have written with its control characters made visible, such as \\x1b for ESC.

    Names, reasons and errors come from other users of a coordinator; a terminal must not obey what they contain.
    """
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
