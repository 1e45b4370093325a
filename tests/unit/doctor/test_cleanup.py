"""Removal of the directories of ended coordinators."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from tests.unit.directories import ended_coordinator

from shoal.doctor import cleanup
from shoal.errors import RunStillActive
from shoal.launch import run_lookup
from shoal.store import journal, sqlite_views


def test_only_old_directories_are_found_oldest_first(tmp_path: Path) -> None:
    ended_coordinator(tmp_path, "b", 3000.0)
    ended_coordinator(tmp_path, "a", 2000.0)
    ended_coordinator(tmp_path, "new", 9000.0)
    (tmp_path / "coordinators" / "starting").mkdir()
    found = cleanup.find_old(tmp_path, 5000.0, now=10000.0)
    assert [old.runs for old in found] == [("run-a",), ("run-b",)]
    assert all(old.size_bytes > 100 for old in found)
    assert cleanup.find_old(tmp_path / "none", 0.0) == []


def test_removed_directory_is_gone_and_the_others_stay(tmp_path: Path) -> None:
    first, second = ended_coordinator(tmp_path, "a"), ended_coordinator(tmp_path, "b")
    cleanup.remove(first)
    assert not first.exists()
    assert second.exists()


def test_locked_directory_is_neither_found_nor_removed(tmp_path: Path) -> None:
    directory = ended_coordinator(tmp_path, "a")
    with (directory / journal.LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cleanup.find_old(tmp_path, 0.0) == []
        with pytest.raises(RunStillActive, match="shoal stop"):
            cleanup.remove(directory)
    assert (directory / journal.FILE).exists()


def test_directory_with_a_living_supervisor_is_neither_found_nor_removed(tmp_path: Path) -> None:
    directory = ended_coordinator(tmp_path, "a")
    (directory / run_lookup.SUPERVISOR_FILE).write_text(f"{os.getppid()}\n")
    assert cleanup.find_old(tmp_path, 0.0) == []
    with pytest.raises(RunStillActive):
        cleanup.remove(directory)


def test_directory_with_unreadable_records_is_found_without_names(tmp_path: Path) -> None:
    directory = ended_coordinator(tmp_path, "a")
    (directory / sqlite_views.FILE).write_text("not a database")
    assert [old.runs for old in cleanup.find_old(tmp_path, 0.0)] == [()]


def test_link_to_a_directory_is_left_alone(tmp_path: Path) -> None:
    directory = ended_coordinator(tmp_path / "elsewhere", "a")
    root = tmp_path / "coordinators"
    root.mkdir()
    (root / "link").symlink_to(directory)
    assert cleanup.find_old(tmp_path, 0.0) == []
