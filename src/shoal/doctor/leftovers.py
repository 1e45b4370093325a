"""Processes of coordinators that are dead: there should be none, since lifelines end them."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from shoal.launch.run_lookup import alive, read_text

MODULES = ("shoal.agent", "shoal.coordinator")


@dataclass(frozen=True, slots=True)
class Leftover:
    """A process that belongs to a dead coordinator; `started` guards against its id being used again."""

    pid: int
    started: float
    what: str
    coordinator: str


def find(home: Path) -> list[Leftover]:
    """Agents, warm processes and members below this SHOAL_HOME whose coordinator and supervisor are gone."""
    root = str(home / "coordinators") + os.sep
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if process.pid == os.getpid() or not any(module in word for word in words for module in MODULES):
                continue
            inside = next((word for word in words if word.startswith(root)), "")
            name = inside.removeprefix(root).partition(os.sep)[0]
            if name and _dead(home / "coordinators" / name) and not _supervised(process):
                what = next(module.removeprefix("shoal.") for module in MODULES if any(module in w for w in words))
                found.append(Leftover(process.pid, process.create_time(), what, name))
    return found


def end(one: Leftover) -> None:
    """End it, if it is still the same process."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(one.pid)
        if process.create_time() == one.started:
            process.kill()


def _supervised(process: psutil.Process) -> bool:
    """Whether somebody lives who would start its coordinator again."""
    return any("shoal.cli" in word or Path(word).name == "shoal" for up in process.parents() for word in up.cmdline())


def _dead(directory: Path) -> bool:
    pid = read_text(directory / "pid")
    return not (pid.isdigit() and alive(int(pid)))
