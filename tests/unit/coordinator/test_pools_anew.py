"""A coordinator that is started with other pools than before."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.coordinator.pools.provisioner import Provisioner, open_pools
from shoal.coordinator.service import CoordinatorService
from shoal.coordinator.storage.blobs import STOWED, Blobs
from shoal.core.provisioning import events as se
from shoal.core.provisioning.state import RELEASING, RUNNING, SUBMITTED, Allocation
from shoal.store.journal import Journal
from shoal.store.sqlite_views import SqliteViews
from shoal.wire import credentials, pool_files


def test_what_a_lower_limit_gives_back_is_ended_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    credentials.write(tmp_path / "token", credentials.Credentials("secret"))
    pool_files.write(tmp_path, pool_files.CoordinatorPools({"farm": {"engine": "local", "limit": 1}}))
    service = CoordinatorService(tmp_path, Journal(tmp_path), SqliteViews(tmp_path), "here")
    had = {
        name: Allocation(name, "farm", 1, RUNNING, at, handle=str(tmp_path / name))
        for name, at in (("a", 1.0), ("b", 2.0))
    }
    service.runs.supply = replace(service.runs.supply, allocations=had)
    done: list[se.Instruction] = []
    monkeypatch.setattr(Provisioner, "carry_out", lambda _self, instruction: done.append(instruction))

    async def live() -> None:
        opened = open_pools(service, tmp_path)
        assert opened is not None
        assert service.runs.supply.allocations["b"].status == RELEASING
        await opened.close(end_all=False)

    asyncio.run(live())
    service.close()
    assert [one.allocation for one in done if isinstance(one, se.CancelAllocation)] == ["b"]


@pytest.mark.parametrize("hired", [False, True])
def test_what_environments_are_made_of_stays_while_a_hire_may_fetch_it(
    hired: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    credentials.write(tmp_path / "token", credentials.Credentials("secret"))
    pool_files.write(tmp_path, pool_files.CoordinatorPools({"farm": {"engine": "local"}}))
    digest = Blobs(tmp_path / STOWED).add(b"a wheel")
    service = CoordinatorService(tmp_path, Journal(tmp_path), SqliteViews(tmp_path), "here")
    queued = {"a": Allocation("a", "farm", 1, SUBMITTED, 1.0, handle="job")} if hired else {}
    service.runs.supply = replace(service.runs.supply, allocations=queued)

    async def live() -> None:
        opened = open_pools(service, tmp_path)
        assert opened is not None
        await opened.close(end_all=False)

    asyncio.run(live())
    service.close()
    assert Blobs(tmp_path / STOWED).missing([digest]) == ([] if hired else [digest])
