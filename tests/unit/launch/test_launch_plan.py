"""What a launch plan starts, and the pools and environments that its coordinator gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import BadEnvironment, HomeUnusable
from shoal.launch import launch_plan, settings_layers
from shoal.wire.api import RunSpec
from shoal.wire.pool_files import CoordinatorPools, write_pools

POOLS = """
[run]
environment = "requirements.txt"
[pool.here]
engine = "local"
[pool.lab]
engine = "ssh"
hosts = ["gpu1"]
[pool.packed]
engine = "slurm"
environment = "env.tar.gz"
[pool.bare]
engine = "ray"
environment = ""
"""


def environments(folder: Path, text: str) -> dict[str, object]:
    (folder / "shoal.toml").write_text(text)
    (folder / "requirements.txt").write_text("numpy\n")
    (folder / "env.tar.gz").write_bytes(b"")
    below = folder / "below"
    below.mkdir()
    pools = launch_plan.coordinator_pools(settings_layers.resolve(below, {}))
    return {name: table.get("environment", "") for name, table in pools.pools.items()}


def test_common_environment_is_for_all_pools_but_the_local_one(tmp_path: Path) -> None:
    assert environments(tmp_path, POOLS) == {
        "here": "",
        "lab": str(tmp_path / "requirements.txt"),
        "packed": str(tmp_path / "env.tar.gz"),
        "bare": "",
    }


@pytest.mark.parametrize("given", ["needs.txt", "environment.yml"])
def test_invalid_environment_is_rejected_with_its_pool(tmp_path: Path, given: str) -> None:
    with pytest.raises(BadEnvironment) as rejected:
        environments(tmp_path, POOLS.replace("env.tar.gz", given))
    assert given in rejected.value.what
    assert "[pool.packed] of " in rejected.value.where


def test_removed_pool_is_retired_and_loses_its_environment(tmp_path: Path) -> None:
    (tmp_path / "shoal.toml").write_text('[pool.here]\nengine = "local"\n')
    former = CoordinatorPools({"old": {"engine": "slurm", "partition": "p", "limit": 3, "environment": "/gone.txt"}})
    settings = settings_layers.resolve(tmp_path, {})
    for _ in range(2):
        former = launch_plan.coordinator_pools(settings, former=former)
        assert former.retired == ("old",)
        assert former.pools["old"] == {"engine": "slurm", "partition": "p", "limit": 3, "environment": ""}
    assert launch_plan.coordinator_pools(settings, (), former).retired == ("old",), "also when it is resumed"
    (tmp_path / "shoal.toml").write_text('[pool.old]\nengine = "local"\n')
    again = launch_plan.coordinator_pools(settings_layers.resolve(tmp_path, {}), former=former)
    assert (again.pools["old"], again.retired) == ({"engine": "local"}, ("here",)), "it was configured again"


def test_resumed_coordinator_keeps_its_pools_with_their_present_tables(tmp_path: Path) -> None:
    (tmp_path / "shoal.toml").write_text('[pool.lab]\nengine = "local"\n')
    directory = tmp_path / "home" / "before"
    directory.mkdir(parents=True)
    write_pools(directory, CoordinatorPools({"lab": {"engine": "local", "limit": 1}, "gone": {"engine": "local"}}))
    plan = launch_plan.plan_launch(directory, settings_layers.resolve(tmp_path, {}), None)
    assert plan.pools is not None
    assert plan.pools.pools == {"lab": {"engine": "local"}, "gone": {"engine": "local"}}
    assert plan.agent == ()


def test_agent_gets_its_options_and_the_directory_of_the_coordinator(tmp_path: Path) -> None:
    settings = settings_layers.resolve(tmp_path, {}, ("notice.source=aws", "interface=lo", "preload=json"))
    words = " ".join(launch_plan.plan_launch(tmp_path / "c", settings, None).agent)
    assert f"--dir {tmp_path / 'c'}" in words
    assert "--interface lo --preload json --notice-source aws" in words


@pytest.mark.parametrize(("env", "backend"), [({}, "tensorflow"), ({"KERAS_BACKEND": "torch"}, "torch")])
def test_keras_script_preloads_the_backend_of_its_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], backend: str
) -> None:
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    (tmp_path / "train.py").write_text("import shoal.keras\n")
    spec = RunSpec("train", ("train.py",), str(tmp_path), (1, 1), env=env)
    plan = launch_plan.plan_launch(tmp_path / "c", settings_layers.resolve(tmp_path, {}), spec)
    assert f"shoal.keras.backends.{backend}," in plan.agent[plan.agent.index("--preload") + 1]


@pytest.mark.parametrize(("engines", "host"), [([], "127.0.0.1"), (["local"], "127.0.0.1"), (["local", "ssh"], "::")])
def test_coordinator_listens_on_loopback_unless_machines_are_remote(engines: list[str], host: str) -> None:
    assert launch_plan.listen_host(engines) == host


def test_unwritable_home_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HomeUnusable):
        launch_plan.create_directory(tmp_path / "file" / "coordinators" / "x")
