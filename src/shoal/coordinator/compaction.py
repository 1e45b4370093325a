"""Compaction: keeps the journal, and so a restart, short.

Once the journal holds many events, the state is stored as a snapshot and the lines before it are dropped. The order
makes a crash at any point harmless:

1. On the event loop, between two events, the state is encoded and the position in the journal noted: they belong
   together.
2. The views are written up to that position and synced. From now on they alone have the story of those events.
3. In another thread, the snapshot is decoded once, as a test, then written, synced and renamed.
4. On the event loop, the lines that the snapshot contains are dropped; those appended meanwhile are kept.

If any step fails (a full disk), the journal stays as it is and the next attempt follows a minute later.

What survives: the state of every run, its last measurement, and, in ``views.sqlite``, the whole story, all worlds,
checkpoints and measurements. What a truncation costs: ``views.sqlite`` can no longer be rebuilt completely. If it is
deleted or damaged, the story begins at the snapshot, with a line that says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from shoal.coordinator.storage import state_snapshot
from shoal.coordinator.view_writer import ViewWriter
from shoal.errors import StorageError
from shoal.store.journal import Journal, Position

log = logging.getLogger("shoal.coordinator")

# About a fifth of a second of replay.
MAX_EVENTS = 5_000
MAX_BYTES = 4 << 20
CHECK_S = 1.0
RETRY_S = 60.0


class Compactor:
    """Stores snapshots of one coordinator and truncates its journal; `encode` returns the present state."""

    def __init__(self, journal: Journal, views: ViewWriter, encode: Callable[[], bytes]) -> None:
        self._journal, self._views, self._encode = journal, views, encode
        self._not_before = 0.0

    async def run(self) -> None:
        """Compact the journal whenever it is due, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            if self.is_due():
                await self.compact()

    def is_due(self) -> bool:
        """Return whether the journal has become long, and the last attempt did not fail just now."""
        is_long = self._journal.events >= MAX_EVENTS or self._journal.size >= MAX_BYTES
        return is_long and time.monotonic() >= self._not_before

    async def compact(self) -> bool:
        """Store the state and drop the lines before it; return whether that worked."""
        try:
            position, body = self._journal.position(), self._encode()
            if not await self._views.store_up_to(position.seq):
                raise StorageError("the views could not be stored", do="free disk space")
            await asyncio.to_thread(self._write, position, body)
            self._journal.drop_before(position)
        except (StorageError, TypeError, ValueError, OverflowError) as error:
            # The last three: a value of the state that cannot be encoded. The journal has it, and grows on.
            log.warning("the journal was not truncated: %s", error)
            self._not_before = time.monotonic() + RETRY_S
            return False
        return True

    def _write(self, position: Position, body: bytes) -> None:
        state_snapshot.decode(body)
        self._journal.write_snapshot(position, body)
