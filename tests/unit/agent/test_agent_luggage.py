"""What agents keep of projects between runs."""

from __future__ import annotations

import os
import time
from pathlib import Path

from shoal.agent.project_files import UNUSED_S, ProjectCache
from shoal.pack import project


def test_what_no_run_has_needed_for_long_is_forgotten_and_what_is_needed_stays(tmp_path: Path) -> None:
    cache, root = tmp_path / "cache", tmp_path / "project"
    for place in (cache, root):
        place.mkdir()
    (root / "train.py").write_text("print(1)")
    made, contents = project.take(project.find(root))
    name, data = project.encode(made)
    kept = {name: data, **{digest: path.read_bytes() for digest, path in contents.items()}}
    left = {"0" * 64: b"of a run long ago", f"{'1' * 64}.7.8.part": b"of an agent that was killed"}
    for called, content in (kept | left).items():
        (cache / called).write_bytes(content)
        os.utime(cache / called, (0.0, time.time() - UNUSED_S - 60.0))
    recent = cache / ("2" * 64)
    recent.write_text("of a run of yesterday")
    luggage = ProjectCache("http://nobody", "no token", cache, tmp_path / "runs")
    assert (luggage.lay_out(name, "r") / "train.py").read_text() == "print(1)"
    assert {path.name for path in cache.iterdir()} == {*kept, recent.name}
