"""With an evaluator, trainers are told that all is over only when the end is in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.core.data.sample_order import SampleOrder
from shoal.core.parameter_server.ticket_ledger import TicketLedger
from shoal.core.placement import LEDGER
from shoal.settings import RunSettings
from shoal.store import checkpoint
from shoal.store.blob_store import open_store
from shoal.worker.parameter_server.server_main import END_TRIES, _ServerMain

ORDER = SampleOrder(samples=32, size=8, epochs=1)


class Served:
    """A server that keeps the ledger, as its service sees it."""

    def __init__(self, *, finished: int = 32, leads: bool = True, settles_after: int = 0) -> None:
        self.leads, self.sealed = leads, True
        self.ledger = TicketLedger(2, finished_samples=finished)
        self.gathered = 0
        self._settles_after = settles_after

    def gather(self) -> Any:
        self.gathered += 1
        if self.gathered <= self._settles_after:
            return None
        return {LEDGER: (msgspec.msgpack.encode(self.ledger), []), 1: (b"shard", [np.zeros(4, np.uint8)])}


def service(path: Path, server: Any, *, evaluator: bool = True) -> Any:
    session: Any = SimpleNamespace(
        settings=RunSettings(evaluator=evaluator),
        me="local/server-0",
        environment=SimpleNamespace(run="r"),
        placement=SimpleNamespace(number=3),
        report_checkpoint=lambda *_told: None,
    )
    keeper = SimpleNamespace(where=str(path), open=lambda: open_store(str(path)))
    return _ServerMain(session, keeper, server, ORDER)  # type: ignore[arg-type]


def written(path: Path) -> list[int]:
    return [entry.step for entry in checkpoint.entries(open_store(str(path)))]


def test_the_end_is_written_before_it_is_told(tmp_path: Path) -> None:
    server = Served()
    served = service(tmp_path, server)
    assert not server.sealed
    served._seal_if_over()
    assert server.sealed
    assert written(tmp_path) == [4]


@pytest.mark.parametrize("server", [Served(finished=31), Served(leads=False)])
def test_it_is_not_written_before_the_end_or_by_others(tmp_path: Path, server: Served) -> None:
    service(tmp_path, server)._seal_if_over()
    assert not server.sealed
    assert server.gathered == 0


def test_without_an_evaluator_nobody_waits(tmp_path: Path) -> None:
    server = Served()
    service(tmp_path, server, evaluator=False)._seal_if_over()
    assert server.sealed
    assert written(tmp_path) == []


def test_an_end_that_is_written_already_is_not_written_again(tmp_path: Path) -> None:
    server = Served()
    served = service(tmp_path, server)
    served._write()
    served._seal_if_over()
    assert server.sealed
    assert server.gathered == 1


def test_while_parts_change_places_it_is_tried_again(tmp_path: Path) -> None:
    server = Served(settles_after=2)
    served = service(tmp_path, server)
    for _ in range(2):
        served._seal_if_over()
        assert not server.sealed
    served._seal_if_over()
    assert server.sealed
    assert written(tmp_path) == [4]


def test_an_end_that_cannot_be_had_holds_up_nobody_for_long(tmp_path: Path) -> None:
    server = Served(settles_after=10**6)
    served = service(tmp_path, server)
    for _ in range(END_TRIES):
        assert not server.sealed
        served._seal_if_over()
    assert server.sealed


def test_an_end_that_cannot_be_written_holds_up_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("no directory")
    server = Served()
    service(tmp_path / "taken", server)._seal_if_over()
    assert server.sealed
    assert "error[S5" in capsys.readouterr().err


def test_a_damaged_checkpoint_that_is_passed_over_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server: Any = Served()
    server.restore = lambda _parts: None
    served = service(tmp_path, server)
    restored: list[int | None] = []
    served._session.set_phase, served._session.restored = lambda _name: None, restored.append
    assert served._write()
    server.ledger = TicketLedger(2, finished_samples=16)
    assert served._write()
    [newest] = tmp_path.glob("step-000000000004.*.data")
    newest.write_bytes(b"\xff" + newest.read_bytes()[1:])
    served._restore()
    assert restored == [2]
    assert newest.name in capsys.readouterr().err
