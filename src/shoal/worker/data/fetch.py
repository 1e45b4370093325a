"""Fetching samples of a map-style dataset as batches, with a result that does not depend on the reading process.

Before a sample is read, the global random generators are seeded from (seed, epoch, sample). So augmentation draws the
same numbers whichever member or worker reads the sample, in whatever order, and however often.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.core.data.sample_order import SampleOrder
from shoal.core.nouns import counted
from shoal.core.shares.split import split
from shoal.errors import SampleFailed
from shoal.worker.data.rng_state import RngState

Batch = Any
Collate = Callable[[list[Any]], Batch]
Watch = Callable[[int], bool]
"""Called with each sample or lane before it is read; returns False if the result is no longer wanted."""

_MASK = (1 << 64) - 1


class ReadKey(NamedTuple):
    """Identity of one read; the same key always gives the same batches.

    `start` and `stop` are positions in the order of an epoch, or lanes of a stream. `micro_batch_size` is the largest
    number of samples in one micro-batch, or the sizes of all of them. A `bare` read returns samples, not batches.
    """

    step: int
    start: int
    stop: int
    micro_batch_size: int | tuple[int, ...] | None
    bare: bool = False
    epoch: int = 0


class BatchReader(Protocol):
    """Source of batches, in this process or in a worker; `noun` names what its watch is called with."""

    noun: str

    def read(self, key: ReadKey, watch: Watch) -> Any | None:
        """Return the data of this key, or None as soon as `watch` returns False."""
        ...


class Fetcher:
    """Reads slices of global batches from a dataset and collates them into micro-batches.

    `indices` are the samples of the source that make up the dataset, if not all of them do.
    """

    noun = "sample"

    def __init__(
        self,
        source: Any,
        order: SampleOrder,
        collate: Collate,
        generators: RngState,
        indices: NDArray[np.int64] | None = None,
    ) -> None:
        self.generators = generators
        self._order, self._collate = order, collate
        self._source, self._indices = source, indices
        self._batched = hasattr(source, "__getitems__")

    @property
    def source(self) -> Any:
        return self._source

    @property
    def quiet(self) -> bool:
        """Whether reading never touches a global random generator."""
        return False

    def read(self, key: ReadKey, watch: Watch) -> list[Any] | None:
        """Return the micro-batches of the slice that `key` names, or its samples for a bare key."""
        epoch = key.epoch
        if key.bare:
            return self._read_singly(self._order.ids_at(epoch, key.start, key.stop), epoch, watch)
        batches: list[Batch] = []
        start = key.start
        for size in micro_batch_sizes(key.stop - key.start, key.micro_batch_size):
            ids = self._order.ids_at(epoch, start, start + size)
            start += size
            batch = self._batch(ids, epoch, watch)
            if batch is None:
                return None
            batches.append(batch)
        return batches

    def collate(self, samples: list[Any]) -> Batch:
        """Return one batch of these samples."""
        return collate_samples(self._collate, samples, "the placeholder batch")

    def _batch(self, ids: NDArray[np.int64], epoch: int, watch: Watch) -> Batch | None:
        samples = self._read_together(ids, epoch, watch) if self._batched else self._read_singly(ids, epoch, watch)
        if samples is None:
            return None
        where = f"samples {', '.join(map(str, ids[:8]))}{' …' if len(ids) > 8 else ''}"
        return collate_samples(self._collate, samples, where)

    def _read_singly(self, ids: NDArray[np.int64], epoch: int, watch: Watch) -> list[Any] | None:
        samples = []
        for sample, index in zip(ids.tolist(), self._indices_of(ids).tolist(), strict=True):
            if not watch(sample):
                return None
            self.generators.seed(sample_seed(self._order.seed, epoch, sample))
            try:
                samples.append(self._source[index])
            except Exception as error:
                raise _unreadable(f"sample {sample}", sample, error) from error
        return samples

    def _read_together(self, ids: NDArray[np.int64], epoch: int, watch: Watch) -> list[Any] | None:
        """Read all samples in one call, unless it draws random numbers: then the result would depend on the slice."""
        if not watch(int(ids[0])):
            return None
        self.generators.seed(sample_seed(self._order.seed, epoch, int(ids[0])))
        before = self.generators.state()
        try:
            samples = list(self._source.__getitems__(self._indices_of(ids).tolist()))
        except Exception as error:
            raise _unreadable(f"one of samples {', '.join(map(str, ids[:8]))}…", int(ids[0]), error) from error
        if self.generators.same(before, self.generators.state()):
            return samples
        self._batched = False
        return self._read_singly(ids, epoch, watch)

    def _indices_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return ids if self._indices is None else self._indices[ids]


def always(_: int) -> bool:
    """Return True: a watch for data that is wanted in any case."""
    return True


def collate_samples(collate: Collate, samples: list[Any], where: str) -> Batch:
    """Return one batch of these samples; raise SampleFailed if they cannot be collated."""
    try:
        return collate(samples)
    except Exception as error:
        what = f"{counted(len(samples), 'sample')} cannot be put into one batch: {_text(error)}"
        raise sample_failure(what, where, "make all samples alike, or pass collate=", error) from error


def micro_batch_sizes(count: int, limit: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the sizes of the micro-batches of `count` samples: as given, or nearly equal and at most `limit`.

    Nearly equal, so that none is a single sample, which BatchNorm refuses.
    """
    if isinstance(limit, tuple):
        return limit
    if count == 0:
        return ()
    return split(count, [1] * (-(-count // limit) if limit else 1))


def sample_seed(seed: int, epoch: int, sample: int) -> int:
    """Return the 64-bit seed of one sample of one epoch."""
    mixed = (_epoch_key(seed, epoch) + sample * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def sample_failure(what: str, where: str, do: str, error: BaseException) -> SampleFailed:
    """Return an error of the user's dataset with its traceback as a note, which survives pickling."""
    failure = SampleFailed(what, where=where, why=_text(error), do=do)
    failure.add_note("".join(traceback.format_exception(error)))
    return failure


def _unreadable(which: str, sample: int, error: BaseException) -> SampleFailed:
    return sample_failure(
        f"{which} cannot be read: {_text(error)}", f"dataset[{sample}]", f"try dataset[{sample}] alone", error
    )


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@lru_cache(maxsize=64)
def _epoch_key(seed: int, epoch: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"shoal sample {seed} {epoch}".encode(), digest_size=8).digest(), "little")
