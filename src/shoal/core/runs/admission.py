"""What a run demands of the machines of a coordinator, checked before it is accepted; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shoal.core.fleet import requirements as fleet_requirements
from shoal.core.membership.state import EVALUATOR, SERVER, TRAINER
from shoal.core.provisioning import budget as provisioning_budget
from shoal.core.provisioning.events import PoolInfo
from shoal.core.runs.settings import machine_requirements
from shoal.core.runs.spec import RoleSpec, RunSpec
from shoal.errors import BadBudget, BadPool, BadRole

Pools = Mapping[str, PoolInfo]


def settle(spec: RunSpec, pools: Pools) -> RunSpec:
    """The same run with the pools that its labels mean, if all that it demands can be had here."""
    for names in (spec.on, *(role.on for role in spec.roles.values())):
        _check_known(names, pools)
    trainer = spec.roles.get(TRAINER, RoleSpec())
    if trainer.on:
        raise BadRole("the pools of the trainers are those of the run", do='pass on="…" to shoal.run, or --on')
    where = {**spec.where, **trainer.where}
    on = fleet_requirements.matching(pools.values(), spec.on, where)
    roles = {name: _role(role, where, pools) for name, role in spec.roles.items()}
    found = replace(spec, on=on, roles=roles, where=where)
    apart = [name for name, role in found.roles.items() if name in (SERVER, EVALUATOR) and role.on]
    if spec.compat and apart:
        raise BadRole(
            f"an unmodified script cannot have its {apart[0]} elsewhere",
            why="its processes are started all together",
            do="leave the pools of the role out, or --compat",
        )
    for name, asked in machine_requirements(found).items():
        fleet_requirements.check_size(name, asked, pools)
    check_budget(found, pools)
    return found


def check_budget(spec: RunSpec, pools: Pools) -> None:
    """An error for a budget that nothing is counted against, or that does not pay the least for a minute."""
    if spec.budget is None:
        return
    used = [*spec.on, *(name for role in spec.roles.values() for name in role.on)]
    if not any(pools[name].price_per_h for name in used):
        raise BadBudget(
            "a budget needs prices",
            why=f"none of {', '.join(used)} has one" if used else "the run takes no machines from pools",
            do="add price = … to the [pool.NAME] that the run is on",
        )
    check_left(spec, spec.budget, 0.0, pools)


def check_left(spec: RunSpec, budget: float | None, spent: float, pools: Pools) -> None:
    """An error if what is left does not pay the least that the run can do with for as long as it takes to stop."""
    prices = [pool.price_per_h * -(-spec.members[0] // pool.slots) for name in spec.on if (pool := pools.get(name))]
    if budget is None or not prices:
        return
    least = min(prices)
    if not provisioning_budget.can_pay(budget - spent, least, provisioning_budget.RESERVE_S):
        needed = least * provisioning_budget.RESERVE_S / 3600.0
        raise BadBudget(
            f"a budget of {budget:.2f} does not pay {spec.members[0]} members" + (" any longer" if spent else ""),
            why=f"{spent:.2f} are spent, and a minute of them, to stop in order, costs {needed:.4f}",
            do=f"give more than {spent + needed:.2f} with --budget",
        )


def _role(role: RoleSpec, where: Mapping[str, str], pools: Pools) -> RoleSpec:
    if not role.where:
        return role
    return replace(role, on=fleet_requirements.matching(pools.values(), role.on, {**where, **role.where}))


def _check_known(names: tuple[str, ...], pools: Pools) -> None:
    if missing := [name for name in names if name not in pools]:
        there = f"there are: {', '.join(pools)}" if pools else "it has none"
        raise BadPool(f"this coordinator has no pool {missing[0]!r}", do=f"name one of its pools; {there}")
