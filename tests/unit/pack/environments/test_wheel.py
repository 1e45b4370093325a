"""Wheels built from installed files."""

from __future__ import annotations

import zipfile
from pathlib import Path

import shoal
from shoal.pack.environments import wheel


def test_wheel_of_shoal_is_reproducible_and_complete(tmp_path: Path) -> None:
    name, data = wheel.build_shoal_wheel()
    assert (name, wheel.build_shoal_wheel()[1]) == (f"shoal_train-{shoal.__version__}-py3-none-any.whl", data)
    (tmp_path / name).write_bytes(data)
    with zipfile.ZipFile(tmp_path / name) as archive:
        names = archive.namelist()
        assert {"shoal/agent/__main__.py", "shoal/pack/remote/env_main.py"} < set(names)
        assert not [path for path in names if "__pycache__" in path]
        record = archive.read(f"shoal_train-{shoal.__version__}.dist-info/RECORD").decode().splitlines()
        assert {line.split(",")[0] for line in record} == set(names)
        assert b"Requires-Dist: msgspec" in archive.read(f"shoal_train-{shoal.__version__}.dist-info/METADATA")
