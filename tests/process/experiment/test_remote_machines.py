"""`shoal.run` on machines that do not share the caller's disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.store import checkpoint
from shoal.store.blob_store import open_store

pytestmark = [pytest.mark.process, pytest.mark.roles, pytest.mark.timeout(600)]

POOL = """
[pool.far]
engine = "local"
shared = false
limit = 2
directory = "{machines}"
"""

PROGRAM = """
import dataclasses
import aside_library

def far_away():
    import os, sys
    import beside, helper, aside_library.deep
    print("in", os.getcwd(), flush=True)
    for module in (beside, helper, aside_library, aside_library.deep):
        assert os.path.realpath(module.__file__).startswith(os.path.realpath(os.getcwd())), module.__file__
    assert open("data/one.csv").read() == "1,2"
    assert aside_library.deep.read() == "packed"
    assert (beside.NAME, helper.ANSWER, closed_over) == ("beside", 42, "closed over")
    return dataclasses.replace(experiment_fn(), save="models/last.pt")

closed_over = "closed over"

if __name__ == "__main__":
    run = shoal.run(
        far_away, on="far", roles={"trainer": shoal.Role(count=2)},
        files={"helper.py": "given/other.py", "data": "data"},
        checkpoint_every_steps=3, preload="torch,shoal.torch", notice_grace_s=3)
    view = run.wait(180)
    work = run.directory
    report(status=view.status, step=view.checkpoint_step, logs=run.logs(), story=str(run.story()),
         checkpoint=view.checkpoint_path, tensorboard=view.tensorboard, run_dir=view.directory,
         again=run.fetch(), apart=run.fetch("elsewhere"), saved=(work / "models/last.pt").is_file())
"""


@pytest.fixture
def elsewhere(stage: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a directory outside the project for machines, with a library that only the caller can import."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    texts = {
        "shoal.toml": POOL.format(machines=elsewhere / "machines"),
        "beside.py": "NAME = 'beside'\n",
        "given/other.py": "ANSWER = 42\n",
        "data/one.csv": "1,2",
        f"{elsewhere}/library/aside_library/__init__.py": "",
        f"{elsewhere}/library/aside_library/deep.py": (
            "import pathlib\ndef read(): return pathlib.Path(__file__).with_name('text').read_text()\n"
        ),
        f"{elsewhere}/library/aside_library/text": "packed",
    }
    for name, text in texts.items():
        (stage.path / name).parent.mkdir(parents=True, exist_ok=True)
        (stage.path / name).write_text(text)
    before = stage.environ.get("PYTHONPATH", "")
    stage.environ["PYTHONPATH"] = f"{elsewhere / 'library'}:{before}"
    return elsewhere


def test_function_files_and_modules_are_uploaded_and_outputs_downloaded(stage: Any, elsewhere: Path) -> None:
    machines = elsewhere / "machines"
    # Agents must not find the library through the variable that the program found it with.
    program = "import os\nos.environ['PYTHONPATH'] = os.environ['PYTHONPATH'].partition(':')[2]\n" + PROGRAM
    (report,) = stage.finish(stage.begin(program), timeout_s=200)
    assert report["status"] == "done", report["story"]
    assert "shoal: sending " in stage.output
    worked_in = {line.partition(" | in ")[2] for line in report["logs"].splitlines() if " | in " in line}
    assert len(worked_in) == 2
    assert all(Path(directory).is_relative_to(machines) for directory in worked_in)
    assert not [path for path in machines.rglob("token*") if "project" in path.parts], "a token was uploaded"
    assert report["saved"], report["logs"]
    assert (report["again"], report["apart"]) == ([], ["models/last.pt"])
    run_dir = Path(report["run_dir"])
    assert list((run_dir / "uploads").iterdir()) == []
    assert Path(report["checkpoint"]).parent == run_dir / "checkpoints"
    assert checkpoint.read(open_store(str(run_dir / "checkpoints"))).entry.step == report["step"] > 0
    assert list(Path(report["tensorboard"]).rglob("events.*"))
