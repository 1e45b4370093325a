"""The Keras examples run, small, alone and with two members."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("keras")
pytestmark = [pytest.mark.keras, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"
SHOAL = (sys.executable, "-m", "shoal.cli.main")
IMAGES = (EXAMPLES / "keras_images.py", "--epochs", "3")
TEXT = (EXAMPLES / "keras_text.py", "--epochs", "1", "--sentences", "256")


def call(*command: str | Path, cwd: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    environ |= {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "SHOAL_HOME": str(cwd / "home")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environ, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def accuracies(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"accuracy (\d\.\d+) on", output)]


def test_image_example_learns_alone(tmp_path: Path) -> None:
    (accuracy,) = accuracies(call(sys.executable, *IMAGES, cwd=tmp_path))
    assert accuracy > 0.6
    assert (tmp_path / "digits.keras").stat().st_size > 0


@pytest.mark.process
def test_image_example_learns_with_two_members(tmp_path: Path) -> None:
    first, second = accuracies(call(*SHOAL, "run", "-n", "2", *IMAGES, cwd=tmp_path))
    assert first == second > 0.6
    assert (tmp_path / "digits.keras").stat().st_size > 0


def test_text_example_runs_alone(tmp_path: Path) -> None:
    assert "sums right" in call(sys.executable, *TEXT, cwd=tmp_path)


@pytest.mark.process
def test_text_example_runs_with_two_members(tmp_path: Path) -> None:
    assert call(*SHOAL, "run", "-n", "2", *TEXT, cwd=tmp_path).count("sums right") == 2
