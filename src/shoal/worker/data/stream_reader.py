"""A member's part of a stream: its lanes, whichever they are at the moment, in one batch a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from shoal.core.data.lanes import LaneLayout
from shoal.errors import EmptyDataset
from shoal.worker.data.fetch import Batch, Collate, ReadKey, Watch, always, combine
from shoal.worker.data.lane import Lane, Lengths, Shards
from shoal.worker.data.rng_state import RngState
from shoal.worker.data.share_loader import ReadAhead, Reader

GHOST_SAMPLES = 2
# More steps than an epoch can have: how many there are is known only at its end.
EPOCH = 1 << 40


class LaneBatch(NamedTuple):
    """One member's part of one step; `more` says whether its lanes have another sample after it."""

    batch: Batch | None
    samples: int
    more: bool


class LaneSource:
    """All lanes that this process has opened. Memory: at most a global batch for each step that is kept."""

    noun = "lane"

    def __init__(
        self, shards: Shards, layout: LaneLayout, collate: Collate, generators: RngState, kept_steps: int
    ) -> None:
        self.lengths: Lengths = shards.known_lengths()
        self.generators = generators
        self._told = len(self.lengths)
        self._shards = shards
        self._layout = layout
        self._collate = collate
        self._kept_steps = kept_steps
        self._lanes: dict[int, Lane] = {}
        self._seen: list[Any] = []

    def read(self, key: ReadKey, watch: Watch) -> Any | None:
        """(Taken, newly learned lengths) for lanes start…stop at a step, or bare samples for a ghost."""
        if key.bare:
            return self._seen or self._first()
        epoch, index = divmod(key.step, EPOCH)
        samples: list[Any] = []
        more = False
        for number in range(key.start, key.stop):
            if not watch(number):
                return None
            quota = self._layout.quotas[number]
            found, goes_on = self._lane(number, epoch).take(index * quota, quota, self._kept_steps * quota)
            samples += found
            more = more or goes_on
        self._seen = samples[:GHOST_SAMPLES] or self._seen
        where = f"step {index} of epoch {epoch}, lanes {key.start}…{key.stop - 1}"
        batch = combine(self._collate, samples, where) if samples else None
        return LaneBatch(batch, len(samples), more), self._news()

    def collate(self, samples: list[Any]) -> Batch:
        """One batch of these samples."""
        return combine(self._collate, samples, "a ghost's batch")

    def close(self) -> None:
        """Let go of every open shard."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()

    def _news(self) -> Lengths:
        news = dict(islice(self.lengths.items(), self._told, None))
        self._told = len(self.lengths)
        return news

    def _lane(self, number: int, epoch: int) -> Lane:
        lane = self._lanes.get(number)
        if lane is None or lane.epoch != epoch:
            if lane is not None:
                lane.close()
            lane = self._lanes[number] = Lane(self._shards, self._layout, number, epoch, self.lengths, self.generators)
        return lane

    def _first(self) -> list[Any]:
        for number in range(len(self._shards)):
            found = list(islice(self._shards.enter(number, 0)[0], GHOST_SAMPLES))
            if found:
                return found
        raise EmptyDataset("not one shard of the stream has a sample", do="check what the shards are read from")


class LaneReader(Reader):
    """This member's part of a stream; `ahead` reads it in a process of its own.

    What it learns of the shards' lengths is its state: with it, a resumed stream finds its place without reading.
    """

    def __init__(self, source: LaneSource, ahead: ReadAhead | None = None) -> None:
        super().__init__(ahead)
        self._source = source

    def take(self, step_in_epoch: int, epoch: int, lane_range: tuple[int, int]) -> LaneBatch:
        """What these lanes give to this step, wherever the reader was before."""
        taken, news = self._get(ReadKey(epoch * EPOCH + step_in_epoch, *lane_range, None))
        self._source.lengths.update(news)
        return LaneBatch(*taken)

    def placeholder_batch(self) -> Batch:
        """A tiny batch for a member without samples: it computes along, and counts for nothing."""
        if not self._ghost_samples:
            self._ghost_samples = self._get(ReadKey(0, 0, 0, None, bare=True))
        return self._source.collate(self._ghost_samples)

    def state_dict(self) -> dict[str, list[int]]:
        """The lengths of the shards as far as they are known."""
        lengths = self._source.lengths
        return {"shards": list(lengths.keys()), "lengths": list(lengths.values())}

    def load_state_dict(self, state: Mapping[str, Sequence[int]]) -> None:
        """Take over what another reader learned; a worker process hears of it only before it starts."""
        for shard, length in zip(state["shards"], state["lengths"], strict=True):
            self._source.lengths.setdefault(int(shard), int(length))

    def close(self) -> None:
        """Let go of every shard, and end the worker process."""
        if self._ahead:
            self._ahead.close()
        self._source.close()

    def _get(self, key: ReadKey) -> Any:
        if self._ahead:
            return self._ahead.get(key, lambda step: key._replace(step=step) if not key.bare else None)
        with self._source.generators.preserved():
            return self._source.read(key, always)
