"""A member's part of a stream: its lanes, whichever they are at the moment, in one batch per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from shoal.core.data.lanes import LaneLayout
from shoal.errors import EmptyDataset
from shoal.worker.data.fetch import Batch, Collate, ReadKey, Watch, always, collate_samples, sample_seed
from shoal.worker.data.lane import SHARD, Lane, Lengths, Shards
from shoal.worker.data.rng_state import RngState
from shoal.worker.data.share_loader import ReadAhead, Reader

PLACEHOLDER_SAMPLES = 2
# More steps than an epoch can have, so that (epoch, step in it) fits into the step of a ReadKey.
EPOCH_STEPS = 1 << 40


class LaneBatch(NamedTuple):
    """One member's part of one step; `more` tells whether its lanes have another sample after it."""

    batch: Batch | None
    samples: int
    more: bool


class LaneSource:
    """The lanes that this process has opened; it holds at most a global batch for each of the kept steps."""

    noun = "lane"

    def __init__(
        self, shards: Shards, layout: LaneLayout, collate: Collate, generators: RngState, kept_steps: int
    ) -> None:
        self.lengths: Lengths = shards.known_lengths()
        self.generators = generators
        self._reported = len(self.lengths)
        self._shards = shards
        self._layout = layout
        self._collate = collate
        self._kept_steps = kept_steps
        self._lanes: dict[int, Lane] = {}
        self._seen: list[Any] = []

    def read(self, key: ReadKey, watch: Watch) -> Any | None:
        """Return (LaneBatch, newly learned lengths) of lanes start…stop at a step, or samples for a bare key."""
        if key.bare:
            return self._seen or self._first_samples()
        epoch, index = divmod(key.step, EPOCH_STEPS)
        samples: list[Any] = []
        more = False
        for number in range(key.start, key.stop):
            if not watch(number):
                return None
            quota = self._layout.quotas[number]
            taken, goes_on = self._lane(number, epoch).take(index * quota, quota, self._kept_steps * quota)
            samples += taken
            more = more or goes_on
        self._seen = samples[:PLACEHOLDER_SAMPLES] or self._seen
        where = f"step {index} of epoch {epoch}, lanes {key.start}…{key.stop - 1}"
        batch = collate_samples(self._collate, samples, where) if samples else None
        return LaneBatch(batch, len(samples), more), self._new_lengths()

    def collate(self, samples: list[Any]) -> Batch:
        """Return one batch of these samples."""
        return collate_samples(self._collate, samples, "the placeholder batch")

    def close(self) -> None:
        """Close every open shard."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()

    def _new_lengths(self) -> Lengths:
        lengths = dict(islice(self.lengths.items(), self._reported, None))
        self._reported = len(self.lengths)
        return lengths

    def _lane(self, number: int, epoch: int) -> Lane:
        lane = self._lanes.get(number)
        if lane is None or lane.epoch != epoch:
            if lane is not None:
                lane.close()
            lane = self._lanes[number] = Lane(self._shards, self._layout, number, epoch, self.lengths, self.generators)
        return lane

    def first_samples_of(self, shard: int) -> list[Any]:
        """Return the first samples of a shard, which is opened for that."""
        # As a lane does before it opens a shard: every member gets the same samples.
        self.generators.seed(sample_seed(self._layout.seed, 0, shard * SHARD + SHARD - 1))
        iterator, _ = self._shards.enter(shard, 0)
        try:
            return list(islice(iterator, PLACEHOLDER_SAMPLES))
        finally:
            if hasattr(iterator, "close"):
                iterator.close()

    def _first_samples(self) -> list[Any]:
        for number in range(len(self._shards)):
            samples = self.first_samples_of(number)
            if samples:
                return samples
        raise EmptyDataset("no shard of the stream has a sample", do="check what the shards are read from")


class LaneReader(Reader):
    """This member's part of a stream; `ahead` reads it in a process of its own.

    The lengths of the shards are its state: with them, a resumed stream finds its position without reading.
    """

    def __init__(self, source: LaneSource, ahead: ReadAhead | None = None) -> None:
        super().__init__(ahead)
        self._source = source

    def take(self, step_in_epoch: int, epoch: int, lane_range: tuple[int, int]) -> LaneBatch:
        """Return what these lanes contribute to this step, wherever the reader was before."""
        taken, lengths = self._get(ReadKey(epoch * EPOCH_STEPS + step_in_epoch, *lane_range, None))
        self._source.lengths.update(lengths)
        return LaneBatch(*taken)

    def placeholder_batch(self) -> Batch:
        """Return a tiny batch for a member without samples; what is computed with it has weight 0."""
        self._placeholder_samples = self._placeholder_samples or self._get(ReadKey(0, 0, 0, None, bare=True))
        return self._source.collate(self._placeholder_samples)

    def first_samples_of(self, shard: int) -> list[Any]:
        """Return the first samples of a shard; they are read in this process."""
        with self._source.generators.preserved():
            return self._source.first_samples_of(shard)

    def state_dict(self) -> dict[str, list[int]]:
        """Return the lengths of the shards, as far as they are known."""
        lengths = self._source.lengths
        return {"shards": list(lengths.keys()), "lengths": list(lengths.values())}

    def load_state_dict(self, state: Mapping[str, Sequence[int]]) -> None:
        """Add the lengths that another reader learned; a worker process gets them only before it starts."""
        for shard, length in zip(state["shards"], state["lengths"], strict=True):
            self._source.lengths.setdefault(int(shard), int(length))

    def close(self) -> None:
        """Close every shard and end the worker process."""
        if self._ahead:
            self._ahead.close()
        self._source.close()

    def _get(self, key: ReadKey) -> Any:
        if self._ahead:
            return self._ahead.get(key, lambda step: key._replace(step=step) if not key.bare else None)
        with self._source.generators.preserved():
            return self._source.read(key, always)
