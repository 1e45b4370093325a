"""Python programs that call `shoal.run`, each in a home of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.testing.shoal_home import ShoalHome
from shoal.testing.wait import TIMEOUT_S

# A function of the program itself. It imports what it needs, because members do not share the program's names.
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

def report(**fields):
    print("REPORT " + json.dumps(fields), flush=True)

"""


class Stage(ShoalHome):
    """A working directory in which programs with an experiment run."""

    def begin(self, text: str, *options: str, epochs: int = 3) -> subprocess.Popen[str]:
        """Start a program with the experiment and this text: as a file, or with -i from standard input."""
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
        self.started.append(process)
        return process

    def finish(
        self, process: subprocess.Popen[str], exit_code: int = 0, timeout_s: float = TIMEOUT_S
    ) -> list[dict[str, Any]]:
        """Wait for the end of the program and of all processes; return what the program reported."""
        process.wait(timeout_s)
        assert process.returncode == exit_code, self.output
        self.until(self.has_no_processes, "all processes have ended")
        return self.reports()

    def reports(self) -> list[dict[str, Any]]:
        lines = [line for line in (self.path / "out").read_text().splitlines() if line.startswith("REPORT ")]
        return [json.loads(line.removeprefix("REPORT ")) for line in lines]

    def shoal(self, *arguments: str) -> Any:
        """Run a `shoal` command; return its JSON."""
        ran = subprocess.run(
            [sys.executable, "-m", "shoal.cli.main", "--json", *arguments],
            env=self.environ,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        return json.loads(ran.stdout)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    pytest.importorskip("torch")
    stage = Stage(tmp_path)
    yield stage
    stage.close()
