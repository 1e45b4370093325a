"""Leftover processes, with real processes that carry the marks of agents and coordinators."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shoal.agent.processes import orphan_cleanup
from shoal.doctor import leftovers
from shoal.testing.wait import until


class Processes:
    """Processes that sleep, with a chosen command line and environment."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str, mark: Path | None = None) -> int:
        """Start a process whose command line ends with these words; return its pid."""
        env = {"PATH": os.environ["PATH"], **({orphan_cleanup.MARK: str(mark)} if mark is not None else {})}
        process = subprocess.Popen(["sh", "-c", "read line", *words], env=env, stdin=subprocess.PIPE)
        self.started.append(process)
        return process.pid


@pytest.fixture
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    for process in processes.started:
        process.kill()
        process.communicate()


def coordinator(home: Path, pid: str = "") -> Path:
    directory = home / "coordinators" / "c1"
    directory.mkdir(parents=True)
    (directory / "pid").write_text(pid)
    return directory


def found(home: Path) -> dict[int, tuple[str, str]]:
    return {leftover.pid: (leftover.kind, leftover.coordinator) for leftover in leftovers.find(home)}


def test_agent_of_a_dead_coordinator_is_left_over(tmp_path: Path, processes: Processes) -> None:
    directory = coordinator(tmp_path)
    pid = processes.start("shoal.agent", "--dir", str(directory))
    assert found(tmp_path) == {pid: ("agent", "c1")}


def test_agent_of_a_live_coordinator_is_not(tmp_path: Path, processes: Processes) -> None:
    processes.start("shoal.agent", "--dir", str(coordinator(tmp_path, pid=str(os.getpid()))))
    assert found(tmp_path) == {}


def test_process_that_a_member_started_is_found_by_its_mark(tmp_path: Path, processes: Processes) -> None:
    """Client, coordinator, agent and zygote were killed at once; only the environment still says whose it is."""
    pid = processes.start("train.py", mark=coordinator(tmp_path))
    assert found(tmp_path) == {pid: ("member", "c1")}
    (leftover,) = leftovers.find(tmp_path)
    leftovers.kill(leftover)
    assert processes.started[0].wait(30) == -9
    assert found(tmp_path) == {}


def test_process_of_a_live_agent_or_another_home_is_spared(tmp_path: Path, processes: Processes) -> None:
    directory = coordinator(tmp_path / "home")
    lock = orphan_cleanup.hold(directory)
    assert lock is not None
    processes.start("train.py", mark=directory)
    processes.start("train.py", mark=coordinator(tmp_path / "another"))
    assert found(tmp_path / "home") == {}
    os.close(lock)
    assert list(found(tmp_path / "home")) == [processes.started[0].pid]


def test_process_of_a_coordinator_that_is_being_restarted_is_spared(tmp_path: Path, processes: Processes) -> None:
    directory = coordinator(tmp_path)
    (directory / "supervisor").write_text(f"{os.getppid()}\n")
    processes.start("train.py", mark=directory)
    assert found(tmp_path) == {}


def test_process_of_a_joined_agent_that_died_is_left_over(tmp_path: Path, processes: Processes) -> None:
    (tmp_path / "agents" / "lab1").mkdir(parents=True)
    pid = processes.start("train.py", mark=tmp_path / "agents" / "lab1")
    assert found(tmp_path) == {pid: ("member", "lab1")}


def test_coordinator_that_was_killed_but_not_yet_collected_is_dead(tmp_path: Path, processes: Processes) -> None:
    """An init process of a container may collect orphans late or never."""
    zombie = processes.start("shoal.coordinator")
    os.kill(zombie, signal.SIGKILL)
    until(lambda: psutil.Process(zombie).status() == psutil.STATUS_ZOMBIE, "the coordinator is killed")
    pid = processes.start("train.py", mark=coordinator(tmp_path, pid=str(zombie)))
    assert found(tmp_path) == {pid: ("member", "c1")}
    (tmp_path / "coordinators" / "c1" / "supervisor").write_text(f"{zombie}\n")
    assert found(tmp_path) == {pid: ("member", "c1")}
