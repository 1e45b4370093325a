"""The PyTorch example that stands beside the Keras one runs too; tests/keras runs that one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples/torch_images.py"


def accuracies(cwd: Path, *launcher: str) -> list[float]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    environ |= {"OMP_NUM_THREADS": "1", "SHOAL_HOME": str(cwd / "home")}
    command = [sys.executable, *launcher, str(SCRIPT), "--epochs", "3"]
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(found) for found in re.findall(r"accuracy (\d\.\d+) on", done.stdout)]


def test_the_image_model_learns_alone(tmp_path: Path) -> None:
    (accuracy,) = accuracies(tmp_path)
    assert accuracy > 0.6


@pytest.mark.process
def test_the_image_model_learns_with_two_members_that_end_with_the_same(tmp_path: Path) -> None:
    one, other = accuracies(tmp_path, "-m", "shoal.cli.main", "run", "-n", "2")
    assert one == other > 0.6
