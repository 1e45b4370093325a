"""What a run needs of each role, and what that means in settings."""

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
    """What is needed of the processes of one role.

    `count` is how many: a number, or MIN:MAX for trainers. `cpus` is how many threads each computes with. `memory`,
    such as "2GiB", is how much each may use before it is ended; empty for no limit. `on` names pools for this role
    alone, such as "lab", and `where` labels that their machines must carry, such as "gpu=a100".
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
        """The limit in bytes, 0 for none."""
        return self.memory if isinstance(self.memory, int) else _bytes_of(self.memory)


def check(roles: Mapping[str, Role]) -> None:
    """An error for what cannot be had, whatever it is started with."""
    for name, role in roles.items():
        if name not in ROLES:
            raise BadRole(f"there is no role {name!r}", do=f"the roles are {', '.join(ROLES)}")
        if not isinstance(role, Role):
            raise BadRole(f"the role {name} is a {type(role).__name__}", do="pass a shoal.Role(count=…)")
        if not isinstance(role.cpus, int) or role.cpus < 0 or role.memory_bytes < 0:
            raise BadRole(f"the role {name} has less than nothing", do="leave cpus and memory out for no limit")
        if name == EVALUATOR and str(role.count) not in ("0", "1"):
            raise BadRole(f"a run cannot have {role.count} evaluators", do="ask for one, or none")
        if name != TRAINER and not str(role.count).isdecimal():
            raise BadRole(f"the count of role {name} is {role.count!r}", why="only the number of trainers may change")


def specs(roles: Mapping[str, Role]) -> dict[str, RoleSpec]:
    """What the coordinator is told of each role; how many trainers there are, and where, is said elsewhere."""
    found = {}
    for name, role in roles.items():
        apart = (role.pools, parse_where(role.where, f"Role({name!r}).where")) if name != TRAINER else ()
        found[name] = RoleSpec(_count(role), role.cpus, role.memory_bytes, *apart)
    return found


def _count(role: Role) -> int:
    return int(str(role.count).rpartition(":")[2])


def _bytes_of(text: str) -> int:
    """The bytes of a size such as 512MiB or 2G; a letter alone means 1024."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?\s*", text.lower())
    if not text:
        return 0
    if found is None:
        raise BadRole(f"{text!r} is no amount of memory", do='write "512MiB" or "2GiB"')
    return int(float(found[1]) * (1 << _UNITS[found[2]]))
