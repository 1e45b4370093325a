"""A run of one, without coordinator or network: the same script, started by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.core.step_report import StepReport
from shoal.core.world import Address, Seat, World
from shoal.settings import RunSettings
from shoal.worker.collectives.exchange import Exchange
from shoal.worker.collectives.ring import Ring
from shoal.worker.session.environment import MemberEnvironment
from shoal.worker.session.worlds import StateProvider
from shoal.worker.transport.exchange_broken import ExchangeBroken

ALONE = World(1, (Seat("alone", "", Address("127.0.0.1", 0)),), 0, fresh=True)


class StandaloneSession:
    """What a Session is to a member of a run, to a process that is alone."""

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

    def begin(self, fingerprint: str, keeper: StateProvider, on_cpu: bool = True) -> None:
        """Nobody has to agree."""

    def set_phase(self, name: str) -> None:
        """Nobody asks."""

    def next_step(self) -> int:
        return self.step or 0

    def prepared_world(self) -> int:
        return 0

    def on_step_reports(self, everybody: tuple[StepReport, ...]) -> None:
        """There is nothing to agree on."""

    def before_change(self) -> None:
        """Nobody reads the state."""

    def begin_commit(self) -> bool:
        return True

    def commit(self) -> None:
        self.step = (self.step or 0) + 1

    def fail(self, broken: ExchangeBroken) -> None:
        raise broken

    def finish(self) -> bool:
        return True

    def leave_loop(self) -> None:
        """Nobody goes on."""

    def claim(self, name: str) -> bool:  # noqa: ARG002
        return True

    def complete_claim(self, name: str) -> None:
        """Nobody waits for it."""

    def report_checkpoint(self, step: int, path: str, size_bytes: int, seconds: float) -> None:
        """Nobody keeps count."""

    def report_adjustment(
        self, step: int, what: str, values: dict[str, int], reason: str, *, send: bool = True
    ) -> None:
        """Nobody asks why."""

    def close(self) -> None:
        """Nothing is open."""
