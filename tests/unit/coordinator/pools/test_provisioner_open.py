"""Opening the pools of a coordinator that was started with other pools before."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.coordinator.pools.provisioner import Provisioner, open_pools
from shoal.coordinator.service import CoordinatorService
from shoal.coordinator.storage.blobs import ENVIRONMENT_BLOBS, Blobs
from shoal.core.provisioning import events as pe
from shoal.core.provisioning.state import RELEASING, RUNNING, SUBMITTED, Allocation
from shoal.store.journal import Journal
from shoal.store.sqlite_views import SqliteViews
from shoal.wire import credentials, pool_files


def test_lower_limit_releases_allocations_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    credentials.write(tmp_path / "token", credentials.Credentials("secret"))
    pool_files.write_pools(tmp_path, pool_files.CoordinatorPools({"farm": {"engine": "local", "limit": 1}}))
    service = CoordinatorService(tmp_path, Journal(tmp_path), SqliteViews(tmp_path), "here")
    had = {
        name: Allocation(name, "farm", 1, RUNNING, at, handle=str(tmp_path / name))
        for name, at in (("a", 1.0), ("b", 2.0))
    }
    service.state.provisioning = replace(service.state.provisioning, allocations=had)
    done: list[pe.Instruction] = []
    monkeypatch.setattr(Provisioner, "carry_out", lambda _self, instruction: done.append(instruction))

    async def open_and_close() -> None:
        opened = open_pools(service, tmp_path)
        assert opened is not None
        assert service.state.provisioning.allocations["b"].status == RELEASING
        await opened.close(release_all=False)

    asyncio.run(open_and_close())
    service.close()
    assert [i.allocation for i in done if isinstance(i, pe.CancelAllocation)] == ["b"]


def test_allocations_of_a_removed_pool_are_kept_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    credentials.write(tmp_path / "token", credentials.Credentials("secret"))
    tables = {"yard": {"engine": "local"}, "farm": {"engine": "local", "limit": 2}}
    pool_files.write_pools(tmp_path, pool_files.CoordinatorPools(tables, retired=("farm",)))
    service = CoordinatorService(tmp_path, Journal(tmp_path), SqliteViews(tmp_path), "here")
    running = {"a": Allocation("a", "farm", 1, RUNNING, 1.0, handle=str(tmp_path / "a"))}
    service.state.provisioning = replace(service.state.provisioning, allocations=running)

    async def open_and_close() -> None:
        opened = open_pools(service, tmp_path)
        assert opened is not None
        assert service.state.provisioning.allocations["a"].status == RUNNING
        pools = service.state.provisioning.pools
        assert {name: (pool.limit, pool.retired) for name, pool in pools.items()} == {
            "yard": (8, False),
            "farm": (0, True),
        }
        await opened.close(release_all=False)

    asyncio.run(open_and_close())
    service.close()


@pytest.mark.parametrize("allocated", [False, True])
def test_environments_are_kept_while_an_allocation_may_download_them(
    allocated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    credentials.write(tmp_path / "token", credentials.Credentials("secret"))
    pool_files.write_pools(tmp_path, pool_files.CoordinatorPools({"farm": {"engine": "local"}}))
    digest = Blobs(tmp_path / ENVIRONMENT_BLOBS).add(b"a wheel")
    service = CoordinatorService(tmp_path, Journal(tmp_path), SqliteViews(tmp_path), "here")
    queued = {"a": Allocation("a", "farm", 1, SUBMITTED, 1.0, handle="job")} if allocated else {}
    service.state.provisioning = replace(service.state.provisioning, allocations=queued)

    async def open_and_close() -> None:
        opened = open_pools(service, tmp_path)
        assert opened is not None
        await opened.close(release_all=False)

    asyncio.run(open_and_close())
    service.close()
    assert Blobs(tmp_path / ENVIRONMENT_BLOBS).missing([digest]) == ([] if allocated else [digest])
