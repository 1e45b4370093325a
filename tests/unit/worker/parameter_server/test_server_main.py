"""Main thread of a server: when it may leave, and how it checkpoints the end of training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.core.data.sample_order import SampleOrder
from shoal.core.parameter_server.ticket_ledger import TicketLedger
from shoal.core.placement import LEDGER, PartAssignment, Placement
from shoal.core.world import Address, Seat
from shoal.settings import RunSettings
from shoal.store import checkpoint
from shoal.store.blob_store import open_store
from shoal.worker.parameter_server.server_main import FINAL_ATTEMPTS, ServerMain

ORDER = SampleOrder(samples=32, size=8, epochs=1)


class FakeServer:
    """A server whose state can be gathered, after some attempts that fail."""

    def __init__(self, *, finished: int = 32, owns_ledger: bool = True, failing_gathers: int = 0) -> None:
        self.owns_ledger, self.may_end = owns_ledger, True
        self.ledger = TicketLedger(2, finished_samples=finished)
        self.gathered = 0
        self._failing_gathers = failing_gathers

    def gather_state(self) -> Any:
        self.gathered += 1
        if self.gathered <= self._failing_gathers:
            return None
        return {LEDGER: (msgspec.msgpack.encode(self.ledger), []), 1: (b"shard", [np.zeros(4, np.uint8)])}


class FakeSession:
    """The session of server `s0`; it has to leave in `remaining_s` seconds."""

    me = "s0"
    environment = SimpleNamespace(run="r")

    def __init__(self, *servers: str, evaluator: bool = True) -> None:
        self.settings = RunSettings(evaluator=evaluator)
        self.remaining_s = 60.0
        self.restored: list[int | None] = []
        self.checkpoints = 0
        seats = tuple(Seat(name, "1", Address("h", 1)) for name in servers)
        self.placement = Placement(3, 1, seats, (PartAssignment("s0"),))

    def overdue(self, margin_s: float) -> bool:
        return self.remaining_s < margin_s

    def report_checkpoint(self, *_details: Any) -> None:
        self.checkpoints += 1

    def report_restored(self, step: int | None) -> None:
        self.restored.append(step)

    def set_phase(self, name: str) -> None:
        """Ignore it."""


def main_of(path: Path, server: FakeServer, session: FakeSession) -> ServerMain:
    training_state = SimpleNamespace(open_store=lambda: open_store(str(path)))
    return ServerMain(session, training_state, server, ORDER)  # type: ignore[arg-type]


def written_steps(path: Path) -> list[int]:
    return [entry.step for entry in checkpoint.entries(open_store(str(path)))]


# --- leaving


def test_only_server_checkpoints_at_once_and_serves_until_its_time_is_up(tmp_path: Path) -> None:
    session = FakeSession("s0")
    main = main_of(tmp_path, FakeServer(), session)
    assert [main.may_leave() for _ in range(3)] == [False] * 3
    assert session.checkpoints == 1
    session.remaining_s = 4.0
    assert main.may_leave()
    assert session.checkpoints == 2, "what was trained meanwhile is lost"


def test_server_does_not_leave_before_its_state_could_be_gathered(tmp_path: Path) -> None:
    session = FakeSession("s0")
    session.remaining_s = 4.0
    main = main_of(tmp_path, FakeServer(failing_gathers=3), session)
    assert [main.may_leave() for _ in range(4)] == [False, False, False, True]
    assert session.checkpoints == 1


def test_server_without_the_ledger_stays_longer_than_the_one_with_it(tmp_path: Path) -> None:
    session = FakeSession("s0", "s1")
    main = main_of(tmp_path, FakeServer(owns_ledger=False), session)
    session.remaining_s = 4.0
    assert not main.may_leave()
    session.remaining_s = 0.5
    assert main.may_leave()


@pytest.mark.parametrize("owns_ledger", [True, False])
def test_server_that_has_handed_off_everything_leaves_at_once(tmp_path: Path, owns_ledger: bool) -> None:
    session = FakeSession("s1")
    assert main_of(tmp_path, FakeServer(owns_ledger=owns_ledger), session).may_leave()
    assert session.checkpoints == 0


# --- the end of training


def test_end_is_checkpointed_before_trainers_learn_of_it(tmp_path: Path) -> None:
    server = FakeServer()
    main = main_of(tmp_path, server, FakeSession("s0"))
    assert not server.may_end
    main._checkpoint_end()
    assert server.may_end
    assert written_steps(tmp_path) == [4]


@pytest.mark.parametrize("server", [FakeServer(finished=31), FakeServer(owns_ledger=False)])
def test_end_is_not_checkpointed_too_early_or_by_another_server(tmp_path: Path, server: FakeServer) -> None:
    main_of(tmp_path, server, FakeSession("s0"))._checkpoint_end()
    assert not server.may_end
    assert server.gathered == 0


def test_end_is_not_checkpointed_without_an_evaluator(tmp_path: Path) -> None:
    server = FakeServer()
    main_of(tmp_path, server, FakeSession("s0", evaluator=False))._checkpoint_end()
    assert server.may_end
    assert written_steps(tmp_path) == []


def test_end_is_not_checkpointed_twice(tmp_path: Path) -> None:
    server = FakeServer()
    main = main_of(tmp_path, server, FakeSession("s0"))
    main._write()
    main._checkpoint_end()
    assert server.may_end
    assert server.gathered == 1


def test_checkpoint_of_the_end_is_retried_while_parts_are_handed_off(tmp_path: Path) -> None:
    server = FakeServer(failing_gathers=2)
    main = main_of(tmp_path, server, FakeSession("s0"))
    for _ in range(2):
        main._checkpoint_end()
        assert not server.may_end
    main._checkpoint_end()
    assert server.may_end
    assert written_steps(tmp_path) == [4]


def test_run_ends_after_the_last_attempt_to_gather_its_state(tmp_path: Path) -> None:
    server = FakeServer(failing_gathers=10**6)
    main = main_of(tmp_path, server, FakeSession("s0"))
    for _ in range(FINAL_ATTEMPTS):
        assert not server.may_end
        main._checkpoint_end()
    assert server.may_end


def test_run_ends_even_if_its_last_checkpoint_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("not a directory")
    server = FakeServer()
    main_of(tmp_path / "taken", server, FakeSession("s0"))._checkpoint_end()
    assert server.may_end
    assert "error[S5" in capsys.readouterr().err


def test_damaged_checkpoint_is_skipped_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server: Any = FakeServer()
    server.restore = lambda _parts: None
    session = FakeSession("s0")
    main = main_of(tmp_path, server, session)
    assert main._write()
    server.ledger = TicketLedger(2, finished_samples=16)
    assert main._write()
    [newest] = tmp_path.glob("step-000000000004.*.data")
    newest.write_bytes(b"\xff" + newest.read_bytes()[1:])
    main._restore()
    assert session.restored == [2]
    assert newest.name in capsys.readouterr().err
