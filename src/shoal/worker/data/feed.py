"""What a training loop is fed with: slices of an indexable dataset, or lanes of a stream."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shoal.core.data.lanes import LaneLayout, advance
from shoal.core.data.sample_order import Cursor, SampleOrder
from shoal.core.shares import split as shares_split
from shoal.core.shares.balancer import FIRST_WINDOWS, ShareBalancer, StepMeasurement, parse
from shoal.core.shares.reduction_tree import ShardRange
from shoal.core.step_report import StepReport
from shoal.core.world import World
from shoal.worker.data.share_loader import ShareLoader
from shoal.worker.data.stream_reader import LaneReader


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Something that all members changed alike at a commit, from which step on, and why."""

    step: int
    what: str
    values: dict[str, int]
    reason: str


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One batch for the loop's body, and how many samples of the global batch it holds: 0 for a ghost's."""

    batch: Any
    samples: int

    def take(self) -> Any:
        """The batch, at the moment it is given out."""
        return self.batch


class Feed(Protocol):
    """Gives every member its part of every step.

    `balancer` deals out units: samples of an indexed dataset, lanes of a stream; `units` is how many the last pieces of
    this member were. In exact mode `shard_range` says which shards they were.
    """

    total: int | None
    balancer: ShareBalancer
    units: int
    shard_range: ShardRange | None

    @property
    def micro_batch_size(self) -> int | None: ...

    def halve_micro_batch(self, samples: int) -> bool: ...

    def ended(self, step: int) -> bool: ...

    def cursor(self, step: int) -> Cursor: ...

    def global_batch_size(self, step: int) -> int: ...

    def micro_batches(self, step: int, world: World, rank: int, ghosts: Collection[int]) -> list[MicroBatch]: ...

    def has_more(self) -> bool: ...

    def on_commit(self, step: int, world: World, everybody: Sequence[StepReport]) -> list[Adjustment]: ...

    def start(self) -> None: ...

    def close(self) -> None: ...


class IndexedFeed:
    """Global batches of a map-style dataset."""

    def __init__(self, order: SampleOrder, loader: ShareLoader, balance: ShareBalancer) -> None:
        self.total: int | None = order.total_steps
        self.balancer, self.units = balance, 0
        self.shard_range: ShardRange | None = None
        self._order, self._loader = order, loader

    @property
    def micro_batch_size(self) -> int | None:
        """The largest piece that this member computes at once."""
        return self._loader.micro_batch_size

    def halve_micro_batch(self, samples: int) -> bool:
        """A piece of so many samples did not fit: halve it. False if nothing smaller can be given out."""
        if samples < 2:
            return False
        self._loader.micro_batch_size = samples // 2
        return True

    def ended(self, step: int) -> bool:
        return step >= self._order.total_steps

    def cursor(self, step: int) -> Cursor:
        return self._order.cursor(step)

    def global_batch_size(self, step: int) -> int:
        return self._order.size_of(step)

    def micro_batches(self, step: int, world: World, rank: int, ghosts: Collection[int]) -> list[MicroBatch]:
        members = told(self.balancer, world)

        def ahead(later: int) -> tuple[int, int] | None:
            return None if self.ended(later) else self._span(later, members, rank, ())

        if self._loader.micro_batch_size is None:
            # What did not fit into this member's memory before it was started again does not fit now.
            self._loader.micro_batch_size = self.balancer.micro_batch_of(members[rank])
        span = self._span(step, members, rank, ghosts)
        self.units = span[1] - span[0]
        ghost = [MicroBatch(self._loader.placeholder_batch(step), 0)] if span[0] == span[1] else []
        # Also with an empty share: the workers read ahead for the steps in which it is not.
        batches = self._loader.take(step, span, ahead)
        if ghost:
            return ghost
        return [MicroBatch(b, n) for b, n in zip(batches, self._sizes(step, span), strict=True)]

    @property
    def order(self) -> SampleOrder:
        return self._order

    def read_span(self, step: int, start: int, stop: int) -> list[MicroBatch]:
        """The pieces of any span of a global batch; nobody knows which one comes next, so nothing is read ahead."""
        batches = self._loader.take(step, (start, stop), lambda _later: None)
        return [MicroBatch(b, n) for b, n in zip(batches, self._loader.sizes((start, stop)), strict=True)]

    def has_more(self) -> bool:
        return True

    def on_commit(self, step: int, world: World, everybody: Sequence[StepReport]) -> list[Adjustment]:
        left = self._order.total_steps - step - 1
        return _observe(self.balancer, step, world, everybody, self.cursor(step).epoch, left)

    def start(self) -> None:
        self._loader.start()

    def close(self) -> None:
        self._loader.close()

    def _sizes(self, step: int, span: tuple[int, int]) -> tuple[int, ...]:  # noqa: ARG002
        return self._loader.sizes(span)

    def _span(self, step: int, members: Sequence[str], rank: int, ghosts: Collection[int]) -> tuple[int, int]:
        return shares_split.span(self.balancer.shares(step, self._order.size_of(step), members, ghosts), rank)


class StreamFeed:
    """Global batches of data that cannot be indexed; where an epoch ends is found out by reading."""

    def __init__(self, layout: LaneLayout, reader: LaneReader, balance: ShareBalancer) -> None:
        self.total: int | None = None
        self.balancer, self.units = balance, 0
        self._layout, self._reader = layout, reader
        self._cursor = Cursor(0, 0)
        self._more = True
        self.micro_batch_size: int | None = None
        self.shard_range: ShardRange | None = None

    def halve_micro_batch(self, samples: int) -> bool:  # noqa: ARG002
        """What is read of a stream is given out in one piece."""
        return False

    def ended(self, step: int) -> bool:  # noqa: ARG002
        return self._cursor.epoch >= self._layout.epochs

    def cursor(self, step: int) -> Cursor:  # noqa: ARG002
        return self._cursor

    def global_batch_size(self, step: int) -> int:  # noqa: ARG002
        return self._layout.size

    def micro_batches(self, step: int, world: World, rank: int, ghosts: Collection[int]) -> list[MicroBatch]:  # noqa: ARG002
        # Ghosts have the state, and with it the cursor, by the time they read: they take their lanes at once, because
        # dealing a lane out anew for a single step would make two members seek in it.
        shares = self.balancer.shares(step, self._layout.lanes, told(self.balancer, world), ())
        lanes = self._layout.lanes_of(shares, rank)
        self.units = shares[rank]
        taken = self._reader.take(self._cursor.index, self._cursor.epoch, lanes)
        self._more = taken.more
        if taken.samples == 0 or taken.batch is None:
            return [MicroBatch(self._reader.placeholder_batch(), 0)]
        return [MicroBatch(taken.batch, taken.samples)]

    def has_more(self) -> bool:
        return self._more

    def on_commit(self, step: int, world: World, everybody: Sequence[StepReport]) -> list[Adjustment]:
        self._cursor = advance(self._cursor, any(p.more for p in everybody))
        return _observe(self.balancer, step, world, everybody, self._cursor.epoch, None)

    def start(self) -> None:
        self._reader.start()

    def close(self) -> None:
        self._reader.close()

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._cursor.epoch, "index": self._cursor.index, "shards": self._reader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cursor = Cursor(state["epoch"], state["index"])
        self._reader.load_state_dict(state["shards"])


def make_balancer(
    settings: Any, shares: str | None, ahead: int, first_windows: tuple[int, ...] = FIRST_WINDOWS
) -> ShareBalancer:
    """Return the balancer that the run's settings describe; `shares`, if given, overrides the policy."""
    rules = parse(
        shares or settings.shares_policy,
        threshold=settings.shares_threshold,
        window=settings.shares_window,
        min=settings.shares_min,
        max=settings.shares_max,
        mode=settings.shares_mode,
    )
    return ShareBalancer(rules, ahead, first_windows)


def told(balance: ShareBalancer, world: World) -> tuple[str, ...]:
    """The members of a world, of whose speed the balance knows what their agents guessed, if all of them did."""
    if all(seat.speed for seat in world.seats):
        for seat in world.seats:
            balance.set_speed_estimate(seat.member, seat.speed)
    return tuple(seat.member for seat in world.seats)


def _observe(
    balance: ShareBalancer, step: int, world: World, everybody: Sequence[StepReport], epoch: int, left: int | None
) -> list[Adjustment]:
    """Let the balance learn from what the pulses of a committed step say of the one before."""
    for seat, pulse in zip(world.seats, everybody, strict=True):
        if pulse.measured:
            balance.set_micro_batch(seat.member, pulse.micro or None)
    members = tuple(seat.member for seat in world.seats)
    seen = [StepMeasurement(pulse.measured, pulse.data_s + pulse.compute_s) for pulse in everybody]
    change = balance.observe(step, members, seen, epoch=epoch, steps_left=left)
    return [Adjustment(change.step, "shares", change.shares, change.reason)] if change is not None else []
