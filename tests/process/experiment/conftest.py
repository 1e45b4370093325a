"""Python programs that call `shoal.run`, each in a home of its own, with nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

PATIENCE_S = 90.0

# A function of the program itself; what it needs it imports, as members do not share the program's names.
EXPERIMENT = """
import json, os, sys
import shoal
from shoal import errors

def experiment_fn():
    import torch
    torch.manual_seed(0)
    x = torch.randn(96, 4)
    model = torch.nn.Linear(4, 1)
    def worst(model):
        return {"worst": float((model(x) - x.sum(1, keepdim=True)).abs().max())}
    return shoal.Experiment(
        model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), loss=torch.nn.functional.mse_loss,
        data=torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), size=32, epochs=EPOCHS, evaluation=worst,
        save="model.pt")

def tell(**what):
    print("TOLD " + json.dumps(what), flush=True)

"""


class Stage:
    """A home and a working directory, and the programs that were started there."""

    def __init__(self, path: Path) -> None:
        self.path, self.home = path, path / "home"
        ours = {"SHOAL_HOME": str(self.home), "OMP_NUM_THREADS": "1", "TERM": "dumb"}
        self.environ = {**os.environ, **ours}
        self._started: list[subprocess.Popen[str]] = []

    def begin(self, text: str, *options: str, epochs: int = 3) -> subprocess.Popen[str]:
        """A program with the experiment and this text, as a file or (with -i) as somebody types it."""
        program = EXPERIMENT.replace("EPOCHS", str(epochs)) + text
        script = self.path / "program.py"
        script.write_text(program)
        typed = "-i" in options
        process = subprocess.Popen(
            [sys.executable, *options, *([] if typed else [str(script)])],
            stdin=script.open() if typed else subprocess.DEVNULL,
            stdout=(self.path / "out").open("w"),
            stderr=(self.path / "err").open("w"),
            cwd=self.path,
            env=self.environ,
            text=True,
        )
        self._started.append(process)
        return process

    def finish(
        self, process: subprocess.Popen[str], exit_code: int = 0, patience_s: float = PATIENCE_S
    ) -> list[dict[str, Any]]:
        """What the program told, when it has ended."""
        process.wait(patience_s)
        assert process.returncode == exit_code, self.output
        self.wait("all is gone", lambda: not self.processes())
        return self.told()

    def told(self) -> list[dict[str, Any]]:
        lines = [line for line in (self.path / "out").read_text().splitlines() if line.startswith("TOLD ")]
        return [json.loads(line.removeprefix("TOLD ")) for line in lines]

    @property
    def output(self) -> str:
        return (self.path / "out").read_text() + (self.path / "err").read_text()

    def shoal(self, *arguments: str) -> Any:
        ran = subprocess.run(
            [sys.executable, "-m", "shoal.cli.main", "--json", *arguments],
            env=self.environ,
            capture_output=True,
            timeout=PATIENCE_S,
            check=True,
        )
        return json.loads(ran.stdout)

    def processes(self) -> list[psutil.Process]:
        """Every process that names this home."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                named = any(str(self.home) in word for word in process.cmdline())
                inside = process.environ().get("SHOAL_HOME") == str(self.home)
                if (named or inside) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait(self, what: str, reached: Callable[[], object]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not reached():
            assert time.monotonic() < until, f"waited in vain until {what}\n{self.output}"
            time.sleep(0.1)

    def close(self) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        for left in self.processes():
            with contextlib.suppress(psutil.Error):
                left.kill()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    pytest.importorskip("torch")
    stage = Stage(tmp_path)
    yield stage
    stage.close()
