"""What the settings and the description of a run mean to those who decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shoal.core import sync_mode
from shoal.core.fleet import restart_policy
from shoal.core.fleet.requirements import MachineRequirements
from shoal.core.membership import decide as membership
from shoal.core.membership.state import EVALUATOR, SERVER, TRAINER
from shoal.core.provisioning import events as se
from shoal.core.runs import events as runs_events
from shoal.errors import NoMachines
from shoal.settings import RunSettings
from shoal.wire.api import ErrorView, RoleSpec, RunSpec


def rules_of(
    settings: Mapping[str, runs_events.Value], low: int, high: int, *, hires: bool = False
) -> membership.MembershipSettings:
    given = {
        key: float(settings[key])
        for key in ("lease_s", "reconnect_s", "regroup_s", "hang_timeout_s")
        if key in settings
    }
    servers = servers_of(settings)
    rules = membership.MembershipSettings(min_members=low, max_members=high, servers=servers, hires=hires)
    return replace(rules, **given)  # type: ignore[arg-type]


def servers_of(settings: Mapping[str, runs_events.Value]) -> int:
    """How many servers a run has: none if its members wait for each other at every step."""
    if not sync_mode.parse(str(settings.get("sync", "step"))).served:
        return 0
    return int(settings.get("servers", RunSettings().servers))


def restarts_of(settings: Mapping[str, runs_events.Value]) -> restart_policy.RestartLimits:
    return restart_policy.RestartLimits(
        user=int(settings.get("restarts.user", RunSettings().restarts_user)),
        infrastructure=int(settings.get("restarts.infrastructure", RunSettings().restarts_infrastructure)),
        backoff_s=float(settings.get("backoff_s", RunSettings().backoff_s)),
        backoff_max_s=float(settings.get("backoff_max_s", RunSettings().backoff_max_s)),
    )


def terms_of(spec: RunSpec) -> dict[str, MachineRequirements]:
    """What each role of a run asks of its machines; a role without pools of its own has the run's."""
    found = {}
    for role in (TRAINER, SERVER, EVALUATOR):
        said = spec.roles.get(role, RoleSpec())
        apart = role != TRAINER and bool(said.on)
        pools, own = (said.on, True) if apart else (spec.on, bool(spec.where))
        # An evaluator without a place of its own takes what others leave, of machines of any size.
        size = (said.cpus, said.memory_bytes) if apart or role != EVALUATOR else (0, 0)
        found[role] = MachineRequirements(pools, own, apart, *size)
    return found


def no_machines(run: str, troubles: Sequence[se.PoolProblem]) -> ErrorView:
    """Why a run cannot begin, as an error that names each pool, its cause and the remedy."""
    if len(troubles) == 1:
        (one,) = troubles
        what, where = f"pool {one.pool} has no machine for run {run}", one.where or f"[pool.{one.pool}]"
        return ErrorView(NoMachines.code, what, where, one.why, one.do)
    names = ", ".join(one.pool for one in troubles)
    why = "; ".join(f"{one.pool}: {one.why}" + (f" ({one.where})" if one.where else "") for one in troubles)
    do = "; ".join(f"{one.pool}: {one.do}" for one in troubles if one.do)
    return ErrorView(NoMachines.code, f"the pools {names} have no machines for run {run}", "", why, do)
