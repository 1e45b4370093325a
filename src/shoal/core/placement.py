"""Placement: which server holds which part of the state of a run with parameter servers.

The state is cut into parts: part 0 is the ticket ledger, the others are shards of the parameters. Each part has a
primary, which answers all requests, and a backup on another server, which has applied all that the primary
acknowledged. A learner is receiving a copy and then becomes the backup. With a single server there is no backup; if it
is lost, training goes back to the newest checkpoint. `core.parameter_server` has the theory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from shoal.core import validation
from shoal.core.world import Seat

LEDGER = 0


@dataclass(frozen=True, slots=True)
class PartAssignment:
    """The servers of one part, "" for none.

    `since` is the number of the placement in which the learner was chosen; it may be the backup by now. `handing_off`
    asks the primary to stop accepting updates, so that its backup can take over without losing any.
    """

    primary: str
    backup: str = ""
    learner: str = ""
    since: int = 0
    handing_off: bool = False

    def __post_init__(self) -> None:
        validation.check_names(self.primary, self.backup, self.learner)
        validation.check_counts(self.since)

    @property
    def copies(self) -> tuple[str, ...]:
        """All servers that have the part, or are receiving it."""
        return tuple(name for name in (self.primary, self.backup, self.learner) if name)


@dataclass(frozen=True, slots=True)
class Placement:
    """A numbered, immutable assignment of all parts to servers. Numbers only grow.

    `generation` grows when the state was lost and training went back to a checkpoint: an earlier one is void.
    `fresh` says that training has not begun in this generation: what the primaries have built is the truth.
    """

    number: int
    generation: int
    servers: tuple[Seat, ...]
    assignments: tuple[PartAssignment, ...]
    fresh: bool = False

    def __post_init__(self) -> None:
        validation.check_counts(self.number, self.generation)
        validation.check_length(self.servers, self.assignments)

    def seat_of(self, member: str) -> Seat | None:
        """Return the seat of a server, None if it has none."""
        return next((seat for seat in self.servers if seat.member == member), None)

    def held_by(self, member: str) -> tuple[int, ...]:
        """Return the parts that a server has, or is receiving."""
        return tuple(part for part, assignment in enumerate(self.assignments) if member in assignment.copies)


def part_name(part: int) -> str:
    """Return what users know a part by."""
    return "the ledger" if part == LEDGER else f"shard {part}"


def describe_uncopied(placement: Placement) -> str:
    """Return which parts have no complete copy, and on which servers; empty if every part has one.

    >>> describe_uncopied(Placement(1, 1, (), (PartAssignment("a", "b"), PartAssignment("b", learner="a"))))
    'shard 1 on b (being copied to a)'
    """
    return ", ".join(
        f"{part_name(part)} on {a.primary}" + (f" (being copied to {a.learner})" if a.learner else "")
        for part, a in enumerate(placement.assignments)
        if not a.backup
    )


def divide(sizes_bytes: Sequence[int], shards: int) -> tuple[tuple[int, ...], ...]:
    """Return the tensors of each shard, so that all shards have nearly the same bytes; every member computes the same.

    >>> divide([4, 1, 3, 2], 2)
    ((0, 1), (2, 3))
    """
    divided: list[list[int]] = [[] for _ in range(shards)]
    loads = [0] * shards
    for tensor in sorted(range(len(sizes_bytes)), key=lambda t: (-sizes_bytes[t], t)):
        lightest = min(range(shards), key=lambda s: (loads[s], s))
        divided[lightest].append(tensor)
        loads[lightest] += sizes_bytes[tensor]
    return tuple(tuple(sorted(shard)) for shard in divided)


def initial(servers: Sequence[str], parts: int, number: int, holder: str = "") -> tuple[PartAssignment, ...]:
    """Return the first assignments of a generation: spread over the servers, or all on the holder of a restored one."""
    primaries = tuple(PartAssignment(holder or servers[part % len(servers)]) for part in range(parts))
    return reassign(primaries, servers, (), number) or primaries


def reassign(
    assignments: Sequence[PartAssignment],
    remaining: Sequence[str],
    new: Sequence[str],
    number: int,
    leaving: Collection[str] = (),
) -> tuple[PartAssignment, ...] | None:
    """Return the assignments when only these servers remain and new ones have joined; None if a part is lost.

    Backups replace primaries that are gone, and parts without a backup get a learner. Leaving servers get nothing new
    and hand off what they have. `number` is that of the placement that is being made.
    """
    promoted = promote_backups(assignments, remaining)
    if promoted is None:
        return None
    result = list(promoted)
    staying = [name for name in (*remaining, *new) if name not in leaving]
    for part, assignment in enumerate(result):
        if assignment.learner or (assignment.backup and assignment.backup not in leaving):
            continue
        learner = _least_loaded(result, [name for name in staying if name not in assignment.copies])
        if learner:
            result[part] = replace(assignment, learner=learner, since=number)
        elif assignment.backup and assignment.primary not in leaving:
            result[part] = replace(assignment, backup="", handing_off=False)
    return tuple(_balance(result, leaving))


def promote_backups(
    assignments: Sequence[PartAssignment], remaining: Collection[str]
) -> tuple[PartAssignment, ...] | None:
    """Return the assignments when only these servers remain; None if a part is lost with all servers that had it."""
    kept = [_without_lost(assignment, remaining) for assignment in assignments]
    result = tuple(assignment for assignment in kept if assignment is not None)
    return result if len(result) == len(kept) else None


def complete_copy(assignment: PartAssignment, to: str, since: int) -> PartAssignment | None:
    """Return the assignment with the learner as backup; None if this is not about the present learner."""
    if assignment.learner != to or assignment.since != since:
        return None
    return replace(assignment, backup=to, learner="", handing_off=False)


def swap(assignment: PartAssignment) -> PartAssignment:
    """Return the assignment with primary and backup swapped, once the primary accepts no more updates."""
    return replace(assignment, primary=assignment.backup, backup=assignment.primary, handing_off=False)


def drop_replica(assignment: PartAssignment, server: str) -> PartAssignment:
    """Return the assignment without a server that its primary cannot reach, and that would miss further updates."""
    if server == assignment.backup:
        return replace(assignment, backup="", handing_off=False)
    return replace(assignment, learner="") if server == assignment.learner else assignment


def _without_lost(assignment: PartAssignment, servers: Collection[str]) -> PartAssignment | None:
    backup = assignment.backup if assignment.backup in servers else ""
    if assignment.primary not in servers:
        return PartAssignment(backup) if backup else None
    learner = assignment.learner if assignment.learner in servers else ""
    handing_off = assignment.handing_off and bool(backup)
    return replace(assignment, backup=backup, learner=learner, handing_off=handing_off)


def _least_loaded(assignments: Sequence[PartAssignment], names: Sequence[str]) -> str:
    return min(names, key=lambda name: (sum(name in a.copies for a in assignments), names.index(name)), default="")


def _balance(assignments: list[PartAssignment], leaving: Collection[str]) -> list[PartAssignment]:
    """Hand parts off to their backups where the primary leaves, and shards also where the primary leads too many.

    The ledger counts as half a shard and stays where it is: if it moved instead of a shard, a server that returns would
    get the ledger, and both shards would remain on the other one.
    """
    led = {name: 0 for assignment in assignments for name in assignment.copies}
    for part, assignment in enumerate(assignments):
        led[assignment.backup if assignment.handing_off else assignment.primary] += _weight(part)
    balanced: list[PartAssignment] = []
    for part, assignment in enumerate(assignments):
        able = bool(assignment.backup) and assignment.backup not in leaving and not assignment.handing_off
        lopsided = able and part != LEDGER and led[assignment.primary] - led[assignment.backup] > _weight(part)
        if able and (assignment.primary in leaving or lopsided):
            led[assignment.primary] -= _weight(part)
            led[assignment.backup] += _weight(part)
            assignment = replace(assignment, handing_off=True)
        balanced.append(assignment)
    return balanced


def _weight(part: int) -> int:
    return 1 if part == LEDGER else 2
