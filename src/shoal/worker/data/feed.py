"""Feeds: a member's part of every step, from slices of an indexable dataset or from lanes of a stream."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shoal.core import emulation
from shoal.core.data.lanes import LaneLayout, advance
from shoal.core.data.sample_order import Cursor, SampleOrder
from shoal.core.shares import split as shares_split
from shoal.core.shares.balancer import FIRST_WINDOWS, ShareBalancer, StepMeasurement, parse
from shoal.core.shares.reduction_tree import ShardRange
from shoal.core.step_report import StepReport
from shoal.core.world import World
from shoal.worker.data.sample_signature import signatures, stream_signatures
from shoal.worker.data.share_loader import ShareLoader
from shoal.worker.data.stream_reader import LaneReader


@dataclass(frozen=True, slots=True)
class Adjustment:
    """A change that all members made alike at a commit: from which step on, of what, and why."""

    step: int
    what: str
    values: dict[str, int]
    reason: str


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One batch for the loop body, and how many samples of the global batch it holds: 0 for a placeholder."""

    batch: Any
    samples: int

    def take(self) -> Any:
        """Return the batch, at the moment it is given to the loop body."""
        return self.batch


class Feed(Protocol):
    """Source of every member's part of every step.

    `balancer` distributes units: samples of an indexed dataset, lanes of a stream. `units` is how many units the last
    micro-batches of this member were; in exact mode `shard_range` tells which shards. `total` is the number of steps,
    None if it is not known beforehand.
    """

    total: int | None
    balancer: ShareBalancer
    units: int
    shard_range: ShardRange | None

    @property
    def micro_batch_size(self) -> int | None: ...

    def halve_micro_batch(self, samples: int) -> bool: ...

    def signatures(self) -> str: ...

    def ended(self, step: int) -> bool: ...

    def cursor(self, step: int) -> Cursor: ...

    def global_batch_size(self, step: int) -> int: ...

    def micro_batches(self, step: int, world: World, rank: int, catching_up: Collection[int]) -> list[MicroBatch]: ...

    def has_more(self) -> bool: ...

    def overruled_bounds(self, step: int, world: World) -> list[Adjustment]: ...

    def on_commit(self, step: int, world: World, reports: Sequence[StepReport]) -> list[Adjustment]: ...

    def start(self) -> None: ...

    def close(self) -> None: ...


class IndexedFeed:
    """Global batches of a map-style dataset."""

    def __init__(self, order: SampleOrder, loader: ShareLoader, balancer: ShareBalancer) -> None:
        self.total: int | None = order.total_steps
        self.balancer, self.units = balancer, 0
        self.shard_range: ShardRange | None = None
        self._order, self._loader = order, loader

    @property
    def order(self) -> SampleOrder:
        """The order of the samples."""
        return self._order

    @property
    def micro_batch_size(self) -> int | None:
        """The largest number of samples that this member computes at once, None for the whole share."""
        return self._loader.micro_batch_size

    def halve_micro_batch(self, samples: int) -> bool:
        """Halve a micro-batch that did not fit into memory; return False if it cannot be made smaller."""
        if samples < 2:
            return False
        self._loader.micro_batch_size = samples // 2
        return True

    def limit_micro_batch(self, samples: int) -> None:
        """Compute at most so many samples at once."""
        self._loader.micro_batch_size = min(self._loader.micro_batch_size or samples, samples)

    def ended(self, step: int) -> bool:
        """Return whether there is no batch for this step."""
        return step >= self._order.total_steps

    def cursor(self, step: int) -> Cursor:
        """Return the epoch and the index in it of a step."""
        return self._order.cursor(step)

    def global_batch_size(self, step: int) -> int:
        """Return the number of samples in the global batch of a step."""
        return self._order.size_of(step)

    def micro_batches(self, step: int, world: World, rank: int, catching_up: Collection[int]) -> list[MicroBatch]:
        """Return this member's share of a step; ranks that are catching up have none."""
        members = register_members(self.balancer, world)

        def predicted_span(later: int) -> tuple[int, int] | None:
            return None if self.ended(later) else self._span(later, members, rank, ())

        self._limit_micro_batch(members[rank])
        span = self._span(step, members, rank, catching_up)
        self.units = span[1] - span[0]
        placeholder = [MicroBatch(self._loader.placeholder_batch(step), 0)] if span[0] == span[1] else []
        # Also with an empty share: workers then read ahead for later steps in which it is not empty.
        batches = self._loader.take(step, span, predicted_span)
        if placeholder:
            return placeholder
        return [MicroBatch(b, n) for b, n in zip(batches, self._sizes(step, span), strict=True)]

    def _limit_micro_batch(self, member: str) -> None:
        """Compute no more samples at once than this member's maximum, or than what fitted before a restart."""
        limits = [self._loader.micro_batch_size, self.balancer.settings.most_at_once(member)]
        if limits[0] is None:
            limits.append(self.balancer.micro_batch_of(member))
        self._loader.micro_batch_size = min((limit for limit in limits if limit is not None), default=None)

    def read_span(self, step: int, start: int, stop: int) -> list[MicroBatch]:
        """Return the micro-batches of any span of a global batch; nothing is read ahead, the next span is unknown."""
        batches = self._loader.take(step, (start, stop), lambda _later: None)
        return [MicroBatch(b, n) for b, n in zip(batches, self._loader.sizes((start, stop)), strict=True)]

    def signatures(self) -> str:
        """Return signatures of a few samples, which must be the same on all members."""
        return signatures(self._loader.sample, self._order.samples)

    def has_more(self) -> bool:
        """Return True: the end is known from the step alone."""
        return True

    def overruled_bounds(self, step: int, world: World) -> list[Adjustment]:
        """Return which bounds of shares cannot be kept from this step on, unless that was said before."""
        members = tuple(seat.member for seat in world.seats)
        overruled = self.balancer.newly_overruled_bounds(self._share_units(step), members)
        return [Adjustment(step, "bounds", {}, overruled)] if overruled else []

    def on_commit(self, step: int, world: World, reports: Sequence[StepReport]) -> list[Adjustment]:
        """Learn from the reports of a committed step; return what changes because of them."""
        steps_left = self._order.total_steps - step - 1
        return _observe(self.balancer, step, world, reports, self.cursor(step).epoch, steps_left)

    def _share_units(self, step: int) -> int:
        """Return what the shares of a step sum to; 0 if they are not counted in samples."""
        return self._order.size_of(step)

    def start(self) -> None:
        """Start the readers."""
        self._loader.start()

    def close(self) -> None:
        """Stop the readers."""
        self._loader.close()

    def _sizes(self, step: int, span: tuple[int, int]) -> tuple[int, ...]:  # noqa: ARG002
        return self._loader.sizes(span)

    def _span(self, step: int, members: Sequence[str], rank: int, catching_up: Collection[int]) -> tuple[int, int]:
        return shares_split.span(self.balancer.shares(step, self._order.size_of(step), members, catching_up), rank)


