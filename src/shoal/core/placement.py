"""Where the parts of a run's state live when servers hold it: each on a primary, with a backup on another server.

The state is cut into parts: part 0 is the ledger of tickets (see `core.clock`), the others are shards of the
parameters. A part's primary answers for it; its backup has taken in all that the primary ever acknowledged, so the
loss of one server loses nothing. A learner is being given a copy and becomes the backup when that is complete. With a
single server there is no backup, and the newest checkpoint is what is left if it is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from shoal.core.world import Seat

LEDGER = 0


@dataclass(frozen=True, slots=True)
class PartAssignment:
    """Who holds one part. `since` is the placement in which the learner, now perhaps the backup, was chosen.

    `handing_off` asks the primary to come to rest, so that the backup can take over without losing anything.
    """

    primary: str
    backup: str = ""
    learner: str = ""
    since: int = 0
    handing_off: bool = False

    @property
    def copies(self) -> tuple[str, ...]:
        return tuple(name for name in (self.primary, self.backup, self.learner) if name)


@dataclass(frozen=True, slots=True)
class Placement:
    """A numbered, immutable answer to the question who holds what. Numbers only grow.

    `generation` grows when the state was lost and training went back to a checkpoint: an earlier one is void.
    `fresh` says that training has not begun in this generation: what the primaries have built is the truth.
    """

    number: int
    generation: int
    servers: tuple[Seat, ...]
    assignments: tuple[PartAssignment, ...]
    fresh: bool = False

    def seat_of(self, member: str) -> Seat | None:
        return next((seat for seat in self.servers if seat.member == member), None)

    def held_by(self, member: str) -> tuple[int, ...]:
        """The parts that this server has anything to do with."""
        return tuple(part for part, holding in enumerate(self.assignments) if member in holding.copies)


def divide(sizes_bytes: Sequence[int], shards: int) -> tuple[tuple[int, ...], ...]:
    """Deal tensors out over shards so that the shards have nearly the same bytes; the same on every member.

    >>> divide([4, 1, 3, 2], 2)
    ((0, 1), (2, 3))
    """
    found: list[list[int]] = [[] for _ in range(shards)]
    loads = [0] * shards
    for tensor in sorted(range(len(sizes_bytes)), key=lambda t: (-sizes_bytes[t], t)):
        lightest = min(range(shards), key=lambda s: (loads[s], s))
        found[lightest].append(tensor)
        loads[lightest] += sizes_bytes[tensor]
    return tuple(tuple(sorted(shard)) for shard in found)


def initial(servers: Sequence[str], parts: int, number: int, holder: str = "") -> tuple[PartAssignment, ...]:
    """The first assignments of a generation: dealt out in turn, or all with the one who holds a restored state."""
    given = tuple(PartAssignment(holder or servers[part % len(servers)]) for part in range(parts))
    return reassign(given, servers, (), number) or given


def reassign(
    assignments: Sequence[PartAssignment],
    left: Sequence[str],
    new: Sequence[str],
    number: int,
    leaving: Collection[str] = (),
) -> tuple[PartAssignment, ...] | None:
    """The assignments when only these servers are left and new ones came; None if a part is lost with all that held it.

    Backups stand in for primaries that are gone, and parts without a backup get a learner. Those who are leaving get
    nothing new and hand over what they have.
    """
    mended = promote_backups(assignments, left)
    if mended is None:
        return None
    found = list(mended)
    staying = [name for name in (*left, *new) if name not in leaving]
    for part, holding in enumerate(found):
        if holding.learner or (holding.backup and holding.backup not in leaving):
            continue
        learner = _least_loaded(found, [name for name in staying if name not in holding.copies])
        if learner:
            found[part] = replace(holding, learner=learner, since=number)
        elif holding.backup and holding.primary not in leaving:
            found[part] = replace(holding, backup="", handing_off=False)
    return tuple(_balance(found, leaving))


def promote_backups(assignments: Sequence[PartAssignment], left: Collection[str]) -> tuple[PartAssignment, ...] | None:
    """The assignments when only these servers are left; None if a part is lost with all that held it."""
    mended = [_without_lost(holding, left) for holding in assignments]
    found = tuple(holding for holding in mended if holding is not None)
    return found if len(found) == len(mended) else None


def complete_copy(holding: PartAssignment, to: str, since: int) -> PartAssignment | None:
    """The learner has all: it is the backup now. None if that is not news of this learner."""
    if holding.learner != to or holding.since != since:
        return None
    return replace(holding, backup=to, learner="", handing_off=False)


def swap(holding: PartAssignment) -> PartAssignment:
    """The primary has come to rest: it and the backup change places."""
    return replace(holding, primary=holding.backup, backup=holding.primary, handing_off=False)


def drop_replica(holding: PartAssignment, gone: str) -> PartAssignment:
    """The primary cannot reach this one, which therefore misses what is acknowledged from now on."""
    if gone == holding.backup:
        return replace(holding, backup="", handing_off=False)
    return replace(holding, learner="") if gone == holding.learner else holding


def _without_lost(holding: PartAssignment, servers: Collection[str]) -> PartAssignment | None:
    backup = holding.backup if holding.backup in servers else ""
    if holding.primary not in servers:
        return PartAssignment(backup) if backup else None
    learner = holding.learner if holding.learner in servers else ""
    return replace(holding, backup=backup, learner=learner, handing_off=holding.handing_off and bool(backup))


def _least_loaded(assignments: Sequence[PartAssignment], names: Sequence[str]) -> str:
    return min(names, key=lambda name: (sum(name in h.copies for h in assignments), names.index(name)), default="")


def _balance(assignments: list[PartAssignment], leaving: Collection[str]) -> list[PartAssignment]:
    """Let backups take over from those who are leaving, and from those who answer for two parts more than they do."""
    led = {name: 0 for holding in assignments for name in holding.copies}
    for holding in assignments:
        led[holding.backup if holding.handing_off else holding.primary] += 1
    found: list[PartAssignment] = []
    for holding in assignments:
        able = bool(holding.backup) and holding.backup not in leaving and not holding.handing_off
        lopsided = able and led[holding.primary] - led[holding.backup] >= 2
        if able and (holding.primary in leaving or lopsided):
            led[holding.primary] -= 1
            led[holding.backup] += 1
            holding = replace(holding, handing_off=True)
        found.append(holding)
    return found
