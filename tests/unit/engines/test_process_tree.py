"""Identity of processes, and how a tree of them is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.engines import process_tree


@pytest.mark.process
def test_tree_is_killed_with_children_that_left_the_session(tmp_path: Path) -> None:
    child = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(600)"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = {process.pid, int(process.stdout.readline())}
        root = process_tree.identify(process.pid)
        assert {pid for pid, _ in process_tree.tree({root})} == pids
        assert process_tree.kill({root}) == []
    assert not [pid for pid in pids if process_tree.is_alive(process_tree.identify(pid))]


@pytest.mark.process
def test_process_is_found_by_its_mark() -> None:
    env = {**os.environ, process_tree.ALLOCATION_MARK: "7-11"}
    with subprocess.Popen(["sleep", "600"], env=env) as process:
        assert process_tree.marked("7-11") == {process_tree.identify(process.pid)}
        process.kill()


def test_pid_with_another_start_time_is_another_process() -> None:
    pid, started = process_tree.identify(os.getpid())
    assert process_tree.is_alive((pid, started))
    assert not process_tree.is_alive((pid, started - 1))
    assert process_tree.in_session((pid, started - 1)) == set()
