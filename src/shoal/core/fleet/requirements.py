"""What the processes of a role ask of their machines: pools, labels, and the size of a place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal.core.provisioning.events import PoolInfo
from shoal.errors import BadLabels, SlotTooSmall


@dataclass(frozen=True, slots=True)
class MachineRequirements:
    """On which machines processes of a role may run: those of these pools, or of any if none is named.

    `own` says that a machine that came by itself will not do, `apart` that the role has these pools for itself and not
    because its run has them. A place whose size is known must have so much.
    """

    pools: tuple[str, ...] = ()
    pools_only: bool = False
    reserved: bool = False
    cpus: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SlotSize:
    """What each place on a machine has."""

    cpus: int = 0
    memory_bytes: int = 0


def admits(terms: MachineRequirements, pool: str, size: SlotSize | None) -> bool:
    """Whether a machine of this pool, "" if it came by itself, will do; `size` is None where nobody asked for one."""
    if not pool:
        return not terms.pools_only
    if terms.pools and pool not in terms.pools:
        return False
    return size is None or (size.cpus >= terms.cpus and size.memory_bytes >= terms.memory_bytes)


def parse_where(text: str, where: str = "") -> dict[str, str]:
    """The labels of a constraint such as ``gpu=a100,zone=b``.

    >>> parse_where("gpu=a100, zone=b")
    {'gpu': 'a100', 'zone': 'b'}
    """
    found: dict[str, str] = {}
    for part in (one.strip() for one in text.split(",")):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not part:
            continue
        if not name or not equals or not value:
            raise BadLabels(f"{part!r} is no label", where=where, do="write NAME=VALUE, such as gpu=a100")
        if found.get(name, value) != value:
            raise BadLabels(f"{name} cannot be {found[name]} and {value} at once", where=where)
        found[name] = value
    return found


def matching(pools: Iterable[PoolInfo], names: tuple[str, ...], wanted: Mapping[str, str]) -> tuple[str, ...]:
    """Those of the pools named, or of all, whose machines carry these labels; if none was named, the cheapest first."""
    known = {pool.name: pool for pool in pools}
    if not wanted:
        return names
    chosen = names or tuple(sorted(known, key=lambda name: known[name].price_per_h))
    fit = tuple(n for n in chosen if n in known and wanted.items() <= dict(known[n].labels).items())
    if not fit:
        asked = ",".join(f"{name}={value}" for name, value in wanted.items())
        raise BadLabels(
            f"no pool has machines with {asked}",
            why=_labels_of(known[name] for name in chosen if name in known) or "no pool is described",
            do="correct --where, or add labels to a [pool.NAME]",
        )
    return fit


def _labels_of(pools: Iterable[PoolInfo]) -> str:
    shown = {pool.name: ",".join(f"{name}={value}" for name, value in pool.labels.items()) for pool in pools}
    return "; ".join(f"{name} has {labels or 'no labels'}" for name, labels in shown.items())


def check_size(role: str, terms: MachineRequirements, pools: Mapping[str, PoolInfo]) -> None:
    """An error for a role that does not fit into the places of a pool that says itself how large they are."""
    for pool in (pools[name] for name in terms.pools if name in pools):
        for what, each, have in (
            ("cpus", terms.cpus, pool.cpus // pool.slots),
            ("bytes of memory", terms.memory_bytes, pool.memory_bytes // pool.slots),
        ):
            if have and each > have:
                raise SlotTooSmall(
                    f"a {role} needs {each} {what}, and a place of pool {pool.name} has {have}",
                    where=f"[pool.{pool.name}]",
                    why=f"its machines are asked for with as much for {pool.slots} places",
                    do="let the pool say more or nothing, give it fewer slots, or ask for less",
                )
