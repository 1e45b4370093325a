"""State that is trained: captured for joining members and for checkpoints, and restored from either.

The state is a set of named parts (model, optimizers, schedulers, random generators, cursors, the user's own), each with
`state_dict` and `load_state_dict`. A framework's `StateCodec` turns all parts into one header and raw buffers. Buffers
may alias live memory: a checkpoint is written in the background from a `Snapshot`, and `before_change` copies what the
writer has not read yet, just before the optimizer changes it. Only the session's writer (rank 0) writes checkpoints.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from shoal.core.step_report import StepReport
from shoal.core.world import World
from shoal.errors import NoCheckpoint, ShoalError
from shoal.settings import RunSettings
from shoal.store import checkpoint
from shoal.store.blob_store import Store, open_store
from shoal.store.checkpoint_schedule import CheckpointSchedule
from shoal.store.checkpoint_writer import CheckpointWriter
from shoal.worker.collectives.catch_up import ZeroBuffer
from shoal.worker.session.environment import MemberEnvironment
from shoal.worker.transport.snapshot import Bytes, Snapshot

# How long to wait for a checkpoint that is being written: at the end of training, and when the process exits.
FINAL_WRITE_S = 600.0
CLOSE_S = 60.0


class CheckpointingSession(Protocol):
    """The part of a session that checkpoints need; every kind of session provides it."""

    @property
    def me(self) -> str: ...

    @property
    def settings(self) -> RunSettings: ...

    @property
    def environment(self) -> MemberEnvironment | None: ...

    @property
    def world(self) -> World | None: ...

    @property
    def step(self) -> int | None: ...

    @property
    def is_writer(self) -> bool:
        """Whether this member writes the checkpoints."""
        ...

    def report_checkpoint(self, step: int, path: str, size_bytes: int, seconds: float) -> None:
        """Report a checkpoint that is durable."""
        ...


class UserState:
    """Part of the state that the user saves and loads with two functions."""

    def __init__(self, save: Callable[[], Any], load: Callable[[Any], object]) -> None:
        self._save, self._load = save, load

    def state_dict(self) -> Any:
        return self._save()

    def load_state_dict(self, saved: Any) -> None:
        self._load(saved)


class StateCodec(NamedTuple):
    """Conversion of a framework's parts to a header with raw buffers, and back."""

    capture: Callable[[Mapping[str, Any]], tuple[bytes, list[Bytes]]]
    restore: Callable[[Mapping[str, Any], bytes, list[Bytes]], None]


class TrainingState:
    """All parts of the state by name, and their checkpoints in `directory`.

    `after_load` holds callbacks that run whenever a state was loaded. The loop sets `zero_buffers` and `is_last_step`
    for the session: what this member exchanges while it catches up, and whether training ends with a step.
    """

    def __init__(self, session: CheckpointingSession, run: str, directory: str, codec: StateCodec) -> None:
        self._codec = codec
        self.parts: dict[str, Any] = {}
        self.after_load: list[Callable[[], None]] = []
        self.zero_buffers: Callable[[], list[ZeroBuffer] | None] = lambda: None
        self.is_last_step: Callable[[tuple[StepReport, ...]], bool] = lambda _reports: False
        self._session = session
        self._run = run
        self.directory = directory
        settings = session.settings
        self._schedule = CheckpointSchedule(settings.checkpoint_every_s, settings.checkpoint_every_steps)
        self._last_step, self._last_time = 0, time.monotonic()
        self._durable_step: int | None = None
        self._writer: CheckpointWriter | None = None
        self._pending: Snapshot | None = None

    def open_store(self) -> Store:
        """Return the store that checkpoints are written to and read from."""
        environment = self._session.environment
        return open_store(self.directory, environment.access if environment is not None else None)

    def capture(self) -> tuple[bytes, list[Bytes]]:
        return self._codec.capture(self.parts)

    def load(self, header: bytes, buffers: list[Bytes]) -> None:
        self._codec.restore(self.parts, header, buffers)
        for callback in self.after_load:
            callback()

    def restore(self) -> int | None:
        """Load the newest intact checkpoint and return its step; None if there is none."""
        try:
            saved = checkpoint.read(self.open_store())
        except NoCheckpoint:
            return None
        for error in saved.passed_over:
            print_error(error)
        self.load(saved.header, saved.buffers)
        self._last_step, self._last_time = saved.entry.step, time.monotonic()
        self._durable_step = saved.entry.step
        return saved.entry.step

    def newest(self) -> tuple[int, int] | None:
        """Return the step and the world of the newest checkpoint that can be restored, None if there is none."""
        info = checkpoint.newest(self.open_store())
        return info.key if info is not None else None

    def at_boundary(self, step: int) -> None:
        """Start writing a checkpoint in the background if one is due; call it between steps."""
        now = time.monotonic()
        if not self._session.is_writer or not self._schedule.due(step, now, self._last_step, self._last_time):
            return
        self._last_step, self._last_time = step, now
        self._start_writing(step)

    def before_change(self) -> None:
        """Copy what a checkpoint in progress has not read yet; call it just before the state changes."""
        if self._pending is not None:
            self._pending.freeze()
            self._pending = None

    def checkpoint_now(self) -> None:
        """Write a checkpoint and block until it is durable."""
        writer = self._open_writer()
        writer.close(wait_s=FINAL_WRITE_S)
        self._writer = None
        self._start_writing(self._session.step or 0)
        self._finish_writing()

    def at_end(self, step: int) -> None:
        """Checkpoint the final state if the run has an evaluator, which would miss it otherwise."""
        if not self._session.settings.evaluator or not self._session.is_writer:
            return
        self._finish_writing()
        # A checkpoint that was due is skipped while the one before it is still being written.
        if self._durable_step != step:
            self.checkpoint_now()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close(wait_s=CLOSE_S)

    def _start_writing(self, step: int) -> None:
        writer = self._open_writer()
        if writer.busy:
            return
        header, buffers = self.capture()
        snapshot = Snapshot(step, header, buffers, readers=1)
        world = self._session.world
        number = world.number if world is not None else 0
        self._pending = snapshot
        snapshot.freeze_soon()
        writer.submit(snapshot, number, {"member": self._session.me}, fence=lambda: self._may_write(number))

    def _finish_writing(self) -> None:
        if self._writer is not None:
            self._writer.close(wait_s=FINAL_WRITE_S)
            self._writer = None

    def _on_written(self, step: int, path: str, size_bytes: int, seconds: float) -> None:
        self._durable_step = step
        self._session.report_checkpoint(step, path, size_bytes, seconds)

    def _may_write(self, number: int) -> bool:
        """Return whether this member is still in world `number` or a later one; one left behind must not write."""
        world = self._session.world
        return world is None or world.number >= number

    def _open_writer(self) -> CheckpointWriter:
        if self._writer is None:
            self._writer = CheckpointWriter(
                self.open_store(),
                self._run,
                self._session.settings.checkpoint_keep,
                on_done=self._on_written,
                on_error=print_error,
            )
        return self._writer


def print_error(error: ShoalError) -> None:
    """Print what went wrong with a checkpoint; training continues without it."""
    sys.stderr.write(f"{error}\n")
