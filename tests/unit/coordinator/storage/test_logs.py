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


def test_full_log_is_rotated_and_a_follower_misses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.coordinator.storage.logs.MAX_FILE_BYTES", 1000)
    logs, at, seen = Logs(tmp_path), 0, list[str]()
    for number in range(200):
        logs.append("r", "a/0", [f"{number:06d}"])
        if number % 20 == 0:
            while (now := page(tmp_path, "r", after=at)).lines:
                at = now.next
                seen += [text for _, text in now.lines]
    assert seen == [f"{number:06d}" for number in range(181)]
    folder = tmp_path / "runs" / "r" / "logs"
    assert sum(file.stat().st_size for file in folder.glob("all.log*")) <= 2000
    last = page(tmp_path, "r", after=-100).lines
    assert [text for _, text in last] == [f"{number:06d}" for number in range(100, 200)]
    assert page(tmp_path, "r", after=-5).lines[-1] == ("a/0", "000199")
    first = page(tmp_path, "r").lines
    assert first[0][1] > "000000", "the oldest lines are gone"
    logs.close()


def test_log_does_not_use_the_reserve_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.coordinator.storage.disk_reserve.RESERVED_BYTES", 1 << 60)
    with pytest.raises(OSError, match="reserved for the journal"):
        Logs(tmp_path).append("r", "a/0", ["x"])


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.coordinator.storage.logs.MAX_OPEN", 4)
    logs = Logs(tmp_path)
    for number in range(20):
        logs.append("r", f"a/{number}", ["x"])
    assert len(logs._files) == 4
    assert len(page(tmp_path, "r").lines) == 20
    logs.close()


def test_members_whose_names_differ_only_in_letters_of_other_alphabets_have_logs_of_their_own(tmp_path: Path) -> None:
    members = ("機械/0", "電脳/0", "all", "a" * 300, "a" * 301, "lab-1/0")
    logs = Logs(tmp_path)
    for member in members:
        logs.append("r", member, [f"I am {member}"])
    logs.close()
    for member in members:
        assert page(tmp_path, "r", member).lines == ((member, f"I am {member}"),)
    assert len(page(tmp_path, "r").lines) == len(members)
    assert (tmp_path / "runs" / "r" / "logs" / "lab-1_0.log").exists()
