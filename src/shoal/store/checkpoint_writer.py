"""Background thread that writes checkpoints while training continues."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from shoal.errors import CheckpointFailed, ShoalError
from shoal.store import checkpoint
from shoal.store.blob_store import Store

READER = "checkpoint"


class CheckpointWriter:
    """Writes one checkpoint at a time in the background, and prunes old ones after each success.

    `on_done(step, path, bytes, seconds)` and `on_error(error)` are called in the writing thread, `on_skip(step, step in
    flight)` in the caller's. A failed checkpoint never interrupts training; the next one is a new attempt.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        keep: int,
        *,
        on_done: Callable[[int, str, int, float], None],
        on_error: Callable[[ShoalError], None],
        on_skip: Callable[[int, int], None] = lambda _step, _in_flight: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._run, self._keep = store, run, keep
        self._on_done, self._on_error, self._on_skip = on_done, on_error, on_skip
        self._now = now
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._step = -1

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def submit(
        self,
        snapshot: checkpoint.CheckpointSource,
        world: int,
        meta: dict[str, Any],
        fence: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Start to write a snapshot that this writer is registered for; return False if one is still being written."""
        if self.busy or self._closed.is_set():
            snapshot.done(READER)
            self._on_skip(snapshot.step, self._step)
            return False
        self._step = snapshot.step
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, world, meta, fence), name="shoal-checkpoint", daemon=True
        )
        self._thread.start()
        return True

    def close(self, wait_s: float) -> bool:
        """Wait up to `wait_s` for the checkpoint in flight, then abort it; return whether it was finished."""
        thread = self._thread
        if thread is None:
            self._closed.set()
            return True
        thread.join(wait_s)
        finished = not thread.is_alive()
        self._closed.set()
        return finished

    def _write(
        self, snapshot: checkpoint.CheckpointSource, world: int, meta: dict[str, Any], fence: Callable[[], bool]
    ) -> None:
        began = self._now()
        try:
            entry = checkpoint.write(
                self._store,
                snapshot,
                READER,
                run=self._run,
                world=world,
                meta=meta,
                fence=lambda: fence() and not self._closed.is_set(),
            )
            self._on_done(entry.step, f"{self._store.where}/{entry.name}", snapshot.total_bytes, self._now() - began)
            checkpoint.prune(self._store, self._keep, entry)
        except ShoalError as error:
            self._on_error(error)
        except Exception as error:  # noqa: BLE001 - the outermost frame of this thread: every failure must be reported
            why = f"{type(error).__name__}: {error}"
            self._on_error(CheckpointFailed(f"cannot write the checkpoint of step {snapshot.step}", why=why))
