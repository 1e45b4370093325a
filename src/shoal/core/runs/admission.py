"""Admission: checks that the pools of a coordinator can run a submitted run, before it is accepted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shoal.core.fleet import requirements as fleet_requirements
from shoal.core.fleet.state import MAX_MEMBERS
from shoal.core.membership.state import EVALUATOR, SERVER, TRAINER
from shoal.core.nouns import counted
from shoal.core.provisioning import budget as provisioning_budget
from shoal.core.provisioning.events import PoolInfo
from shoal.core.runs.settings import machine_requirements
from shoal.core.runs.spec import RoleSpec, RunSpec
from shoal.errors import BadBudget, BadCount, BadName, BadPool, BadRole

Pools = Mapping[str, PoolInfo]
MAX_NAME = 100


def check_name(name: str, where: str = "") -> None:
    """Raise BadName unless a run's name can be printed in one line."""
    if name != printable_name(name):
        why = f"it has {len(name)} characters" if len(name) > MAX_NAME else "it has control characters"
        do = f"use at most {MAX_NAME} printable characters"
        raise BadName(f"invalid name of a run: {name[:MAX_NAME]!r}", where=where, why=why, do=do)


def printable_name(text: str) -> str:
    """Return a text as a name that fits in one line of a terminal.

    >>> printable_name("a\\nb")
    'a_b'
    """
    return "".join(character if character.isprintable() else "_" for character in text[:MAX_NAME])


def check_members(low: int, high: int, where: str = "") -> None:
    """Raise BadCount unless a run can have between `low` and `high` members."""
    if not 1 <= low <= high:
        raise BadCount(f"invalid member count {low}:{high}", where=where, why="need 1 ≤ MIN ≤ MAX")
    if high > MAX_MEMBERS:
        why = f"a run has at most {MAX_MEMBERS}"
        raise BadCount(f"too many members: {high:.6g}", where=where, why=why, do=f"use -n {low}:{MAX_MEMBERS} or less")


def admit(spec: RunSpec, pools: Pools) -> RunSpec:
    """Return the run with its labels resolved to pools; raise BadPool, BadRole or BadBudget."""
    for names in (spec.on, *(role.on for role in spec.roles.values())):
        _check_names(names, pools)
    trainer = spec.roles.get(TRAINER, RoleSpec())
    if trainer.on:
        raise BadRole(
            "trainers cannot have pools of their own", why="they use the run's", do='pass on="…" to shoal.run, or --on'
        )
    where = {**spec.where, **trainer.where}
    on = fleet_requirements.matching(pools.values(), spec.on, where)
    roles = {name: _resolve_role(role, where, pools) for name, role in spec.roles.items()}
    admitted = replace(spec, on=on, roles=roles, where=where)
    apart = [name for name, role in admitted.roles.items() if name in (SERVER, EVALUATOR) and role.on]
    if spec.compat and apart:
        raise BadRole(
            f"an unmodified script cannot have pools for its {apart[0]} alone",
            why="all its processes are started together",
            do="leave out the pools of the role, or --compat",
        )
    for name, required in machine_requirements(admitted).items():
        fleet_requirements.check_size(name, required, pools)
    check_budget(admitted, pools)
    return admitted


def check_budget(spec: RunSpec, pools: Pools) -> None:
    """Raise BadBudget if no pool of the run has a price, or the budget does not pay for a minute."""
    if spec.budget is None:
        return
    used = [*spec.on, *(name for role in spec.roles.values() for name in role.on)]
    if not any(pools[name].price_per_h for name in used):
        raise BadBudget(
            "a budget needs prices",
            why=f"none of {', '.join(used)} has one" if used else "the run takes no machines from pools",
            do="add price = … to the [pool.NAME] that the run uses",
        )
    check_remaining_budget(spec, spec.budget, 0.0, pools)


def check_remaining_budget(spec: RunSpec, budget: float | None, spent: float, pools: Pools) -> None:
    """Raise BadBudget if the rest of the budget does not pay the minimum of members until they have stopped."""
    prices = [pool.price_per_h * -(-spec.members[0] // pool.slots) for name in spec.on if (pool := pools.get(name))]
    if budget is None or not prices:
        return
    least = min(prices)
    if not provisioning_budget.can_pay(budget - spent, least, provisioning_budget.RESERVE_S):
        needed = least * provisioning_budget.RESERVE_S / 3600.0
        raise BadBudget(
            f"a budget of {budget:.2f} does not pay for {counted(spec.members[0], 'member')}"
            + (" any longer" if spent else ""),
            why=f"{spent:.2f} is spent, and a minute of them, to stop cleanly, costs {needed:.4f}",
            do=f"set --budget above {spent + needed:.2f}",
        )


def _resolve_role(role: RoleSpec, where: Mapping[str, str], pools: Pools) -> RoleSpec:
    if not role.where:
        return role
    return replace(role, on=fleet_requirements.matching(pools.values(), role.on, {**where, **role.where}))


def _check_names(names: tuple[str, ...], pools: Pools) -> None:
    if missing := [name for name in names if name not in pools]:
        do = f"use one of {', '.join(pools)}" if pools else "start the coordinator with pools"
        raise BadPool(f"unknown pool {missing[0]!r}", why="" if pools else "this coordinator has no pools", do=do)
