"""Session of a script that was started by hand: a run of one, without coordinator or network.

Under `shoal run` the coordinator shows the progress; here the session prints it itself, to standard error: a line every
few seconds and one at the end of the loop.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from shoal.core.step_report import StepReport
from shoal.core.world import Address, Seat, World
from shoal.settings import RunSettings
from shoal.worker.collectives.exchange import Exchange
from shoal.worker.collectives.ring import Ring
from shoal.worker.session.environment import MemberEnvironment
from shoal.worker.session.member_worlds import StateProvider
from shoal.worker.transport.exchange_broken import ExchangeBroken

PROGRESS_EVERY_S = 5.0
ALONE = World(1, (Seat("alone", "", Address("127.0.0.1", 0)),), 0, fresh=True)


class Progress:
    """Lines such as ``step 160/160  epoch 9  loss 0.9382``, at most one every `PROGRESS_EVERY_S` and a last one."""

    def __init__(
        self,
        say: Callable[[str], object] = lambda text: sys.stderr.write(f"{text}\n"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._clock = say, clock
        self._next_at = clock() + PROGRESS_EVERY_S
        self._shown = 0

    def show(self, step: int, status: Callable[[], dict[str, Any]], *, last: bool = False) -> None:
        """Print the progress if it is due, or if it is the last one; never the same step twice."""
        if step == self._shown or (not last and self._clock() < self._next_at):
            return
        self._next_at, self._shown = self._clock() + PROGRESS_EVERY_S, step
        fields = status()
        total, loss = fields.get("total_steps"), fields.get("loss")
        parts = [f"step {step}" + (f"/{total}" if total else ""), f"epoch {fields.get('epoch', 0)}"]
        self._say("  ".join([*parts, f"loss {loss:.4g}"] if loss is not None else parts))


class StandaloneSession:
    """Stand-in for a `Session` in a process without peers: every request is granted, every report is dropped."""

    me = "alone"
    rank = 0
    size = 1
    broken = False
    is_writer = True
    min_members = 1
    micro_batch = 0
    on_uncaught: Callable[[BaseException], None]
    flags = 0
    reason = ""
    environment: MemberEnvironment | None = None

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress
        self.settings = RunSettings(checkpoint_every_s=0)
        self.world: World | None = ALONE
        self.exchange: Exchange | None = Ring(0, ["alone"])
        self.step: int | None = 0
        self.status: Callable[[], dict[str, Any]] = dict

    def begin(self, fingerprint: str, training_state: StateProvider, on_cpu: bool = True) -> None:
        """Do nothing: there is no coordinator to admit this member."""

    def set_phase(self, name: str) -> None:
        """Do nothing: there are no heartbeats."""

    def next_step(self) -> int:
        return self.step or 0

    def prepared_world(self) -> int:
        return 0

    def on_step_reports(self, reports: tuple[StepReport, ...]) -> None:
        """Do nothing: the world never changes."""

    def before_change(self) -> None:
        """Do nothing: no peer reads the state."""

    def begin_exchange(self) -> None:
        """Do nothing: there is no peer."""

    def begin_commit(self) -> bool:
        return True

    def commit(self) -> None:
        self.step = (self.step or 0) + 1
        if self._progress is not None:
            self._progress.show(self.step, self.status)

    def fail(self, broken: ExchangeBroken) -> None:
        raise broken

    def forget_state(self) -> None:
        """Do nothing: there is no peer to differ from."""

    def finish(self, compare: Callable[[Exchange], None]) -> bool:  # noqa: ARG002
        self._show_last_progress()
        return True

    def ends_at(self, step: int) -> bool:  # noqa: ARG002
        return False

    def leave_loop(self) -> None:
        self._show_last_progress()

    def suspend_loop(self, at_end: Callable[[], None]) -> None:  # noqa: ARG002
        self._show_last_progress()

    def _show_last_progress(self) -> None:
        if self._progress is not None:
            self._progress.show(self.step or 0, self.status, last=True)

    def claim(self, name: str) -> bool:  # noqa: ARG002
        return True

    def complete_claim(self, name: str) -> None:
        """Do nothing: no other member waits for it."""

    def report_checkpoint(self, step: int, path: str, size_bytes: int, seconds: float) -> None:
        """Do nothing: there is no coordinator."""

    def report_adjustment(
        self, step: int, what: str, values: dict[str, int], reason: str, *, send: bool = True
    ) -> None:
        """Do nothing: there is no coordinator."""

    def close(self) -> None:
        """Do nothing: nothing is open."""
