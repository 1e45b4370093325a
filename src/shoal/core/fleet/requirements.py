"""Machine requirements: on which pools the processes of a role may run, and how large a slot they need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal.core.nouns import counted
from shoal.core.provisioning.events import PoolInfo
from shoal.errors import BadLabels, SlotTooSmall


@dataclass(frozen=True, slots=True)
class MachineRequirements:
    """On which machines processes of a role may run: those of `pools`, or of any pool if none is named.

    `pools_only` excludes machines whose agent was started by hand. `reserved`: the role has these pools for itself, not
    because its run has them. `cpus` and `memory_bytes` are needed for each slot, where the size of a slot is known.
    """

    pools: tuple[str, ...] = ()
    pools_only: bool = False
    reserved: bool = False
    cpus: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SlotSize:
    """Size of each slot of a machine."""

    cpus: int = 0
    memory_bytes: int = 0


def admits(needed: MachineRequirements, pool: str, size: SlotSize | None) -> bool:
    """Return whether a machine meets the requirements.

    `pool` is "" for a machine whose agent was started by hand; `size` is None if no size was requested.
    """
    if not pool:
        return not needed.pools_only
    if needed.pools and pool not in needed.pools:
        return False
    return size is None or (size.cpus >= needed.cpus and size.memory_bytes >= needed.memory_bytes)


def parse_where(text: str, where: str = "") -> dict[str, str]:
    """Return the labels of a constraint such as ``gpu=a100,zone=b``; raise BadLabels if it is malformed.

    >>> parse_where("gpu=a100, zone=b")
    {'gpu': 'a100', 'zone': 'b'}
    """
    labels: dict[str, str] = {}
    for part in (label.strip() for label in text.split(",")):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not part:
            continue
        if not name or not equals or not value:
            raise BadLabels(f"invalid label {part!r}", where=where, do="write NAME=VALUE, such as gpu=a100")
        if labels.get(name, value) != value:
            raise BadLabels(f"label {name} is given twice: {labels[name]} and {value}", where=where)
        labels[name] = value
    return labels


def matching(pools: Iterable[PoolInfo], names: tuple[str, ...], labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return those of the named pools, or of all, whose machines have these labels; raise BadLabels if none has.

    Without names, the cheapest pool comes first; without labels, the names are returned as they are.
    """
    by_name = {pool.name: pool for pool in pools}
    if not labels:
        return names
    chosen = names or tuple(sorted(by_name, key=lambda name: by_name[name].price_per_h))
    fit = tuple(n for n in chosen if n in by_name and labels.items() <= dict(by_name[n].labels).items())
    if not fit:
        wanted = ",".join(f"{name}={value}" for name, value in labels.items())
        raise BadLabels(
            f"no pool has machines with {wanted}",
            why=_describe(by_name[name] for name in chosen if name in by_name) or "no pool is described",
            do="correct --where, or add labels to a [pool.NAME]",
        )
    return fit


def _describe(pools: Iterable[PoolInfo]) -> str:
    labels = {pool.name: ",".join(f"{name}={value}" for name, value in pool.labels.items()) for pool in pools}
    return "; ".join(f"{name} has {text or 'no labels'}" for name, text in labels.items())


def check_size(role: str, needed: MachineRequirements, pools: Mapping[str, PoolInfo]) -> None:
    """Raise SlotTooSmall if a role does not fit into the slots of a pool that states their size."""
    for pool in (pools[name] for name in needed.pools if name in pools):
        for what, each, have in (
            ("cpus", needed.cpus, pool.cpus // pool.slots),
            ("bytes of memory", needed.memory_bytes, pool.memory_bytes // pool.slots),
        ):
            if have and each > have:
                raise SlotTooSmall(
                    f"a {role} needs {each} {what}, but a slot in pool {pool.name} has {have}",
                    where=f"[pool.{pool.name}]",
                    why=f"its machines are requested with as much for {counted(pool.slots, 'slot')}",
                    do="state a larger size for the pool or none, give it fewer slots, or ask for less",
                )
