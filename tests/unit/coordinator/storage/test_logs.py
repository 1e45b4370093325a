"""The lines that members printed come back whole, from wherever one begins to read."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from shoal.coordinator.storage.logs import ALL, MAX_PAGE_BYTES, Logs, page

LINE = "x" * 90


def write(directory: Path, count: int) -> None:
    logs = Logs(directory)
    logs.append("r", "a/0", [f"{number:06d} {LINE}" for number in range(count)])
    logs.close()


@pytest.mark.parametrize("member", ["", "a/0"])
@pytest.mark.parametrize("count", [1, 999, 1000, 45_000, 60_000, 70_000])
def test_last_lines_are_complete_and_as_many_as_requested(tmp_path: Path, member: str, count: int) -> None:
    total = 60_000
    write(tmp_path, total)
    assert (tmp_path / "runs" / "r" / "logs" / f"{ALL}.log").stat().st_size > MAX_PAGE_BYTES
    found = page(tmp_path, "r", member, -count, 1)
    assert found.lines == (("a/0", f"{max(0, total - count):06d} {LINE}"),)


def test_next_page_starts_where_the_last_one_ended(tmp_path: Path) -> None:
    write(tmp_path, 10)
    first = page(tmp_path, "r", limit=4)
    then = page(tmp_path, "r", after=first.next)
    assert [text[:6] for _, text in (*first.lines, *then.lines)] == [f"{number:06d}" for number in range(10)]
    assert page(tmp_path, "r", after=then.next).lines == ()


def test_line_that_does_not_fit_on_the_disk_leaves_no_fragment(tmp_path: Path) -> None:
    logs, (soft, hard) = Logs(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    logs.append("r", "a/0", ["before"])
    size = (tmp_path / "runs" / "r" / "logs" / f"{ALL}.log").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, hard))
    try:
        with pytest.raises(OSError, match=r"No space left|too large"):
            logs.append("r", "a/0", ["y" * 2000])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    logs.append("r", "a/0", ["after"])
    logs.close()
    for member in ("", "a/0"):
        assert page(tmp_path, "r", member).lines == (("a/0", "before"), ("a/0", "after"))
