"""The state that is trained: captured for joiners and checkpoints, taken over from either."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shoal.core.step_report import StepReport
from shoal.errors import NoCheckpoint, ShoalError
from shoal.store import checkpoint
from shoal.store.blob_store import Store, open_store
from shoal.store.checkpoint_schedule import CheckpointSchedule
from shoal.store.checkpoint_writer import CheckpointWriter
from shoal.worker.collectives.catch_up import ZeroBuffer
from shoal.worker.parameter_server.served_session import ServedSession
from shoal.worker.session.session import Session
from shoal.worker.session.standalone import StandaloneSession
from shoal.worker.transport.snapshot import Bytes, Snapshot


class UserState:
    """A part of the state that the user saves and loads with two functions."""

    def __init__(self, save: Callable[[], Any], load: Callable[[Any], object]) -> None:
        self._save, self._load = save, load

    def state_dict(self) -> Any:
        return self._save()

    def load_state_dict(self, saved: Any) -> None:
        self._load(saved)


class StateCodec(NamedTuple):
    """How the parts of a framework's state become a header and raw buffers, and are loaded from them again."""

    capture: Callable[[Mapping[str, Any]], tuple[bytes, list[Bytes]]]
    restore: Callable[[Mapping[str, Any], bytes, list[Bytes]], None]


class TrainingState:
    """All parts of the state, by name, and where their checkpoints go."""

    def __init__(
        self, session: Session | ServedSession | StandaloneSession, run: str, directory: str, codec: StateCodec
    ) -> None:
        self._codec = codec
        self.parts: dict[str, Any] = {}
        self.loaded: list[Callable[[], None]] = []
        self.zero_buffers: Callable[[], list[ZeroBuffer] | None] = lambda: None
        self.is_last_step: Callable[[tuple[StepReport, ...]], bool] = lambda _everybody: False
        self._session = session
        self._run = run
        self._where = self.where = directory
        settings = session.settings
        self._schedule = CheckpointSchedule(settings.checkpoint_every_s, settings.checkpoint_every_steps)
        self._last_step, self._last_time = 0, time.monotonic()
        self._durable: int | None = None
        self._writer: CheckpointWriter | None = None
        self._pending: Snapshot | None = None

    def open(self) -> Store:
        """Where checkpoints are written to and read from."""
        told = self._session.environment
        return open_store(self._where, told.access if told is not None else None)

    def capture(self) -> tuple[bytes, list[Bytes]]:
        return self._codec.capture(self.parts)

    def load(self, header: bytes, buffers: list[Bytes]) -> None:
        self._codec.restore(self.parts, header, buffers)
        for after in self.loaded:
            after()

    def restore(self) -> int | None:
        try:
            found = checkpoint.read(self.open())
        except NoCheckpoint:
            return None
        for passed in found.passed_over:
            say(passed)
        self.load(found.header, found.buffers)
        self._last_step, self._last_time = found.entry.step, time.monotonic()
        self._durable = found.entry.step
        return found.entry.step

    def newest(self) -> tuple[int, int] | None:
        """The step and the world of the newest checkpoint that can be restored, None if there is none."""
        found = checkpoint.newest(self.open())
        return found.key if found is not None else None

    def at_boundary(self, step: int) -> None:
        """Begin a checkpoint in the background if one is due."""
        now = time.monotonic()
        if not self._session.is_writer or not self._schedule.due(step, now, self._last_step, self._last_time):
            return
        self._last_step, self._last_time = step, now
        self._begin(step)

    def before_change(self) -> None:
        """The state is about to change: what a checkpoint still lacks of it is copied."""
        if self._pending is not None:
            self._pending.freeze()
            self._pending = None

    def checkpoint_now(self) -> None:
        writer = self._open_writer()
        writer.close(wait_s=600.0)
        self._writer = None
        self._begin(self._session.step or 0)
        if self._writer is not None:
            self._writer.close(wait_s=600.0)
            self._writer = None

    def at_end(self, step: int) -> None:
        """All steps are committed: leave the last one in a checkpoint, if somebody waits to evaluate it."""
        if not self._session.settings.evaluator or not self._session.is_writer:
            return
        if self._writer is not None:
            self._writer.close(wait_s=600.0)
            self._writer = None
        # One that was due may not have been begun, because the one before it was still being written.
        if self._durable != step:
            self.checkpoint_now()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close(wait_s=60.0)

    def _begin(self, step: int) -> None:
        writer = self._open_writer()
        if writer.busy:
            return
        header, buffers = self.capture()
        snapshot = Snapshot(step, header, buffers, readers=1)
        world = self._session.world
        number = world.number if world is not None else 0
        self._pending = snapshot
        snapshot.freeze_soon()
        writer.submit(snapshot, number, {"member": self._session.me}, fence=lambda: self._still_in(number))

    def _written(self, step: int, path: str, size_bytes: int, seconds: float) -> None:
        self._durable = step
        self._session.report_checkpoint(step, path, size_bytes, seconds)

    def _still_in(self, number: int) -> bool:
        """A member whose world went on without it must not write."""
        world = self._session.world
        return world is None or world.number >= number

    def _open_writer(self) -> CheckpointWriter:
        if self._writer is None:
            self._writer = CheckpointWriter(
                self.open(),
                self._run,
                self._session.settings.checkpoint_keep,
                on_done=self._written,
                on_error=say,
            )
        return self._writer


def say(error: ShoalError) -> None:
    """Tell the user of what went wrong with a checkpoint; nobody is held up by it."""
    sys.stderr.write(f"{error}\n")
