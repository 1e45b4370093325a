"""Leftover processes: what outlived the run that started it, although every process should end with its parent.

Agents and coordinators are known by their command line, which names the directory of their coordinator. A member's
command line is the user's, and what a member starts may change its own, its parent and its session. So these are known
by the mark that an agent puts into the environment of all that it starts: its own directory (`orphan_cleanup.MARK`).
They are left over if no agent holds that directory: client, coordinator, agent and zygote were killed together then.

What a live coordinator or a `shoal` command will clean up itself is not left over: it restarts the agent, and the next
agent in the directory ends what the one before left behind.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from shoal.agent.processes import orphan_cleanup
from shoal.launch.run_lookup import is_supervised, process_exists, read_text

MODULES = ("shoal.agent", "shoal.coordinator")


@dataclass(frozen=True, slots=True)
class Leftover:
    """A process of a dead coordinator or agent; `started` tells it from a later process with the same id."""

    pid: int
    started: float
    kind: str
    coordinator: str


def find(home: Path) -> list[Leftover]:
    """Return the processes below this SHOAL_HOME whose coordinator and supervisor, or whose agent, are gone."""
    own = psutil.Process()
    spared = {own.pid, *(parent.pid for parent in own.parents())}
    others = [process for process in psutil.process_iter() if process.pid not in spared]
    return [leftover for process in others for leftover in _of(process, home)]


def _of(process: psutil.Process, home: Path) -> Iterator[Leftover]:
    """Yield the process if it is left over; other users' processes, and those that end just now, cannot be read."""
    with contextlib.suppress(psutil.Error, OSError):
        if process.status() == psutil.STATUS_ZOMBIE:
            return
        service = _service(process, home)
        kind, name = service if service is not None else ("member", _dead_agent(process, home))
        if name:
            yield Leftover(process.pid, process.create_time(), kind, name)


def _service(process: psutil.Process, home: Path) -> tuple[str, str] | None:
    """Return the kind of an agent or coordinator, and its coordinator's name if that is dead; None for all others."""
    words = process.cmdline()
    kind = next((module.removeprefix("shoal.") for module in MODULES if module in words), None)
    if kind is None:
        return None
    root = str(home / "coordinators") + os.sep
    path = next((word for word in words if word.startswith(root)), "")
    name = path.removeprefix(root).partition(os.sep)[0]
    dead = name and _is_dead(home / "coordinators" / name) and not _is_supervised(process)
    return kind, name if dead else ""


def _dead_agent(process: psutil.Process, home: Path) -> str:
    """Return the name of the directory of the dead agent that started a process; empty if that one lives."""
    directory = Path(process.environ().get(orphan_cleanup.MARK) or os.sep)
    if home.resolve() not in directory.resolve().parents:
        return ""
    if directory.parent.name == "coordinators" and not (_is_dead(directory) and not is_supervised(directory)):
        return ""
    lock = orphan_cleanup.hold(directory) if directory.is_dir() else -1
    if lock is None:
        return ""
    if lock >= 0:
        os.close(lock)
    return directory.name


def kill(leftover: Leftover) -> None:
    """Kill the process, if it is still the same one."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(leftover.pid)
        if process.create_time() == leftover.started:
            process.kill()


def _is_supervised(process: psutil.Process) -> bool:
    """Return whether a `shoal` command is an ancestor, which would restart the coordinator."""
    return any("shoal.cli" in word or Path(word).name == "shoal" for up in process.parents() for word in up.cmdline())


def _is_dead(directory: Path) -> bool:
    pid = read_text(directory / "pid")
    return not (pid.isdigit() and process_exists(int(pid)))
