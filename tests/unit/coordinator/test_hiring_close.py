"""The end of a coordinator: what it writes down then is written like everything else, one event at a time."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from shoal.coordinator.hiring import Hiring
from shoal.coordinator.service import Service
from shoal.core import supply_events as se
from shoal.engines.engine import Seen
from shoal.store.journal import Journal
from shoal.store.views import Views


class Empty:
    """An engine that has nothing."""

    def watch(self, _tag: str) -> list[Seen]:
        return []

    def close(self) -> None:
        return


def test_that_a_pool_is_closed_is_journaled_by_the_thread_that_journals_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(tmp_path, Journal(tmp_path), Views(tmp_path), "here")
    told: dict[type, int] = {}

    def record(_run: str, event: Any) -> None:
        told[type(event)] = threading.get_ident()

    monkeypatch.setattr(service, "record", record)

    async def live() -> None:
        await Hiring(service, "tag", {"lab": Empty()}, lambda _: None).close(end_all=True)  # type: ignore[dict-item,arg-type,return-value]

    asyncio.run(live())
    service.close()
    assert told == {se.PoolClosed: threading.get_ident()}