class StreamFeed:
    """Global batches of data that cannot be indexed; the end of an epoch is found by reading."""

    def __init__(self, layout: LaneLayout, reader: LaneReader, balancer: ShareBalancer) -> None:
        self.total: int | None = None
        self.balancer, self.units = balancer, 0
        self._layout, self._reader = layout, reader
        self._cursor = Cursor(0, 0)
        self._more = True
        self.micro_batch_size: int | None = None
        self.shard_range: ShardRange | None = None

    def halve_micro_batch(self, samples: int) -> bool:  # noqa: ARG002
        """Return False: a member's lanes are always one batch."""
        return False

    def ended(self, step: int) -> bool:  # noqa: ARG002
        """Return whether the last epoch has ended."""
        return self._cursor.epoch >= self._layout.epochs

    def cursor(self, step: int) -> Cursor:  # noqa: ARG002
        """Return the epoch and the index in it of the next step."""
        return self._cursor

    def global_batch_size(self, step: int) -> int:  # noqa: ARG002
        """Return the nominal number of samples in a global batch; the last ones of an epoch may have fewer."""
        return self._layout.size

    def micro_batches(self, step: int, world: World, rank: int, catching_up: Collection[int]) -> list[MicroBatch]:  # noqa: ARG002
        """Return what this member's lanes contribute to the next step."""
        # Ranks that are catching up have the cursor by the time they read. They take their lanes at once: to give a
        # lane to another member for a single step would make both seek in it.
        shares = self.balancer.shares(step, self._layout.lanes, register_members(self.balancer, world), ())
        lanes = self._layout.lanes_of(shares, rank)
        self.units = shares[rank]
        taken = self._reader.take(self._cursor.index, self._cursor.epoch, lanes)
        self._more = taken.more
        if taken.samples == 0 or taken.batch is None:
            return [MicroBatch(self._reader.placeholder_batch(), 0)]
        return [MicroBatch(taken.batch, taken.samples)]

    def signatures(self) -> str:
        """Return signatures of the first samples of some shards, which must be the same on all members."""
        return stream_signatures(self._reader.first_samples_of, self._layout.shards)

    def has_more(self) -> bool:
        """Return whether this member's lanes have another sample in this epoch."""
        return self._more

    def overruled_bounds(self, step: int, world: World) -> list[Adjustment]:  # noqa: ARG002
        """Return nothing: shares of a stream have no bounds."""
        return []

    def on_commit(self, step: int, world: World, reports: Sequence[StepReport]) -> list[Adjustment]:
        """Advance the cursor and learn from the reports of a committed step; return what changes because of them."""
        self._cursor = advance(self._cursor, any(report.more for report in reports))
        return _observe(self.balancer, step, world, reports, self._cursor.epoch, None)

    def start(self) -> None:
        """Start the reader."""
        self._reader.start()

    def close(self) -> None:
        """Stop the reader."""
        self._reader.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor and the known lengths of the shards."""
        return {"epoch": self._cursor.epoch, "index": self._cursor.index, "shards": self._reader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the cursor of another reader."""
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
        machines=settings.shares_machines,
        emulation=emulation.parse(settings.emulate),
    )
    return ShareBalancer(rules, ahead, first_windows)


def register_members(balancer: ShareBalancer, world: World) -> tuple[str, ...]:
    """Return the members of a world; pass their speed estimates to the balancer if all of them have one.

    What the user declared or emulates counts more than what their agents measured.
    """
    members = tuple(seat.member for seat in world.seats)
    speeds = balancer.settings.speeds_of(members) or [seat.speed for seat in world.seats]
    if all(speeds):
        for member, speed in zip(members, speeds, strict=True):
            balancer.set_speed_estimate(member, speed)
    return members


def _observe(
    balancer: ShareBalancer,
    step: int,
    world: World,
    reports: Sequence[StepReport],
    epoch: int,
    steps_left: int | None,
) -> list[Adjustment]:
    """Pass the measurements in the reports of a committed step to the balancer; they are of the step before."""
    for seat, report in zip(world.seats, reports, strict=True):
        if report.measured:
            balancer.set_micro_batch(seat.member, report.micro or None)
    members = tuple(seat.member for seat in world.seats)
    measurements = [StepMeasurement(report.measured, report.data_s + report.compute_s) for report in reports]
    change = balancer.observe(step, members, measurements, epoch=epoch, steps_left=steps_left)
    return [Adjustment(change.step, "shares", change.shares, change.reason)] if change is not None else []
