"""Settings of a run, translated for the state machines."""

from __future__ import annotations

import msgspec

from shoal.core.fleet.restart_policy import RestartLimits
from shoal.core.membership.state import MembershipSettings
from shoal.core.provisioning.events import PoolProblem
from shoal.core.runs import settings
from shoal.core.runs.spec import RoleSpec, RunSpec
from shoal.settings import RunSettings

DEFAULTS = msgspec.to_builtins(RunSettings())


def test_defaults_of_core_are_those_of_the_settings() -> None:
    assert settings.membership_settings({}, 1, 2) == settings.membership_settings(DEFAULTS, 1, 2)
    assert settings.restart_limits({}) == settings.restart_limits(DEFAULTS) == RestartLimits()
    assert settings.server_count({}) == settings.server_count(DEFAULTS)


def test_given_settings_replace_the_defaults() -> None:
    given = settings.membership_settings({"lease_s": 9.0, "sync": "async", "servers": 3}, 1, 2, pools=True)
    assert given == MembershipSettings(1, 2, lease_s=9.0, servers=3, replaces_members=True)
    assert settings.restart_limits({"restarts.user": 7}).user == 7


def test_run_that_synchronises_every_step_has_no_servers() -> None:
    assert settings.membership_settings({"sync": "step", "servers": 3}, 1, 2).servers == 0


def test_role_without_own_pools_uses_those_of_the_run() -> None:
    spec = RunSpec("t", ("t.py",), "/", (1, 1), on=("spot",), roles={"server": RoleSpec(on=("lab",), cpus=2)})
    required = settings.machine_requirements(spec)
    assert (required["trainer"].pools, required["server"].pools, required["evaluator"].pools) == (
        ("spot",),
        ("lab",),
        ("spot",),
    )
    assert required["server"].cpus == 2


def test_problem_of_several_pools_names_each_with_its_cause() -> None:
    problem = settings.no_machines("r", [PoolProblem("a", "down", "", "start it"), PoolProblem("b", "full")])
    assert problem.what == "pools a, b have no machines for run r"
    assert (problem.why, problem.do) == ("a: down; b: full", "a: start it")
