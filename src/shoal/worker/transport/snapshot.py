"""Snapshot of the state after one step, read in the background while its owner keeps computing.

The buffers may be the owner's live memory. Between two optimizer steps that memory does not change, so fast readers
cause no copy at all. Only what some reader still lacks when the owner is about to change the memory is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]

CHUNK_BYTES = 4 << 20


class ChunkReleased(LookupError):  # noqa: N818
    """A reader asked for bytes that were released because every expected reader had read past them."""


class Snapshot:
    """A header and buffers as they were after `step` steps, for a known number of readers.

    A reader reads forward: buffer by buffer, each from its start to its end. It may be reading live memory, so the
    owner calls `freeze` before it changes that memory; from then on the snapshot holds its own copy.
    """

    def __init__(self, step: int, header: bytes, buffers: Sequence[Bytes], readers: int) -> None:
        self.step = step
        self.header = header
        self.sizes = tuple(buffer.nbytes for buffer in buffers)
        self.total_bytes = sum(self.sizes)
        self._buffers: list[Bytes | None] = [buffer.reshape(-1).view(np.uint8) for buffer in buffers]
        # How many bytes were cut off the start of each buffer because all readers had them.
        self._offsets = [0] * len(buffers)
        self._readers = readers
        self._progress: dict[str, tuple[int, int]] = {}
        self._done: set[str] = set()
        self._frozen = False
        self._lock = threading.Lock()
        self._freezing = threading.Lock()

    @property
    def finished(self) -> bool:
        """Whether every expected reader is done."""
        with self._lock:
            return self._finished()

    @property
    def frozen(self) -> bool:
        """Whether the snapshot no longer depends on the owner's memory."""
        return self._frozen

    def chunk(self, reader: str, index: int, start: int, stop: int) -> bytes:
        """Return a copy of bytes start:stop of one buffer, and record that the reader has come this far.

        Raise ChunkReleased if they were released already.
        """
        if not 0 <= start <= stop <= self.sizes[index] or stop - start > CHUNK_BYTES:
            raise ValueError(f"invalid chunk {start}:{stop} of buffer {index}: the limit is {CHUNK_BYTES} bytes")
        with self._lock:
            buffer, offset = self._buffers[index], self._offsets[index]
            if buffer is None or start < offset:
                raise ChunkReleased(f"bytes {start}:{stop} of buffer {index} of step {self.step} were released")
            data = buffer[start - offset : stop - offset].tobytes()
            if reader not in self._done:
                self._progress[reader] = max(self._progress.get(reader, (0, 0)), (index, stop))
                self._release_read()
            return data

    def done(self, reader: str) -> None:
        """Record that a reader needs nothing more, because it has everything or is gone."""
        with self._lock:
            self._done.add(reader)
            self._progress.pop(reader, None)
            self._release_read()

    def abandon(self) -> None:
        """Release everything: no reader is expected any more, and one that still reads gets ChunkReleased."""
        with self._lock:
            self._readers = len(self._done)
            self._progress.clear()
            self._release_read()

    def freeze_soon(self) -> None:
        """Start freezing in the background, so that the owner rarely waits for it."""
        threading.Thread(target=self.freeze, name="shoal-freeze", daemon=True).start()

    def freeze(self) -> int:
        """Copy what some reader still lacks, so that the owner may change its memory; return how many bytes."""
        with self._freezing:
            if self._frozen:
                return 0
            with self._lock:
                index, start = self._low_water()
                live = list(self._buffers)
            # Readers may use the live memory during the copy: its owner waits here, or has not changed it yet.
            copied = 0
            copies: list[Bytes | None] = [None] * len(live)
            for number in range(index, len(live)):
                source = live[number]
                if source is not None:
                    copies[number] = source[start if number == index else 0 :].copy()
                    copied += source.nbytes - (start if number == index else 0)
            with self._lock:
                self._buffers = copies
                if index < len(copies):
                    self._offsets[index] = start
                self._frozen = True
                self._release_read()
            return copied

    def _finished(self) -> bool:
        return len(self._done) >= self._readers

    def _low_water(self) -> tuple[int, int]:
        """Return the position (buffer, byte) before which every expected reader has read everything."""
        if self._finished():
            return len(self.sizes), 0
        if len(self._progress) + len(self._done) < self._readers:
            return 0, 0
        return min(self._progress.values())

    def _release_read(self) -> None:
        """Release the copies of buffers that every reader has read."""
        if not (self._frozen or self._finished()):
            return  # live memory costs nothing, and a reader that starts over can still have it
        index, _ = self._low_water()
        for number in range(index):
            self._buffers[number] = None
