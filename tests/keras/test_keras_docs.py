"""The code blocks of the Keras page run one after another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("keras")
pytestmark = [pytest.mark.keras, pytest.mark.timeout(600)]

PAGE = Path(__file__).parents[2] / "docs/howto/keras.md"
# A process has one run, with one training loop; each block gets a run of its own.
NEW_RUN = "import shoal.keras.run as _run\n_run._joined = None\n"


def test_code_of_the_keras_page_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) > 6
    script = tmp_path / "page.py"
    script.write_text("\n".join(NEW_RUN + block + f"\nprint('finished block {n}')\n" for n, block in enumerate(blocks)))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    environ |= {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "SHOAL_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr
    assert done.stdout.count("finished block") == len(blocks)
    assert (tmp_path / "model.keras").stat().st_size > 0
