"""Reading ahead for Keras models: how many workers read, how far, and whether they are threads or processes."""

from __future__ import annotations

from typing import NamedTuple

from shoal.keras.data.arrays import PyDatasetSource, SourceFetcher
from shoal.worker.data.read_ahead_processes import ForkedReaders
from shoal.worker.data.read_ahead_threads import ReadAheadThreads, depth
from shoal.worker.data.share_loader import ReadAhead


class ReadAheadConfig(NamedTuple):
    """Number of workers, threads or `processes`; each reads `prefetch` steps ahead."""

    workers: int
    prefetch: int
    processes: bool

    @property
    def depth(self) -> int:
        """Steps that are read ahead by all workers together."""
        return depth(self.workers, self.prefetch)

    def start(self, fetcher: SourceFetcher) -> ReadAhead | None:
        """Return readers of the fetcher's batches, None if nothing is read ahead."""
        if not self.depth:
            return None
        if self.processes:
            return ReadAheadThreads(ForkedReaders(fetcher, self.workers), self.workers, self.prefetch)
        if isinstance(fetcher.source, PyDatasetSource):
            # Threads share the global random generators with each other and with the training.
            fetcher.source.seeding = False
        return ReadAheadThreads(fetcher, self.workers, self.prefetch)
