"""Blobs that agents keep between runs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from shoal.agent.project_files import UNUSED_S, ProjectCache
from shoal.errors import ProjectDeliveryFailed
from shoal.pack import project


def test_unused_blobs_are_removed_and_used_ones_stay(tmp_path: Path) -> None:
    cache, root = tmp_path / "cache", tmp_path / "project"
    for directory in (cache, root):
        directory.mkdir()
    (root / "train.py").write_text("print(1)")
    manifest, contents = project.hash_files(project.find_files(root))
    name, data = project.encode(manifest)
    used = {name: data, **{digest: path.read_bytes() for digest, path in contents.items()}}
    unused = {"0" * 64: b"of a run long ago", f"{'1' * 64}.7.8.part": b"of an agent that was killed"}
    for blob, content in (used | unused).items():
        (cache / blob).write_bytes(content)
        os.utime(cache / blob, (0.0, time.time() - UNUSED_S - 60.0))
    recent = cache / ("2" * 64)
    recent.write_text("of a run of yesterday")
    projects = ProjectCache("http://unused", "no token", cache, tmp_path / "runs")
    assert (projects.lay_out(name, "r") / "train.py").read_text() == "print(1)"
    assert {path.name for path in cache.iterdir()} == {*used, recent.name}


@pytest.mark.parametrize("name", ["../secret", "\n\x1b[2J", "0" * 63, "0" * 64 + "\n", "/etc/passwd"])
def test_name_of_a_project_never_leads_out_of_the_cache(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("private")
    projects = ProjectCache("http://unused", "no token", tmp_path / "cache", tmp_path / "runs")
    with pytest.raises(ProjectDeliveryFailed, match="invalid name"):
        projects.lay_out(name, "r")
