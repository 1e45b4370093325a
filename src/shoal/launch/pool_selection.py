"""Selection of the pools that a run takes machines from: by name, by label, and per role.

- `--on a,b` names the trainers' pools in order of preference; `--where` keeps those whose labels match. Labels without
  names select among all pools of shoal.toml, the cheapest first.
- `--servers-on` and `--evaluator-on` give a role pools of its own; otherwise it shares the trainers' machines.
- Without any of these, no pool is used: one agent on this machine starts all members.

`local` is a pool that always exists. It is used like any other as soon as some role has pools of its own, because then
the coordinator allocates all machines of the run, this one included.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.core import sync_mode
from shoal.core.fleet import requirements
from shoal.core.membership.state import EVALUATOR, SERVER
from shoal.engines import pool_config
from shoal.errors import BadPool, BadRole
from shoal.launch.coordinator_target import LOCAL
from shoal.launch.settings_layers import ResolvedSettings
from shoal.wire.api import RoleSpec, RunSpec

LOCAL_POOL = {"engine": "local"}
ROLE_SETTINGS = {EVALUATOR: "evaluator_on", SERVER: "servers_on"}
ROLE_OPTIONS = {EVALUATOR: "--evaluator-on", SERVER: "--servers-on"}


def named_pools(settings: ResolvedSettings, setting: str = "on") -> tuple[str, ...]:
    """Return the pool names in ``--on``, or in another setting of that kind, unchecked."""
    return tuple(name.strip() for name in settings.text(setting).split(",") if name.strip())


def configured_pools(settings: ResolvedSettings, setting: str = "on") -> tuple[str, ...]:
    """Return the pool names in a setting; raise BadPool unless shoal.toml describes each of them."""
    names = named_pools(settings, setting)
    for name in names:
        if name not in settings.pools and name != LOCAL:
            existing = sorted({*settings.pools, LOCAL})
            raise BadPool(
                f"unknown pool {name!r}",
                where=settings.source(setting),
                do=f"describe it under [pool.{name}] in shoal.toml, or use one of: {', '.join(existing)}",
            )
    if len(set(names)) < len(names):
        raise BadPool(f"a pool is named twice in {settings.text(setting)!r}", where=settings.source(setting))
    return names


def select_pools(settings: ResolvedSettings, roles: Mapping[str, RoleSpec]) -> tuple[str, ...]:
    """Return the pools that match ``--on`` and ``--where``; none if one agent on this machine is enough."""
    names, labels = named_pools(settings), required_labels(settings)
    if names in ((), (LOCAL,)) and LOCAL not in settings.pools and not labels:
        # If some role has pools of its own, the other roles still need machines: those of the pool "local".
        return (LOCAL,) if any(role.on for role in roles.values()) else ()
    return pools_with_labels(settings, configured_pools(settings), labels)


def required_labels(settings: ResolvedSettings) -> dict[str, str]:
    """Return the labels of ``--where``."""
    return requirements.parse_where(settings.text("where"), settings.source("where"))


def pools_with_labels(settings: ResolvedSettings, names: tuple[str, ...], labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return those of the named pools, or of all in shoal.toml if none is named, that carry the labels."""
    tables = {name: settings.pools.get(name, LOCAL_POOL) for name in (*settings.pools, *names)}
    pools = [pool_config.parse(name, table, str(settings.file or ""))[0] for name, table in tables.items()]
    return requirements.matching(pools, names, labels)


def roles_with_pools(settings: ResolvedSettings, *, standing: bool = False) -> dict[str, RoleSpec]:
    """Return the roles that have pools of their own; a standing coordinator checks the names itself."""
    roles = {}
    for role, setting in ROLE_SETTINGS.items():
        names = named_pools(settings, setting) if standing else configured_pools(settings, setting)
        has_role = has_evaluator(settings) if role == EVALUATOR else sync_mode.parse(settings.text("sync")).served
        if names and not has_role and settings.source(setting) == ROLE_OPTIONS[role]:
            raise BadRole(
                f"this run has no {role} to start on {', '.join(names)}",
                where=settings.source(setting),
                do="add --evaluator" if role == EVALUATOR else "add --sync stale:3 or --sync async",
            )
        if names and has_role:
            roles[role] = RoleSpec(on=names)
    return roles


def has_evaluator(settings: ResolvedSettings) -> bool:
    return bool(settings.values["evaluator"].value)


def run_pools(spec: RunSpec) -> tuple[str, ...]:
    """Return all pools that a run takes machines from, for any role."""
    return tuple(dict.fromkeys((*spec.on, *(name for role in spec.roles.values() for name in role.on))))


def lacks_shared_disk(settings: ResolvedSettings, spec: RunSpec) -> bool:
    """Return whether some machine of the run's pools cannot see this disk."""
    engines = [pool_config.parse(name, settings.pools.get(name, LOCAL_POOL))[1] for name in run_pools(spec)]
    return not all(engine.shared for engine in engines)
