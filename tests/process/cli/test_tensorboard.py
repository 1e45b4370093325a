"""Event files of real runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.report.tensorboard.event_reader import Event, read_folder, series

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

STEPS = 120
# The loss of each step can be computed: every sample pulls the only weight from 0 towards 1.
SCRIPT = f"""
import os
import time
import torch
import shoal.torch as shoal

torch.set_num_threads(1)
run = shoal.join()
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
model, optimizer = run.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
data = torch.utils.data.TensorDataset(torch.ones({STEPS} * 8, 1))
for (x,) in run.batches(data, size=8, epochs=1):
    run.backward(((model(x) - 1) ** 2).mean())
    optimizer.step()
    optimizer.zero_grad()
    run.log(wisdom=42)
    while run.step == {STEPS} // 2 and not os.path.exists("go"):
        time.sleep(0.02)
    time.sleep(0.02)
run.log(at_the_end=7)
"""


def loss_of(step: int) -> float:
    return float(0.98 ** (2 * step))


def folder(stage: Any) -> Path:
    (path,) = (stage.directory() / "runs").glob("*/tensorboard")
    return Path(path)


def written(stage: Any) -> bytes:
    return b"".join(file.read_bytes() for file in stage.home.glob("coordinators/*/runs/*/tensorboard/*"))


def check_losses(events: list[Event]) -> dict[int, float]:
    """Check each loss; a member reports it with its next step, so a heartbeat may carry the one before."""
    losses = series(events, "training/loss")
    for step, loss in losses.items():
        near = [loss_of(number) for number in (step - 2, step - 1, step)]
        assert any(loss == pytest.approx(expected, rel=1e-3) for expected in near), (step, loss)
    return losses


def test_restarted_coordinator_continues_the_event_files(stage: Any) -> None:
    stage.environ["SHOAL_PRELOAD"] = "torch,torch._dynamo,shoal.torch"
    (stage.path / "train.py").write_text(SCRIPT)
    process = stage.start("run", "-n", "2", "--set", "shares.policy=fixed:3,1", "train.py")
    stage.until(lambda: b"training/loss" in written(stage), "a loss is written")
    stage.process("shoal.coordinator").kill()
    stage.until(lambda: stage.out().count("reconnected to the coordinator") == 2, "both members reconnect")
    (stage.path / "go").touch()
    assert process.wait(120) == 0, stage.out()
    events = read_folder(folder(stage))
    assert [event.version for event in events if event.version] == ["brain.Event:2"] * 2
    losses = check_losses(events)
    assert len(losses) > 1
    assert losses[STEPS] == pytest.approx(loss_of(STEPS - 2), rel=1e-3)
    # Ranks follow the order in which members became ready; before its first step a member has no share.
    shares = [set(series(events, f"shares/{member}").values()) - {0.0} for member in ("local/0", "local/1")]
    assert sorted(shares, key=max) == [{2.0}, {6.0}]
    assert set(series(events, "world/size").values()) <= {1.0, 2.0}
    assert set(series(events, "batch/samples").values()) == {8.0}
    assert set(series(events, "metrics/wisdom").values()) == {42.0}
    assert series(events, "metrics/at_the_end") == {STEPS: 7.0}
    assert all(value > 0 for value in series(events, "speed/step_s").values())
    worlds = [event.texts["worlds"] for event in events if "worlds" in event.texts]
    assert worlds[0].startswith("world 1 started at step 0 with local/")
    assert "run ended with exit code 0" in [e.texts["story"] for e in events if "story" in e.texts][-1]
    assert f"\ntensorboard {folder(stage)}" in stage.out()
    assert f"\ntensorboard {folder(stage)}" in stage.shoal("status").stdout


def test_event_files_can_be_switched_off(stage: Any) -> None:
    ran = stage.shoal("run", "--set", "tensorboard=false", "hello.py")
    assert ran.returncode == 0, ran.stderr
    assert "tensorboard" not in ran.stdout
    assert not list((stage.directory() / "runs").glob("*/tensorboard"))


def test_run_without_writable_event_files_reports_it_and_continues(stage: Any) -> None:
    process = stage.start("run", "until.py", str(stage.path / "go"))
    stage.until(lambda: written(stage), "a file is written")
    where = folder(stage)
    process.terminate()
    assert process.wait(180) == 75, stage.out()
    for file in where.iterdir():
        file.unlink()
    where.rmdir()
    where.write_text("in the way")
    (stage.path / "go").touch()
    resumed = stage.shoal("resume", "until")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"\ntensorboard not written: File exists ({where})" in resumed.stdout
    log = (stage.directory() / "coordinator.log").read_text()
    assert log.count("cannot be written: File exists") == 1
