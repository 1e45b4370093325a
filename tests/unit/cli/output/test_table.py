"""Short forms of times, shares and sizes."""

from __future__ import annotations

import pytest

from shoal.cli.output import table


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0213, "21 ms"),
        (4.25, "4.2 s"),
        (59.97, "1 min 0 s"),
        (185, "3 min 5 s"),
        (7800, "2 h 10 min"),
        (2e5, "2 d 7 h"),
    ],
)
def test_time_spans_have_short_forms(seconds: float, text: str) -> None:
    assert table.span(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0, "0.0 ms"), (0.00034, "0.3 ms"), (0.0099, "9.9 ms"), (0.00996, "10 ms"), (0.4, "400 ms"), (2.5, "2.5 s")],
)
def test_parts_of_steps_have_short_forms(seconds: float, shown: str) -> None:
    assert table.short(seconds) == shown


@pytest.mark.parametrize(("part", "shown"), [(0.0, "0 %"), (0.004, "0.4 %"), (0.099, "9.9 %"), (0.376, "38 %")])
def test_fractions_are_shown_in_percent(part: float, shown: str) -> None:
    assert table.percent(part) == shown


def test_columns_are_aligned_under_their_heads() -> None:
    assert table.columns(("a", "long"), [("x", "1"), ("yyy", "")]) == "A    LONG\nx    1\nyyy"


def test_control_characters_of_others_are_made_visible() -> None:
    assert table.printable("a\x1b[2Jb\x9bc\rd\x7f") == r"a\x1b[2Jb\x9bc\x0dd\x7f"
    assert table.printable("two\tcells\nand a line · 4 %") == "two\tcells\nand a line · 4 %"
