"""`shoal.run` from programs and from the prompt."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.experiment import run as experiment_run
from shoal.pack import manifest

pytestmark = [pytest.mark.process, pytest.mark.roles, pytest.mark.timeout(600)]

WITH_FILES = """
def with_files():
    import helper
    assert open("data/one.csv").read() == "1,2"
    assert helper.ANSWER == 42
    assert json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "worker"
    print("threads", os.environ["OMP_NUM_THREADS"], os.environ["MINE"], flush=True)
    return experiment_fn()

if __name__ == "__main__":
    run = shoal.run(
        with_files, roles={"trainer": shoal.Role(count="1:2", cpus=3, memory="4GiB")}, env={"MINE": "yours"},
        files={"helper.py": "aside/other.py", "data": "data"}, lease_s=5)
    view = run.wait(170)
    report(id=run.id, name=run.name, status=run.status(), metrics=run.metrics(), logs=run.logs(), losses=view.losses,
         story=str(run.story()), model=(run.directory / "model.pt").is_file())
"""

TYPED = """
run = shoal.run(experiment_fn, roles={"trainer": shoal.Role(count=2)})
_ = run.wait(170)
report(status=run.status(), metrics=run.metrics())
exit()
"""

FAILING = """
def wrong():
    print("tried", flush=True)
    raise ValueError("no such thing")

if __name__ == "__main__":
    run = shoal.run(wrong, restarts_user=0)
    try:
        run.wait(170)
    except errors.RunFailed as error:
        report(code=error.code, why=error.why, logs=run.logs())
"""

UNUSED = """
if __name__ == "__main__":
    run = shoal.run(lambda: 7, restarts_user=0)
    try:
        run.wait(170)
    except errors.RunFailed as error:
        report(why=error.why)
"""

TRAINS_ITSELF = """
def loop():
    import torch
    import shoal.torch as shoal

    x = torch.arange(64.0).reshape(16, 4) / 64
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = shoal.join()
    run.attach(model, optimizer)
    for (batch,) in run.batches(torch.utils.data.TensorDataset(x), size=4):
        run.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    run = shoal.run(loop, restarts_user=0)
    run.wait(170)
    report(status=run.status(), step=run.metrics()["step"])
"""

GREEDY = """
if __name__ == "__main__":
    run = shoal.run(experiment_fn, roles={"trainer": shoal.Role(memory="40MiB")}, restarts_user=0)
    try:
        run.wait(170)
    except errors.RunFailed as error:
        report(why=error.why)
"""

EVALUATED = """
import dataclasses

def with_a_best():
    return dataclasses.replace(experiment_fn(), best="min:worst", export="best.pt")

if __name__ == "__main__":
    roles = {"trainer": shoal.Role(count=1), "evaluator": shoal.Role(memory="4GiB", cpus=1)}
    run = shoal.run(with_a_best, roles=roles, checkpoint_every_steps=4)
    view = run.wait(280)
    files = sorted(path.name for path in run.directory.iterdir())
    report(metrics=run.metrics(), step=view.evaluation.step, files=files)
"""

LEFT = """
import time
if __name__ == "__main__":
    run = shoal.run(experiment_fn, detach=DETACH)
    while run.metrics()["step"] < 3:
        time.sleep(0.1)
    report(id=run.id)
"""

STOPPED = """
import time
if __name__ == "__main__":
    run = shoal.run(experiment_fn)
    while run.metrics()["step"] < 3:
        time.sleep(0.1)
    run.scale("1:2")
    view = run.stop("enough")
    report(status=view.status, checkpoint=view.checkpoint_step, story=str(run.story()))
