"""Leftover processes: agents, members and coordinators that outlived their coordinator.

There should be none, because each process ends when the pipe to its parent closes.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from shoal.launch.run_lookup import process_exists, read_text

MODULES = ("shoal.agent", "shoal.coordinator")


@dataclass(frozen=True, slots=True)
class Leftover:
    """A process of a dead coordinator; `started` tells it from a later process with the same id."""

    pid: int
    started: float
    kind: str
    coordinator: str


def find(home: Path) -> list[Leftover]:
    """Return the processes below this SHOAL_HOME whose coordinator and supervisor are both gone."""
    root = str(home / "coordinators") + os.sep
    leftovers = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if process.pid == os.getpid() or not any(module in word for word in words for module in MODULES):
                continue
            path = next((word for word in words if word.startswith(root)), "")
            name = path.removeprefix(root).partition(os.sep)[0]
            if name and _is_dead(home / "coordinators" / name) and not _is_supervised(process):
                kind = next(module.removeprefix("shoal.") for module in MODULES if any(module in w for w in words))
                leftovers.append(Leftover(process.pid, process.create_time(), kind, name))
    return leftovers


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
