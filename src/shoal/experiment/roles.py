"""Roles of a run: how many processes each has, and what each process needs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.core.fleet.requirements import parse_where
from shoal.errors import BadRole
from shoal.wire.api import RoleSpec

TRAINER, EVALUATOR, SERVER = "trainer", "evaluator", "server"
ROLES = (TRAINER, EVALUATOR, SERVER)
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


@dataclass(frozen=True, slots=True)
class Role:
    """The requirements of one role.

    `count` is the number of processes, or MIN:MAX for trainers. `cpus` is the number of threads that each computes
    with, 0 for the default. `memory`, such as "2GiB", is the limit at which a process is killed; empty for no limit.
    `on` names pools for this role alone, such as "lab", and `where` labels that their machines must carry, such as
    "gpu=a100".
    """

    count: int | str = 1
    memory: int | str = ""
    cpus: int = 0
    on: str = ""
    where: str = ""

    @property
    def pools(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.on.split(",") if name.strip())

    @property
    def memory_bytes(self) -> int:
        """The memory limit in bytes, 0 for none."""
        return self.memory if isinstance(self.memory, int) else _bytes_of(self.memory)


def check(roles: Mapping[str, Role]) -> None:
    """Raise BadRole for an unknown role or an impossible requirement."""
    for name, role in roles.items():
        if name not in ROLES:
            raise BadRole(f"unknown role {name!r}", do=f"the roles are {', '.join(ROLES)}")
        if not isinstance(role, Role):
            raise BadRole(f"role {name} is a {type(role).__name__}", do="pass a shoal.Role(count=…)")
        if not isinstance(role.cpus, int) or role.cpus < 0 or role.memory_bytes < 0:
            raise BadRole(f"role {name}: cpus and memory must not be negative", do="leave them out for no limit")
        if name == EVALUATOR and str(role.count) not in ("0", "1"):
            raise BadRole(f"a run cannot have {role.count} evaluators", do="set count to 0 or 1")
        if name != TRAINER and not str(role.count).isdecimal():
            raise BadRole(f"role {name}: count {role.count!r} is not a number", why="only trainers may have MIN:MAX")


def specs(roles: Mapping[str, Role]) -> dict[str, RoleSpec]:
    """Return what the coordinator needs to know of each role; the trainers' pools and bounds are fields of the run."""
    result = {}
    for name, role in roles.items():
        placement = (role.pools, parse_where(role.where, f"Role({name!r}).where")) if name != TRAINER else ()
        result[name] = RoleSpec(_count(role), role.cpus, role.memory_bytes, *placement)
    return result


def _count(role: Role) -> int:
    return int(str(role.count).rpartition(":")[2])


def _bytes_of(text: str) -> int:
    """Return the bytes of a size such as 512MiB or 2G; all units are powers of 1024."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?\s*", text.lower())
    if not text:
        return 0
    if match is None:
        raise BadRole(f"invalid memory size {text!r}", do='write "512MiB" or "2GiB"')
    return int(float(match[1]) * (1 << _UNITS[match[2]]))
