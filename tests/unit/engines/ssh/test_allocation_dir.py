"""Directories of allocations on a host."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from shoal.engines import process_tree
from shoal.engines.ssh import allocation_dir


def test_root_is_the_pools_directory_or_shoals_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.delenv("SHOAL_HOME", raising=False)
    assert allocation_dir.root("/scratch") == "/scratch/allocations"
    assert allocation_dir.root("~/scratch") == "/home/ann/scratch/allocations"
    assert allocation_dir.root("") == "/home/ann/.shoal/allocations"
    monkeypatch.setenv("SHOAL_HOME", "/data")
    assert allocation_dir.root("") == "/data/allocations"


def test_process_runs_only_with_the_same_start_time_boot_and_node(tmp_path: Path) -> None:
    pid, started = process_tree.identify(os.getpid())
    record = {"pid": pid, "started": started, "boot": process_tree.boot_id(), "node": process_tree.node_name()}
    path = str(tmp_path / allocation_dir.RECORD)
    allocation_dir.write(path, json.dumps(record))
    assert allocation_dir.is_running(str(tmp_path))
    for change in ({"started": started - 1}, {"boot": "another"}, {"node": "another"}):
        allocation_dir.write(path, json.dumps({**record, **change}))
        assert not allocation_dir.is_running(str(tmp_path))


def test_record_of_the_local_engine_is_ignored(tmp_path: Path) -> None:
    (tmp_path / allocation_dir.RECORD).write_text(json.dumps({"pid": os.getpid(), "started": 1, "boot": "b"}))
    assert allocation_dir.record(str(tmp_path)) is None


def test_files_are_private_and_removal_does_not_count_as_use(tmp_path: Path) -> None:
    allocation_dir.write(str(tmp_path / "token"), "secret")
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "token.part").exists()
    os.utime(tmp_path / "token", (0, time.time() - 500.0))
    (tmp_path / "other").touch()
    allocation_dir.remove(str(tmp_path), "other", "absent")
    assert allocation_dir.untouched_s(str(tmp_path)) > 400.0
