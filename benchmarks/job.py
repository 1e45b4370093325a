"""The job that every side trains: model, data set, pace and commit log, without any distribution."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

SAMPLES = 4_800
CLASSES = 10
PIXELS = 28
LEARNING_RATE = 0.01
MOMENTUM = 0.9


def build_model(name: str) -> nn.Module:
    """Return the model of that name, with the same weights in every process."""
    torch.manual_seed(0)
    if name == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 64),
            nn.ReLU(),
            nn.Linear(64, CLASSES),
        )
    if name == "tiny":  # what it costs is emulated
        return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS * PIXELS, CLASSES))
    if name == "wide":  # 26 M parameters, 105 MB of gradients: bound by what is exchanged
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(PIXELS * PIXELS, 4096),
            nn.ReLU(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Linear(4096, 1536),
            nn.ReLU(),
            nn.Linear(1536, CLASSES),
        )
    raise SystemExit(f"no model is called {name!r}: cnn, tiny or wide")


def build_dataset() -> TensorDataset:
    """Return generated images with labels that can be learnt."""
    noise = torch.Generator().manual_seed(1)
    images = torch.randn(SAMPLES, 1, PIXELS, PIXELS, generator=noise)
    labels = images[:, 0, ::7, ::7].flatten(1)[:, :CLASSES].argmax(1)
    return TensorDataset(images, labels)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


class Job:
    """Settings, pace and commit log of this process."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        self.directory: Path = options.directory
        self.model: str = options.model
        self.batch: int = options.batch
        self.usual_share: int = options.usual_share or self.batch
        self.pace_s: float = options.pace_s
        self.gated: bool = options.gated
        self.number = number_among_hosts() if options.hosts else os.getpid()
        self._log: int | None = None

    def forward(self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of one step no sooner than the pace allows; a smaller share takes less time."""
        if self.pace_s:
            time.sleep(self.pace_s * min(1.0, len(images) / self.usual_share))
        return nn.functional.cross_entropy(model(images), labels)

    def committed(self, step: int, world: object, size: int, samples: int, at: float | None = None) -> None:
        """Log that this process applied `step` in `world` with `samples` of its own."""
        if self._log is None:
            self._log = os.open(self.directory / f"{self.number}.commits", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(self._log, f"{step} {time.monotonic() if at is None else at:.6f} {world} {size} {samples}\n".encode())

    def is_member(self, number: int) -> None:
        """Log which member this process is and move it into that member's control group, if there is one."""
        (self.directory / f"{os.getpid()}.member").write_text(str(number))
        group = os.environ.get("BENCH_GROUPS")
        if group:
            Path(f"{group}-{number}", "cgroup.procs").write_text(str(os.getpid()))

    def follow(self, number: int) -> None:
        """Wait until the member with the previous number has joined: ranks follow the order of joining."""
        ends = time.monotonic() + 30
        while number and time.monotonic() < ends:
            if any(path.read_text() == str(number - 1) for path in self.directory.glob("*.member")):
                return
            time.sleep(0.02)

    def wait_for_turn(self, step: int) -> None:
        """Block before `step` until the benchmark has opened the gate up to it."""
        if not self.gated:
            return
        gate = self.directory / "gate"
        while step >= int(gate.read_text() or 0):
            time.sleep(0.01)


def number_among_hosts() -> int:
    """Return a number that no other process has, also on hosts with PID namespaces of their own."""
    return int(f"{os.stat('/proc/self/ns/pid').st_ino}{os.getpid():07}")


def from_arguments(arguments: Sequence[str] | None = None) -> Job:
    """Return the job that the command line describes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--batch", type=int, default=48, help="samples of one step, over all members")
    parser.add_argument("--usual-share", type=int, default=0, help="samples of one step of one member, usually")
    parser.add_argument("--pace-s", type=float, default=0.0, help="least seconds that a forward pass takes")
    parser.add_argument("--gated", action="store_true")
    parser.add_argument("--hosts", action="store_true", help="processes are on hosts that number them by themselves")
    return Job(parser.parse_args(arguments))
