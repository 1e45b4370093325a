"""What hires left is removed a day after they ended, whoever started them, and nothing of those that live."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.engines import local, stale_dirs
from shoal.engines.agent_script import KEEP_S
from shoal.engines.engine import EngineOptions
from shoal.engines.ray import driver
from shoal.engines.slurm import engine as slurm_engine
from shoal.engines.slurm.engine import SlurmOptions
from shoal.engines.slurm.jobs import SlurmJobRow
from shoal.engines.ssh import remote_helper

OLD_S = KEEP_S + 3600.0


def leave(above: Path, name: str, *, age_s: float = OLD_S, **files: str) -> Path:
    home = above / "allocations" / name
    (home / "run" / "project").mkdir(parents=True)
    for file, text in {"agent.log": "last words", **files}.items():
        (home / file.replace("_json", ".json").replace("_log", ".log")).write_text(text)
    for path in (*home.rglob("*"), home):
        os.utime(path, (time.time() - age_s,) * 2)
    return home


def left(above: Path) -> set[str]:
    return {f"{tag}/{hire}" for tag, hire, _ in stale_dirs.homes(above / "allocations")}


def by_ssh(above: Path) -> None:
    request = {"directory": str(above), "tag": "mine", "known": ["spot-9"], "keep_s": KEEP_S}
    remote_helper.tidy(request)


def by_local(above: Path) -> None:
    local.Local("spot", EngineOptions(directory=str(above))).clean_up("mine", ["spot-9"])


@pytest.mark.parametrize("tidy", [by_ssh, by_local])
def test_only_what_ended_long_ago_is_removed(tmp_path: Path, tidy: Callable[[Path], None]) -> None:
    leave(tmp_path, "mine/spot-1")
    leave(tmp_path, "another/spot-1")
    leave(tmp_path, "mine/spot-2", age_s=60.0)
    leave(tmp_path, "mine/spot-3", token="it lives, or somebody else knows better")
    leave(tmp_path, "mine/spot-9")
    tidy(tmp_path)
    assert left(tmp_path) == {"mine/spot-2", "mine/spot-3", "mine/spot-9"}
    assert not (tmp_path / "allocations" / "another").exists()


def test_on_a_node_of_ray_the_next_hire_removes_what_is_left(tmp_path: Path) -> None:
    leave(tmp_path, "mine/rays-1")
    leave(tmp_path, "mine/rays-2", age_s=60.0)
    leave(tmp_path, "mine/rays-3", token="it lives")
    driver._tidy(tmp_path / "allocations")
    assert left(tmp_path) == {"mine/rays-2", "mine/rays-3"}
    assert driver.KEEP_S == KEEP_S


def test_on_a_node_of_ray_the_token_of_one_whose_actor_died_without_a_word_goes(tmp_path: Path) -> None:
    me = driver._identity(os.getpid())
    node, boot, pid, born = me
    told = {
        "lives": me,
        "elsewhere": ["another", boot, pid, "1"],
        "died": [node, boot, pid, "1"],
        "rebooted": [node, "before", pid, born],
    }
    homes = {
        name: leave(tmp_path, f"mine/{name}", age_s=60.0, actor_json=json.dumps(one), token="secret")
        for name, one in told.items()
    }
    driver._tidy(tmp_path / "allocations")
    assert {name for name, home in homes.items() if (home / "token").exists()} == {"lives", "elsewhere"}
    assert left(tmp_path) == {f"mine/{name}" for name in told}, "its log may still be wanted"


def test_an_agent_here_that_died_without_a_word_is_removed_and_one_that_lives_is_not(tmp_path: Path) -> None:
    local._note(tmp_path, os.getpid(), 30.0)
    lives = json.loads((tmp_path / "process.json").read_text())
    died = {**lives, "born": 1.0}
    leave(tmp_path, "mine/spot-1", process_json=json.dumps(lives), token="secret")
    leave(tmp_path, "mine/spot-2", process_json=json.dumps(died), token="secret")
    leave(tmp_path, "mine/spot-3", process_json=json.dumps({**died, "node": "x", "boot": "y"}), token="of ssh")
    by_local(tmp_path)
    assert left(tmp_path) == {"mine/spot-1", "mine/spot-3"}


def test_an_agent_of_a_host_that_died_without_a_word_is_removed(tmp_path: Path) -> None:
    died = {"pid": os.getpid(), "born": 1, "boot": remote_helper._boot(), "node": socket.gethostname()}
    leave(tmp_path, "mine/lab-1", process_json=json.dumps(died), token="secret")
    leave(tmp_path, "mine/lab-2", process_json=json.dumps({**died, "node": "elsewhere"}), token="secret")
    by_ssh(tmp_path)
    assert left(tmp_path) == {"mine/lab-2"}


def test_a_job_that_slurm_still_has_keeps_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [SlurmJobRow("7", "PENDING", "", None, None, None, 0, 0, "", "shoal-mine-spot-1")]
    monkeypatch.setattr(slurm_engine.Slurm, "_jobs", lambda _self: jobs)
    leave(tmp_path, "mine/spot-1", job_log="", token="waits for days")
    leave(tmp_path, "mine/spot-2", job_log="", token="its job is gone")
    leave(tmp_path, "mine/rays-3", token="another engine's")
    slurm_engine.Slurm("spot", SlurmOptions(directory=str(tmp_path))).clean_up("mine", ())
    assert left(tmp_path) == {"mine/spot-1", "mine/rays-3"}
