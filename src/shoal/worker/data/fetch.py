"""Read samples of a map-style dataset into batches, such that what comes out does not depend on who reads them."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.core.data.sample_order import SampleOrder
from shoal.core.shares.split import split
from shoal.errors import SampleFailed
from shoal.worker.data.rng_state import RngState

Batch = Any
Collate = Callable[[list[Any]], Batch]
Watch = Callable[[int], bool]

_MASK = (1 << 64) - 1


class ReadKey(NamedTuple):
    """What identifies a piece of work; the same key always gives the same batches.

    `start` and `stop` are positions of an epoch's order, or lanes of a stream.
    """

    step: int
    start: int
    stop: int
    micro_batch_size: int | tuple[int, ...] | None
    bare: bool = False
    epoch: int = 0


class BatchReader(Protocol):
    """What reads data, in this process or in a worker; `noun` is what its watch is told."""

    noun: str

    def read(self, key: ReadKey, watch: Watch) -> Any | None:
        """What belongs to this key; None as soon as watch(sample) says that nobody wants it any more."""
        ...


class Fetcher:
    """Turns a slice of a global batch into batches.

    Before a sample is read, the global generators are seeded from (seed, epoch, sample), so that augmentation is the
    same whoever reads it, and in which order. `indices` are the samples of the source that make up the dataset, if not
    all of them do.
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
        """The pieces of the slice that `key` names, or its samples if they are to be bare."""
        epoch = key.epoch
        if key.bare:
            return self._one_by_one(self._order.ids_at(epoch, key.start, key.stop), epoch, watch)
        found: list[Batch] = []
        start = key.start
        for size in cut(key.stop - key.start, key.micro_batch_size):
            ids = self._order.ids_at(epoch, start, start + size)
            start += size
            batch = self._batch(ids, epoch, watch)
            if batch is None:
                return None
            found.append(batch)
        return found

    def collate(self, samples: list[Any]) -> Batch:
        """One batch of these samples."""
        return combine(self._collate, samples, "a ghost's batch")

    def _batch(self, ids: NDArray[np.int64], epoch: int, watch: Watch) -> Batch | None:
        samples = self._at_once(ids, epoch, watch) if self._batched else self._one_by_one(ids, epoch, watch)
        if samples is None:
            return None
        return combine(self._collate, samples, f"samples {', '.join(map(str, ids[:8]))}{' …' if len(ids) > 8 else ''}")

    def _one_by_one(self, ids: NDArray[np.int64], epoch: int, watch: Watch) -> list[Any] | None:
        found = []
        for sample, inner in zip(ids.tolist(), self._inner(ids).tolist(), strict=True):
            if not watch(sample):
                return None
            self.generators.seed(sample_seed(self._order.seed, epoch, sample))
            try:
                found.append(self._source[inner])
            except Exception as error:
                raise _unreadable(f"sample {sample}", sample, error) from error
        return found

    def _at_once(self, ids: NDArray[np.int64], epoch: int, watch: Watch) -> list[Any] | None:
        """All samples in one call, unless that draws random numbers: then the result would depend on the slice."""
        if not watch(int(ids[0])):
            return None
        self.generators.seed(sample_seed(self._order.seed, epoch, int(ids[0])))
        before = self.generators.state()
        try:
            found = list(self._source.__getitems__(self._inner(ids).tolist()))
        except Exception as error:
            raise _unreadable(f"one of samples {', '.join(map(str, ids[:8]))}…", int(ids[0]), error) from error
        if self.generators.same(before, self.generators.state()):
            return found
        self._batched = False
        return self._one_by_one(ids, epoch, watch)

    def _inner(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return ids if self._indices is None else self._indices[ids]


def always(_: int) -> bool:
    """A watch that never gives up."""
    return True


def combine(collate: Collate, samples: list[Any], where: str) -> Batch:
    """One batch of these samples."""
    try:
        return collate(samples)
    except Exception as error:
        what = f"{len(samples)} samples cannot be put into one batch: {_text(error)}"
        raise failed(what, where, "make all samples alike, or pass collate=", error) from error


def cut(count: int, micro: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """The sizes of the pieces: as given, or of at most `micro` samples, nearly equal, so that none is a lone sample."""
    if isinstance(micro, tuple):
        return micro
    if count == 0:
        return ()
    return split(count, [1] * (-(-count // micro) if micro else 1))


def sample_seed(seed: int, epoch: int, sample: int) -> int:
    """64 bits for one sample of one epoch."""
    mixed = (_epoch_key(seed, epoch) + sample * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def failed(what: str, where: str, do: str, error: BaseException) -> SampleFailed:
    """An error of the user's dataset, with its traceback as a note: the traceback itself does not travel."""
    failure = SampleFailed(what, where=where, why=_text(error), do=do)
    failure.add_note("".join(traceback.format_exception(error)))
    return failure


def _unreadable(which: str, sample: int, error: BaseException) -> SampleFailed:
    return failed(
        f"{which} cannot be read: {_text(error)}", f"dataset[{sample}]", f"try dataset[{sample}] alone", error
    )


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@lru_cache(maxsize=64)
def _epoch_key(seed: int, epoch: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"shoal sample {seed} {epoch}".encode(), digest_size=8).digest(), "little")
