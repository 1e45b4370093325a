"""What the benchmark asks of every side."""

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
    """What the job trains: model, samples a step, least seconds a step, and whether it waits for its turn."""

    model: str = "cnn"
    batch: int = 48
    pace_s: float = 0.0
    gated: bool = False

    def arguments(self, directory: Path) -> list[str]:
        given = ["--directory", str(directory), "--model", self.model, "--batch", str(self.batch)]
        given += ["--usual-share", str(self.batch // MOST_MEMBERS)]
        return [*given, "--pace-s", str(self.pace_s), *(["--gated"] if self.gated else [])]


class Side(ABC):
    """A job under way; the pids of its members are those of its commit logs."""

    name: str
    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, directory: Path, load: Load) -> None:
        self.directory = directory
        self.load = load
        self.commits = Commits(directory)

    @abstractmethod
    def start(self, members: int) -> None:
        """Starts the job with that many members."""

    @abstractmethod
    def alive(self) -> bool:
        """Whether the job can still make progress."""

    @abstractmethod
    def add(self) -> None:
        """Adds one member to the running job."""

    @abstractmethod
    def remove(self, pid: int) -> None:
        """Takes this member away for good, without a warning."""

    def can_lose(self, pid: int) -> bool:
        """Whether the job is made to survive the loss of this member's machine."""
        return pid > 0

    def stop_coordinator(self) -> None:
        """Kills what decides membership, with -9."""
        raise NotImplementedError(f"{self.name} has no coordinator to lose")

    def start_coordinator(self) -> None:
        """Starts it again where it was."""
        raise NotImplementedError(f"{self.name} has no coordinator to lose")

    def processes(self) -> list[subprocess.Popen[bytes]]:
        """What was started for the job; everything of it is below these."""
        return []

    @abstractmethod
    def end(self) -> None:
        """Ends all processes of the job."""
