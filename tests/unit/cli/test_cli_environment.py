"""Where the environments of pools come from, and what is refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import BadEnvironment
from shoal.launch import launch_plan as render
from shoal.launch import settings_layers
from shoal.wire.pool_files import CoordinatorPools

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


def hires(folder: Path, text: str) -> dict[str, object]:
    (folder / "shoal.toml").write_text(text)
    (folder / "requirements.txt").write_text("numpy\n")
    (folder / "env.tar.gz").write_bytes(b"")
    below = folder / "below"
    below.mkdir()
    found = render.hires_of(settings_layers.choose(below, {}))
    return {name: table.get("environment", "") for name, table in found.pools.items()}


def test_one_environment_can_be_for_all_pools_but_this_machine(tmp_path: Path) -> None:
    assert hires(tmp_path, POOLS) == {
        "here": "",
        "lab": str(tmp_path / "requirements.txt"),
        "packed": str(tmp_path / "env.tar.gz"),
        "bare": "",
    }


@pytest.mark.parametrize(
    ("given", "what"),
    [("needs.txt", "there is no file needs.txt"), ("environment.yml", "'environment.yml' is no environment")],
)
def test_what_cannot_be_an_environment_is_refused_at_once(tmp_path: Path, given: str, what: str) -> None:
    with pytest.raises(BadEnvironment) as refused:
        hires(tmp_path, POOLS.replace("env.tar.gz", given))
    assert refused.value.what.startswith(what)
    assert "[pool.packed] of " in refused.value.where


def test_a_pool_that_is_described_no_more_gives_back_what_it_gave_and_needs_its_environment_no_more(
    tmp_path: Path,
) -> None:
    (tmp_path / "shoal.toml").write_text('[pool.here]\nengine = "local"\n')
    before = CoordinatorPools({"old": {"engine": "slurm", "partition": "p", "limit": 3, "environment": "/gone.txt"}})
    found = render.hires_of(settings_layers.choose(tmp_path, {}), before=before).pools
    assert found["old"] == {"engine": "slurm", "partition": "p", "limit": 0, "environment": ""}
    assert "limit" not in found["here"]
