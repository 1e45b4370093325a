"""Local engine: records of processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

from shoal.engines import local, process_tree
from shoal.engines.engine import EngineOptions
from shoal.engines.local import Local


def home_of(tmp_path: Path, allocation: str) -> Path:
    home = tmp_path / "allocations" / "tag" / allocation
    home.mkdir(parents=True)
    return home


def test_recorded_process_is_running_and_another_start_time_or_boot_is_not(tmp_path: Path) -> None:
    for allocation in ("a-1", "a-2", "a-3"):
        local._write_record(home_of(tmp_path, allocation), os.getpid(), 5.0)
    record = json.loads((tmp_path / "allocations/tag/a-1/process.json").read_text())
    assert record["boot"] == process_tree.boot_id()
    for allocation, change in (("a-2", {"started": 1}), ("a-3", {"boot": "another"})):
        (tmp_path / "allocations/tag" / allocation / "process.json").write_text(json.dumps({**record, **change}))
    statuses = Local("here", EngineOptions(directory=str(tmp_path))).watch("tag")
    assert [(status.allocation, status.state) for status in statuses] == [
        ("a-1", "running"),
        ("a-2", "gone"),
        ("a-3", "gone"),
    ]
    assert statuses[1].why == "its process has ended"


def test_directory_without_record_or_process_is_no_allocation(tmp_path: Path) -> None:
    (home_of(tmp_path, "a-1") / "token").write_text("secret")
    assert Local("here", EngineOptions(directory=str(tmp_path))).watch("tag") == []


def test_cancel_of_an_ended_agent_removes_record_and_token(tmp_path: Path) -> None:
    home = home_of(tmp_path, "a-1")
    for name in ("process.json", "token"):
        (home / name).write_text("{}")
    Local("here", EngineOptions(directory=str(tmp_path))).cancel(str(home))
    assert list(home.iterdir()) == []
