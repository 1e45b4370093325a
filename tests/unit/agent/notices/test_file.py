"""Notices from a file."""

from __future__ import annotations

import pytest

from shoal.agent.notices.file import file_notice


@pytest.mark.parametrize(
    ("body", "within_s", "detail"),
    [("", 30.0, "the file appeared"), ("90", 90.0, "the file appeared"), ("90 time limit", 90.0, "time limit"),
     ("time limit", 30.0, "time limit"), ("-5 late", 0.0, "late")],
)  # fmt: skip
def test_file_may_have_a_deadline_and_a_reason(body, within_s, detail):
    notice = file_notice(body, "1")
    assert (notice.within_s, notice.detail) == (within_s, detail)
