"""Settings and description of a run, translated for the state machines that decide about it.

Settings arrive as a mapping from dotted names to values, already checked by `shoal.settings`. A missing name has the
default of the dataclass that it belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.core import sync_mode
from shoal.core.fleet.requirements import MachineRequirements
from shoal.core.fleet.restart_policy import RestartLimits
from shoal.core.membership.state import EVALUATOR, SERVER, TRAINER, MembershipSettings
from shoal.core.provisioning.events import PoolProblem
from shoal.core.runs.spec import Problem, RoleSpec, RunSpec, Value
from shoal.errors import NoMachines, NothingTrained

DEFAULT_SERVERS = 2

Settings = Mapping[str, Value]


def membership_settings(settings: Settings, low: int, high: int, *, pools: bool = False) -> MembershipSettings:
    """Return the settings of the membership of `low` to `high` members; `pools` if machines can be requested."""
    given: dict[str, Any] = _given(settings, ("lease_s", "reconnect_s", "regroup_s", "hang_timeout_s"), float)
    served = sync_mode.parse(str(settings.get("sync", "step"))).served
    servers = server_count(settings) if served else 0
    return MembershipSettings(min_members=low, max_members=high, servers=servers, replaces_members=pools, **given)


def server_count(settings: Settings) -> int:
    """Return how many servers a run has if its sync mode or its launcher needs servers at all."""
    return int(settings.get("servers", DEFAULT_SERVERS))


def restart_limits(settings: Settings) -> RestartLimits:
    """Return how often and how soon members are restarted."""
    counts: dict[str, Any] = _given(settings, ("restarts.user", "restarts.infrastructure"), int)
    waits: dict[str, Any] = _given(settings, ("backoff_s", "backoff_max_s"), float)
    return RestartLimits(**counts, **waits)


def _given(settings: Settings, names: Sequence[str], kind: type) -> dict[str, Any]:
    """Return the named settings that are present, by the last part of their names."""
    return {name.rpartition(".")[2]: kind(settings[name]) for name in names if name in settings}


def machine_requirements(spec: RunSpec) -> dict[str, MachineRequirements]:
    """Return what each role requires of its machines; a role without pools of its own uses those of the run."""
    requirements = {}
    for role in (TRAINER, SERVER, EVALUATOR):
        role_spec = spec.roles.get(role, RoleSpec())
        apart = role != TRAINER and bool(role_spec.on)
        pools, strict = (role_spec.on, True) if apart else (spec.on, bool(spec.where))
        # An evaluator without pools of its own takes any free slot, of whatever size.
        size = (role_spec.cpus, role_spec.memory_bytes) if apart or role != EVALUATOR else (0, 0)
        requirements[role] = MachineRequirements(pools, strict, apart, *size)
    return requirements


def trained_nothing(spec: RunSpec, *, joined: bool) -> Problem:
    """Return the error of a script that ended well without training in the run; `joined` if it called Shoal at all."""
    script = next(iter(spec.argv), "the script")
    if joined:
        what = f"{script} joined the run but trained nothing"
        why = "it ended before its first batch, so no step of the run was computed"
        do = "train over run.batches(…), or call fit in Keras, between shoal.join() and the end of the script"
    else:
        what = f"{script} ended without joining the run"
        why = "it never called Shoal, so every member trained a copy of its own, on all the data"
        do = (
            "add: import shoal.torch as shoal; run = shoal.join(); model, optimizer = run.attach(model, optimizer) "
            "(Keras: import shoal.keras as shoal), or start it unmodified: shoal run --compat torchrun"
        )
    return Problem(NothingTrained.code, what, "", why, do)


def no_machines(run: str, problems: Sequence[PoolProblem]) -> Problem:
    """Return the error of a run that cannot start: every pool with its cause and what to do."""
    if len(problems) == 1:
        (problem,) = problems
        what, where = f"pool {problem.pool} has no machine for run {run}", problem.where or f"[pool.{problem.pool}]"
        return Problem(NoMachines.code, what, where, problem.why, problem.do)
    names = ", ".join(problem.pool for problem in problems)
    why = "; ".join(f"{p.pool}: {p.why}" + (f" ({p.where})" if p.where else "") for p in problems)
    do = "; ".join(f"{p.pool}: {p.do}" for p in problems if p.do)
    return Problem(NoMachines.code, f"pools {names} have no machines for run {run}", "", why, do)
