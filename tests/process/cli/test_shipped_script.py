"""A script shipped to other machines runs from the uploaded copy, even if Git ignores it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", ["train.py", "{root}/train.py", "lib/../train.py"])
def test_uploaded_script_runs_however_it_was_named(tmp_path: Path, name: str) -> None:
    root, far = tmp_path / "project", tmp_path / "far"
    (root / "lib").mkdir(parents=True)
    (root / "shoal.toml").write_text(f'[pool.far]\nengine = "local"\nshared = false\ndirectory = "{far}"\n')
    (root / "train.py").write_text('print("runs", __file__, flush=True)\n')
    (root / ".gitignore").write_text("train.py\n")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    argv = [sys.executable, "-P", "-m", "shoal.cli.main", "run", "--on", "far", name.format(root=root)]
    env = {**os.environ, "SHOAL_HOME": str(tmp_path / "home")}
    done = subprocess.run(argv, cwd=root, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| runs {far}/" in done.stdout
