"""Pools by name, by label and per role, on the way from settings to a run request."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import BadLabels, BadPool
from shoal.launch import launch_plan, settings_layers
from shoal.launch.pool_selection import run_pools
from shoal.launch.run_request import build_run_spec
from shoal.wire.api import RoleSpec, RunSpec

POOLS = """
[pool.spot]
engine = "slurm"
price = 1.0
labels = {gpu = "a100"}
[pool.lab]
engine = "local"
[pool.rays]
engine = "ray"
labels = {gpu = "a100", zone = "b"}
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "shoal.toml").write_text(POOLS)
    return tmp_path


def spec_with(*assignments: str) -> RunSpec:
    settings = settings_layers.resolve(Path.cwd(), {}, assignments)
    return build_run_spec("train.py", (), module=False, compat="", settings=settings)


def test_coordinator_gets_the_pools_of_all_roles() -> None:
    spec = spec_with("on=spot", "evaluator=true", "evaluator_on=lab", "budget=12.5", "priority=3")
    assert (spec.on, spec.roles, spec.budget) == (("spot",), {"evaluator": RoleSpec(on=("lab",))}, 12.5)
    assert run_pools(spec) == ("spot", "lab")
    plan = launch_plan.plan_launch(Path("/nowhere"), settings_layers.resolve(Path.cwd(), {}), spec)
    assert plan.pools is not None
    assert set(plan.pools.pools) == {"spot", "lab"}


def test_roles_without_pools_get_the_local_pool_if_another_role_has_pools() -> None:
    assert spec_with("evaluator=true", "evaluator_on=lab").on == ("local",)
    assert spec_with("evaluator_on=lab").on == (), "the run has no evaluator, so its pool changes nothing"
    assert spec_with("sync=async", "servers_on=lab").roles == {"server": RoleSpec(on=("lab",))}


def test_labels_select_among_all_pools_or_the_named_ones() -> None:
    assert spec_with("where=gpu=a100").on == ("rays", "spot"), "the cheapest first"
    assert spec_with("on=lab,spot", "where=gpu=a100").on == ("spot",)
    with pytest.raises(BadLabels):
        spec_with("where=gpu=h100")


@pytest.mark.parametrize("assignments", [("on=moon",), ("on=spot,spot",), ("evaluator=true", "evaluator_on=moon")])
def test_unknown_or_repeated_pool_is_rejected(assignments: tuple[str, ...]) -> None:
    with pytest.raises(BadPool):
        spec_with(*assignments)