"""


def test_program_trains_with_its_files_and_reads_the_results(stage: Any) -> None:
    (stage.path / "aside").mkdir()
    (stage.path / "aside" / "other.py").write_text("ANSWER = 42\n")
    (stage.path / "data").mkdir()
    (stage.path / "data" / "one.csv").write_text("1,2")
    del stage.environ["OMP_NUM_THREADS"]
    (report,) = stage.finish(stage.begin(WITH_FILES))
    assert (report["status"], report["name"], report["losses"]) == ("done", "with_files", 0)
    assert report["metrics"]["step"] == 9
    assert report["metrics"]["worst"] < 3
    assert "local/0 | threads 3 yours" in report["logs"]
    assert "run ended with exit code 0" in report["story"]
    assert report["model"], "the model was not saved where run.directory says"
    assert stage.shoal("status", report["id"])["status"] == "done", "shoal status does not find it"


def test_program_in_the_documentation_runs(stage: Any) -> None:
    page = Path(__file__).parents[3] / "docs/howto/experiment.md"
    (program, *_) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    stage.finish(stage.begin(program))
    output = (stage.path / "out").read_text()
    assert "'step': 80.0, 'epoch': 4.0" in output
    assert Path(output.split()[-1]).is_file()


def test_function_typed_at_the_prompt_is_trained(stage: Any) -> None:
    pytest.importorskip("cloudpickle")
    (report,) = stage.finish(stage.begin(TYPED, "-q", "-i"))
    assert report["status"] == "done"
    assert report["metrics"]["step"] == 9


def test_exception_of_the_function_is_reported_with_a_code(stage: Any) -> None:
    (report,) = stage.finish(stage.begin(FAILING))
    assert report["code"] == "S332"
    assert "error[S331] wrong raised ValueError: no such thing" in report["why"]
    assert report["logs"].count("| tried") == 1
    assert "ValueError: no such thing" in report["logs"]


def test_function_with_a_training_loop_of_its_own_succeeds(stage: Any) -> None:
    (report,) = stage.finish(stage.begin(TRAINS_ITSELF))
    assert report == {"status": "done", "step": 4.0}


def test_function_that_returns_no_experiment_is_reported(stage: Any) -> None:
    (report,) = stage.finish(stage.begin(UNUSED))
    assert "error[S330]" in report["why"]
    assert "returned an int" in report["why"]


def test_member_over_the_memory_limit_of_its_role_is_killed(stage: Any) -> None:
    (report,) = stage.finish(stage.begin(GREEDY, epochs=100_000))
    assert "error[S405] it used" in report["why"]


@pytest.mark.timeout(600)
def test_evaluator_evaluates_during_training(stage: Any) -> None:
    # Evaluators run at low priority, also beside other tests.
    (report,) = stage.finish(stage.begin(EVALUATED), timeout_s=300)
    assert report["step"] == 9, "the last checkpoint was not evaluated"
    assert report["metrics"]["worst"] < 3
    assert report["files"] == ["best.pt", "model.pt"]


def test_attached_run_ends_with_the_process_that_started_it(stage: Any) -> None:
    (report,) = stage.finish(stage.begin(LEFT.replace("DETACH", "False"), epochs=100_000))
    view = stage.shoal("status", report["id"])
    assert view["status"] == "stopped"
    assert view["checkpoint_step"] >= 3
    stage.shoal("resume", "--detach", report["id"])
    stage.until(lambda: stage.shoal("status", report["id"])["step"] > view["checkpoint_step"], "training continues")
    assert stage.shoal("stop", report["id"])["status"] == "stopped"
    stage.until(stage.has_no_processes, "all processes have ended")


def test_no_process_outlives_a_killed_program(stage: Any) -> None:
    text = LEFT.replace("DETACH", "False").replace(
        "    report(id=run.id)", "    report(id=run.id)\n    time.sleep(300)"
    )
    process = stage.begin(text, epochs=100_000)
    stage.until(stage.reports, "training")
    process.kill()
    process.wait()
    stage.until(stage.has_no_processes, "all processes have ended")


def test_detached_run_continues_without_the_process_that_started_it(stage: Any) -> None:
    process = stage.begin(LEFT.replace("DETACH", "True"), epochs=100_000)
    assert process.wait(180) == 0, stage.output
    (report,) = stage.reports()
    before = stage.shoal("status", report["id"])
    assert before["status"] == "training"
    assert stage.shoal("stop", report["id"])["status"] == "stopped"
    stage.until(stage.has_no_processes, "all processes have ended")


def test_run_is_scaled_and_stopped_from_python(stage: Any) -> None:
    (report,) = stage.finish(stage.begin(STOPPED, epochs=100_000))
    assert report["status"] == "stopped"
    assert report["checkpoint"] >= 3
    assert "enough" in report["story"]


def test_member_does_not_load_a_pack_that_its_run_did_not_sign(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    experiment_run.pack(tmp_path, lambda: None, {})
    blobs = tmp_path / experiment_run.PACK / manifest.BLOBS
    (blob,) = blobs.iterdir()
    blob.chmod(0o600)
    blob.write_bytes(pickle.dumps(_Evil(str(tmp_path / "evil"))))
    output = member(tmp_path)
    assert "error[S530]" in output
    assert not (tmp_path / "evil").exists(), "the function was unpickled"
    manifest.write(
        tmp_path / experiment_run.PACK,
        manifest.PackManifest(manifest.PackedFunction("f", module="os")),
        "another token",
    )
    assert "error[S530] the pack of this run was not signed with its token" in member(tmp_path)


def test_member_does_not_train_on_a_changed_file(tmp_path: Path) -> None:
    given = tmp_path / "given.csv"
    given.write_text("1,2")
    experiment_run.pack(tmp_path, manifest.read, {"data.csv": given})
    (blob,) = (tmp_path / experiment_run.PACK / manifest.BLOBS).iterdir()
    blob.chmod(0o600)
    blob.write_text("1,3")
    output = member(tmp_path)
    assert "error[S530] data.csv of files= does not match its hash" in output
    assert "start the run again" in output


class _Evil:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return (os.mkdir, (self.mark,))


def member(directory: Path) -> str:
    """Run a member of a pack without a coordinator; return its standard error."""
    variables = {"URL": "http://127.0.0.1:9", "TOKEN_FILE": str(directory / "token"), "RUN": "r", "MEMBER": "local/0"}
    variables |= {
        "INCARNATION": "1",
        "MEMBER_HOSTS": "127.0.0.1",
        "RUN_DIR": str(directory),
        "SETTINGS": json.dumps({}),
    }
    environ = {**os.environ, **{f"SHOAL_{name}": value for name, value in variables.items()}}
    command = [sys.executable, "-m", "shoal.experiment", str(directory / experiment_run.PACK)]
    work = directory / experiment_run.WORK
    ran = subprocess.run(command, env=environ, cwd=work, capture_output=True, text=True, timeout=180)
    assert ran.returncode == 1
    return ran.stderr
