"""What a training loop is fed with: slices of an indexable dataset, or lanes of a stream."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shoal.core import plan
from shoal.core.order import Cursor, Order
from shoal.core.pulse import Pulse
from shoal.core.stream import LaneLayout, advance
from shoal.torch.loader import ShareLoader
from shoal.torch.stream import LaneReader


@dataclass(frozen=True, slots=True)
class Piece:
    """One batch for the loop's body, and how many samples of the global batch it holds: 0 for a ghost's."""

    batch: Any
    samples: int


class Feed(Protocol):
    """Gives every member its part of every step."""

    total: int | None

    def over(self, step: int) -> bool: ...

    def cursor(self, step: int) -> Cursor: ...

    def nominal(self, step: int) -> int: ...

    def pieces(self, step: int, rank: int, ranks: int, ghosts: Collection[int]) -> list[Piece]: ...

    def more(self) -> bool: ...

    def committed(self, everybody: Sequence[Pulse]) -> None: ...

    def start(self) -> None: ...

    def close(self) -> None: ...


class IndexedFeed:
    """Global batches of a map-style dataset."""

    def __init__(self, order: Order, loader: ShareLoader, policy: plan.Policy) -> None:
        self.total: int | None = order.total_steps
        self._order, self._loader, self._policy = order, loader, policy

    def over(self, step: int) -> bool:
        return step >= self._order.total_steps

    def cursor(self, step: int) -> Cursor:
        return self._order.cursor(step)

    def nominal(self, step: int) -> int:
        return self._order.size_of(step)

    def pieces(self, step: int, rank: int, ranks: int, ghosts: Collection[int]) -> list[Piece]:
        def ahead(later: int) -> tuple[int, int] | None:
            return None if self.over(later) else self._span(later, rank, ranks, ())

        span = self._span(step, rank, ranks, ghosts)
        ghost = [Piece(self._loader.ghost(step), 0)] if span[0] == span[1] else []
        # Also with an empty share: the workers read ahead for the steps in which it is not.
        batches = self._loader.take(step, span, ahead)
        if ghost:
            return ghost
        return [Piece(b, n) for b, n in zip(batches, self._loader.sizes(span), strict=True)]

    @property
    def order(self) -> Order:
        return self._order

    def cut(self, step: int, start: int, stop: int) -> list[Piece]:
        """The pieces of any span of a global batch; nobody knows which one comes next, so nothing is read ahead."""
        batches = self._loader.take(step, (start, stop), lambda _later: None)
        return [Piece(b, n) for b, n in zip(batches, self._loader.sizes((start, stop)), strict=True)]

    def more(self) -> bool:
        return True

    def committed(self, everybody: Sequence[Pulse]) -> None:
        """The order knows where it is."""

    def start(self) -> None:
        self._loader.start()

    def close(self) -> None:
        self._loader.close()

    def _span(self, step: int, rank: int, ranks: int, ghosts: Collection[int]) -> tuple[int, int]:
        return plan.span(self._policy.shares(self._order.size_of(step), ranks, ghosts), rank)


class StreamFeed:
    """Global batches of data that cannot be indexed; where an epoch ends is found out by reading."""

    def __init__(self, layout: LaneLayout, reader: LaneReader, policy: plan.Policy) -> None:
        self.total: int | None = None
        self._layout, self._reader, self._policy = layout, reader, policy
        self._cursor = Cursor(0, 0)
        self._more = True

    def over(self, step: int) -> bool:  # noqa: ARG002
        return self._cursor.epoch >= self._layout.epochs

    def cursor(self, step: int) -> Cursor:  # noqa: ARG002
        return self._cursor

    def nominal(self, step: int) -> int:  # noqa: ARG002
        return self._layout.size

    def pieces(self, step: int, rank: int, ranks: int, ghosts: Collection[int]) -> list[Piece]:  # noqa: ARG002
        # Ghosts have the state, and with it the cursor, by the time they read: they take their lanes at once, because
        # dealing a lane out anew for a single step would make two members seek in it.
        shares = self._policy.shares(self._layout.lanes, ranks, ())
        lanes = self._layout.range_of(shares, rank)
        taken = self._reader.take(self._cursor.index, self._cursor.epoch, lanes)
        self._more = taken.more
        if taken.samples == 0 or taken.batch is None:
            return [Piece(self._reader.ghost(), 0)]
        return [Piece(taken.batch, taken.samples)]

    def more(self) -> bool:
        return self._more

    def committed(self, everybody: Sequence[Pulse]) -> None:
        self._cursor = advance(self._cursor, any(p.more for p in everybody))

    def start(self) -> None:
        self._reader.start()

    def close(self) -> None:
        self._reader.close()

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._cursor.epoch, "index": self._cursor.index, "shards": self._reader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cursor = Cursor(state["epoch"], state["index"])
        self._reader.load_state_dict(state["shards"])
