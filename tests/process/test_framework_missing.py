"""A framework that is not installed is named with the remedy, wherever it is first needed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

IMPORT = """
import sys
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {gone!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Nowhere())
try:
    import shoal.{module}
except ImportError as error:
    print(error)
"""


def imported(module: str, gone: str) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    script = IMPORT.format(module=module, gone=gone)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=110, check=True
    )
    return done.stdout


@pytest.mark.parametrize(("module", "gone"), [("torch", "torch"), ("keras", "keras")])
def test_missing_framework_is_named_with_the_remedy(module: str, gone: str) -> None:
    output = imported(module, gone)
    assert f"error[S324] {gone} is not installed in this Python" in output
    assert f"pip install 'shoal-train[{module}]'" in output


def test_other_missing_module_is_not_reported_as_a_framework() -> None:
    assert imported("torch", "msgspec").strip() == "No module named 'msgspec'"
