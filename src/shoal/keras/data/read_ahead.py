"""Who reads the data of Keras models ahead."""

from __future__ import annotations

from typing import NamedTuple

from shoal.keras.data.arrays import PyDatasetSource, SourceFetcher
from shoal.worker.data.read_ahead_processes import ForkedReaders
from shoal.worker.data.read_ahead_threads import ReadAheadThreads, depth
from shoal.worker.data.share_loader import ReadAhead


class ReadAheadConfig(NamedTuple):
    """So many workers, threads or `processes`, of which each reads `prefetch` steps ahead."""

    workers: int
    prefetch: int
    processes: bool

    @property
    def depth(self) -> int:
        """How many steps are read ahead."""
        return depth(self.workers, self.prefetch)

    def ahead(self, fetcher: SourceFetcher) -> ReadAhead | None:
        if not self.depth:
            return None
        if self.processes:
            return ReadAheadThreads(ForkedReaders(fetcher, self.workers), self.workers, self.prefetch)
        if isinstance(fetcher.source, PyDatasetSource):
            # Threads share the global random generators with each other and with the training.
            fetcher.source.seeding = False
        return ReadAheadThreads(fetcher, self.workers, self.prefetch)
