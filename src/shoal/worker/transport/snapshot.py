"""The state of one step, read by others in the background while its owner goes on computing.

The buffers may be the owner's live memory. Nothing is copied as long as the readers are quick: between two optimizer
steps the memory does not change. Only what some reader still lacks when the owner is about to change it is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]

PIECE_BYTES = 4 << 20


class ChunkReleased(LookupError):  # noqa: N818
    """A reader asked for bytes that were dropped because every expected reader had read past them."""


class Snapshot:
    """A header and buffers as they were after `step` steps, for a known number of readers.

    A reader reads forward: buffer by buffer, each from its start to its end. It may read live memory, so the owner
    calls `freeze` before it changes that memory; from then on the snapshot stands on its own.
    """

    def __init__(self, step: int, header: bytes, buffers: Sequence[Bytes], readers: int) -> None:
        self.step = step
        self.header = header
        self.sizes = tuple(buffer.nbytes for buffer in buffers)
        self.total_bytes = sum(self.sizes)
        self._buffers: list[Bytes | None] = [buffer.reshape(-1).view(np.uint8) for buffer in buffers]
        self._offsets = [0] * len(buffers)  # the byte of the buffer at which what we hold of it begins
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

    def piece(self, reader: str, index: int, start: int, stop: int) -> bytes:
        """Return a copy of bytes start..stop of one buffer, and note that the reader has come this far."""
        if not 0 <= start <= stop <= self.sizes[index] or stop - start > PIECE_BYTES:
            raise ValueError(f"no piece {start}:{stop} of at most {PIECE_BYTES} bytes in buffer {index}")
        with self._lock:
            buffer, offset = self._buffers[index], self._offsets[index]
            if buffer is None or start < offset:
                raise ChunkReleased(f"bytes {start}:{stop} of buffer {index} of step {self.step} were already dropped")
            data = buffer[start - offset : stop - offset].tobytes()
            if reader not in self._done:
                self._progress[reader] = max(self._progress.get(reader, (0, 0)), (index, stop))
                self._drop_read()
            return data

    def done(self, reader: str) -> None:
        """Note that the reader needs nothing more, because it has all or because it is gone."""
        with self._lock:
            self._done.add(reader)
            self._progress.pop(reader, None)
            self._drop_read()

    def abandon(self) -> None:
        """Drop everything: no reader is expected any more, and whoever still reads gets PieceGone."""
        with self._lock:
            self._readers = len(self._done)
            self._progress.clear()
            self._drop_read()

    def freeze_soon(self) -> None:
        """Begin to freeze in the background, so that the owner need not wait for it when it comes to change things."""
        threading.Thread(target=self.freeze, name="shoal-freeze", daemon=True).start()

    def freeze(self) -> int:
        """Copy what some reader still lacks, so that the owner may change its memory; return how many bytes."""
        with self._freezing:
            if self._frozen:
                return 0
            with self._lock:
                index, start = self._low_water()
                live = list(self._buffers)
            # Readers go on reading the live memory during the copy: its owner is here and does not change it.
            copied = 0
            copies: list[Bytes | None] = [None] * len(live)
            for each in range(index, len(live)):
                source = live[each]
                if source is not None:
                    copies[each] = source[start if each == index else 0 :].copy()
                    copied += source.nbytes - (start if each == index else 0)
            with self._lock:
                self._buffers = copies
                if index < len(copies):
                    self._offsets[index] = start
                self._frozen = True
                self._drop_read()
            return copied

    def _finished(self) -> bool:
        return len(self._done) >= self._readers

    def _low_water(self) -> tuple[int, int]:
        """Return the position before which every expected reader has read everything."""
        if self._finished():
            return len(self.sizes), 0
        if len(self._progress) + len(self._done) < self._readers:
            return 0, 0
        return min(self._progress.values())

    def _drop_read(self) -> None:
        """Let go of buffers that nobody needs any more."""
        if not (self._frozen or self._finished()):
            return  # live memory costs nothing, and a reader that starts over can still have it
        index, _ = self._low_water()
        for each in range(index):
            self._buffers[each] = None
