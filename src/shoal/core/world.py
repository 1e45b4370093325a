"""World: which members take part in the training, with which rank, and which rank sends the state to which.

These values arrive from other processes, so they check their own bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.core import validation

MAX_HOSTS = 64
MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port on which a member listens for its peers; `others` are further hosts of its machine, same port."""

    host: str
    port: int
    others: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        validation.check_counts(self.port, most=MAX_PORT)
        validation.check_length(self.others, most=MAX_HOSTS)
        validation.check_names(self.host, *self.others)

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts, in the order in which peers should try them."""
        return (self.host, *self.others)


@dataclass(frozen=True, slots=True)
class Seat:
    """A member's seat in a world; its rank is its position. `speed` is the agent's estimate, 0 if unknown."""

    member: str
    incarnation: str
    address: Address
    speed: float = 0.0

    def __post_init__(self) -> None:
        validation.check_names(self.member, self.incarnation)
        validation.check_amount(self.speed)


@dataclass(frozen=True, slots=True)
class World:
    """A numbered, immutable group of members. Numbers only grow.

    `step` is the first step of the world; it is None in a proposal, whose members agree on it through their step
    reports. `fresh` marks a world that starts the training: rank 0's initial state is the state of the run.
    `sources` maps each rank that needs the state to the rank that sends it. The ranks of `catching_up` have no share of
    the first step, because their state is still on its way.
    """

    number: int
    seats: tuple[Seat, ...]
    step: int | None
    fresh: bool = False
    sources: dict[int, int] = field(default_factory=dict)
    catching_up: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        validation.check_counts(self.number, self.step)
        validation.check_length(self.seats, self.sources, self.catching_up)
        validation.check_counts(*self.sources, *self.sources.values(), *self.catching_up, most=len(self.seats) - 1)

    @property
    def size(self) -> int:
        return len(self.seats)

    def ranks(self) -> dict[str, int]:
        """Return the rank of each member; cheaper than `rank_of` for more than one member."""
        return {seat.member: rank for rank, seat in enumerate(self.seats)}

    def rank_of(self, member: str) -> int | None:
        """Return the rank of a member, None if it has no seat."""
        return next((rank for rank, seat in enumerate(self.seats) if seat.member == member), None)
