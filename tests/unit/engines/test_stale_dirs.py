"""Directories of allocations are removed a day after these ended, whichever engine started them."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.engines import local, process_tree, stale_dirs
from shoal.engines.agent_script import KEEP_S
from shoal.engines.engine import EngineOptions
from shoal.engines.ray import driver
from shoal.engines.slurm import engine as slurm_engine
from shoal.engines.slurm.engine import SlurmOptions
from shoal.engines.slurm.jobs import SlurmJobRow
from shoal.engines.ssh import remote_helper

OLD_S = KEEP_S + 3600.0


def make_home(root: Path, name: str, *, age_s: float = OLD_S, **files: str) -> Path:
    home = root / "allocations" / name
    (home / "run" / "project").mkdir(parents=True)
    for file, text in {"agent.log": "last words", **files}.items():
        (home / file.replace("_json", ".json").replace("_log", ".log")).write_text(text)
    for path in (*home.rglob("*"), home):
        os.utime(path, (time.time() - age_s,) * 2)
    return home


def remaining(root: Path) -> set[str]:
    return {f"{tag}/{allocation}" for tag, allocation, _ in stale_dirs.homes(root / "allocations")}


def by_ssh(root: Path) -> None:
    remote_helper.clean_up({"directory": str(root), "tag": "mine", "active": ["spot-9"], "keep_s": KEEP_S})


def by_local(root: Path) -> None:
    local.Local("spot", EngineOptions(directory=str(root))).clean_up("mine", ["spot-9"])


@pytest.mark.parametrize("clean_up", [by_ssh, by_local])
def test_only_directories_that_are_old_and_have_no_token_are_removed(
    tmp_path: Path, clean_up: Callable[[Path], None]
) -> None:
    make_home(tmp_path, "mine/spot-1")
    make_home(tmp_path, "another/spot-1")
    make_home(tmp_path, "mine/spot-2", age_s=60.0)
    make_home(tmp_path, "mine/spot-3", token="alive, as far as is known")
    make_home(tmp_path, "mine/spot-9")
    clean_up(tmp_path)
    assert remaining(tmp_path) == {"mine/spot-2", "mine/spot-3", "mine/spot-9"}
    assert not (tmp_path / "allocations" / "another").exists()


def test_ray_node_is_cleaned_up_by_the_next_allocation(tmp_path: Path) -> None:
    make_home(tmp_path, "mine/rays-1")
    make_home(tmp_path, "mine/rays-2", age_s=60.0)
    make_home(tmp_path, "mine/rays-3", token="alive")
    driver._clean_up(tmp_path / "allocations")
    assert remaining(tmp_path) == {"mine/rays-2", "mine/rays-3"}
    assert driver.KEEP_S == KEEP_S


def test_ray_token_is_removed_after_its_actor_was_killed(tmp_path: Path) -> None:
    own = driver._identity(os.getpid())
    node, boot, pid, started = own
    actors = {
        "alive": own,
        "elsewhere": ["another", boot, pid, "1"],
        "died": [node, boot, pid, "1"],
        "rebooted": [node, "before", pid, started],
    }
    homes = {
        name: make_home(tmp_path, f"mine/{name}", age_s=60.0, actor_json=json.dumps(actor), token="secret")
        for name, actor in actors.items()
    }
    driver._clean_up(tmp_path / "allocations")
    assert {name for name, home in homes.items() if (home / "token").exists()} == {"alive", "elsewhere"}
    assert remaining(tmp_path) == {f"mine/{name}" for name in actors}, "logs are kept for a day"


def test_local_agent_that_was_killed_is_removed_and_a_live_one_is_not(tmp_path: Path) -> None:
    local._write_record(tmp_path, os.getpid(), 30.0)
    alive = json.loads((tmp_path / "process.json").read_text())
    dead = {**alive, "started": 1}
    make_home(tmp_path, "mine/spot-1", process_json=json.dumps(alive), token="secret")
    make_home(tmp_path, "mine/spot-2", process_json=json.dumps(dead), token="secret")
    make_home(tmp_path, "mine/spot-3", process_json=json.dumps({**dead, "node": "x", "boot": "y"}), token="of ssh")
    by_local(tmp_path)
    assert remaining(tmp_path) == {"mine/spot-1", "mine/spot-3"}


def test_ssh_agent_that_was_killed_is_removed(tmp_path: Path) -> None:
    dead = {"pid": os.getpid(), "started": 1, "boot": process_tree.boot_id(), "node": socket.gethostname()}
    make_home(tmp_path, "mine/lab-1", process_json=json.dumps(dead), token="secret")
    make_home(tmp_path, "mine/lab-2", process_json=json.dumps({**dead, "node": "elsewhere"}), token="secret")
    by_ssh(tmp_path)
    assert remaining(tmp_path) == {"mine/lab-2"}


def test_slurm_job_that_is_queued_keeps_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [SlurmJobRow("7", "PENDING", "", None, None, None, 0, 0, "", "shoal-mine-spot-1")]
    monkeypatch.setattr(slurm_engine.Slurm, "_jobs", lambda _self: jobs)
    make_home(tmp_path, "mine/spot-1", job_log="", token="its job waits for days")
    make_home(tmp_path, "mine/spot-2", job_log="", token="its job is gone")
    make_home(tmp_path, "mine/rays-3", token="another engine's")
    slurm_engine.Slurm("spot", SlurmOptions(directory=str(tmp_path))).clean_up("mine", ())
    assert remaining(tmp_path) == {"mine/spot-1", "mine/rays-3"}
