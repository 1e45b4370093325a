"""The interface of every side."""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.commits import Commits
from benchmarks.processes import ROOT

SCRIPTS = ROOT / "benchmarks" / "scripts"
MOST_MEMBERS = 3


@dataclass(frozen=True, slots=True)
class Load:
    """What the job trains: model, samples per step, minimum seconds per step, and whether it waits at the gate."""

    model: str = "cnn"
    batch: int = 48
    pace_s: float = 0.0
    gated: bool = False

    def arguments(self, directory: Path) -> list[str]:
        given = ["--directory", str(directory), "--model", self.model, "--batch", str(self.batch)]
        given += ["--usual-share", str(self.batch // MOST_MEMBERS)]
        return [*given, "--pace-s", str(self.pace_s), *(["--gated"] if self.gated else [])]


class Side(ABC):
    """A running job; the pids of its members are those of its commit logs."""

    name: str
    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, directory: Path, load: Load) -> None:
        self.directory = directory
        self.load = load
        self.commits = Commits(directory)

    @abstractmethod
    def start(self, members: int) -> None:
        """Start the job with that many members."""

    @abstractmethod
    def alive(self) -> bool:
        """Return whether the job can still make progress."""

    @abstractmethod
    def add(self) -> None:
        """Add one member to the running job."""

    @abstractmethod
    def remove(self, pid: int) -> None:
        """Remove this member for good, without a warning."""

    def can_lose(self, pid: int) -> bool:
        """Return whether the job is designed to survive the loss of this member's machine."""
        return pid > 0

    def stop_coordinator(self) -> None:
        """Kill the process that decides membership with SIGKILL."""
        raise NotImplementedError(f"{self.name} has no coordinator to lose")

    def start_coordinator(self) -> None:
        """Start it again at the same address."""
        raise NotImplementedError(f"{self.name} has no coordinator to lose")

    def processes(self) -> list[subprocess.Popen[bytes]]:
        """Return the processes started for the job; all others are their descendants."""
        return []

    @abstractmethod
    def end(self) -> None:
        """End all processes of the job."""
