"""Session of a script that was started by hand: a run of one, without coordinator or network."""

from __future__ import annotations

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

ALONE = World(1, (Seat("alone", "", Address("127.0.0.1", 0)),), 0, fresh=True)


class StandaloneSession:
    """Stand-in for a `Session` in a process without peers: every request is granted, every report is dropped."""

    me = "alone"
    rank = 0
    size = 1
    broken = False
    is_writer = True
    flags = 0
    reason = ""
    environment: MemberEnvironment | None = None

    def __init__(self) -> None:
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

    def begin_commit(self) -> bool:
        return True

    def commit(self) -> None:
        self.step = (self.step or 0) + 1

    def fail(self, broken: ExchangeBroken) -> None:
        raise broken

    def finish(self) -> bool:
        return True

    def leave_loop(self) -> None:
        """Do nothing: no other member continues."""

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
